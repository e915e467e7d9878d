"""What torch's engines gather together: units, beside modules that have to be gathered alone.

FSDP(block)           bf16, frozen
  q_proj.base_layer
  FSDP(lora_A)        fp32, trained: gathered alone
  FSDP(lora_B)
  FSDP(gate)          the model around calls it, too: gathered alone, for each call

FSDP1 flattens parameters of one dtype. FSDP2 reduces gradients of one dtype: there, frozen
parameters may have another, and these adapters stay in their block. Under both, a parameter is in
one unit, and whole while that computes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, islice

import torch
from torch import nn

from lightning_fsdp.core.grouping import UnitPlan, plan_units
from lightning_fsdp.units import UnitSelector, find_units, has_forward

_FSDP2 = ", or fsdp2_zero3, where frozen ones may have another"

_Units = list[list[nn.Module]]


def gathered_together(
    root: nn.Module,
    selector: UnitSelector,
    form: Callable[[_Units, set[nn.Parameter]], _Units],
    *,
    trained_only: bool = False,
) -> _Units:
    """The modules that are gathered together, inner ones first.

    Args:
        root: The whole model.
        selector: What the user chose.
        form: Makes an engine's units of those that the core would choose, some of which may be
            empty, and of the parameters that are gathered alone.
        trained_only: As in :func:`of_other_dtypes`.
    """
    found = [modules for _, modules in find_units(root, selector)]
    shared = of_several_units(root, found)
    apart = {parameter for module in shared for parameter in module.parameters()}
    rest = form([[m for m in modules if m not in shared] for modules in found], apart)
    units = [*([m] for m in shared), *(unit for unit in rest if stands_alone(root, unit, apart))]
    alone = of_other_dtypes(root, units, trained_only=trained_only)
    units = [*([m] for m in alone), *([m for m in unit if m not in alone] for unit in units)]
    return sorted(filter(None, units), key=lambda unit: max(len(list(m.modules())) for m in unit))


def of_other_dtypes(
    root: nn.Module, units: Sequence[Sequence[nn.Module]], *, trained_only: bool = False
) -> list[nn.Module]:
    """Modules whose parameters are not of the dtype that most elements around them have.

    Args:
        root: The whole model.
        units: Modules inside it that are gathered together, inner ones first.
        trained_only: Frozen parameters may have any dtype (FSDP2).

    Raises:
        NotImplementedError: Such parameters are in a module that cannot be gathered alone.
    """
    named = [("", list(modules)) for modules in units if root not in modules]
    plans = plan_units(root, [*named, ("", [root])], set(), set())
    found = (module for plan in plans for module in _inside(plan, trained_only))
    return list(dict.fromkeys(found))


def of_several_units(root: nn.Module, units: Sequence[Sequence[nn.Module]]) -> list[nn.Module]:
    """Modules that a unit holds and what is around it, or beside it, calls; inner ones first.

    Those of units that run one after another are left out, as these may be gathered together; so
    are those without a forward, and those that have a weight in common with others.

    Args:
        root: The whole model.
        units: Modules inside it that are gathered together, inner ones first.
    """
    reached_by: defaultdict[nn.Module, list[Sequence[nn.Module]]] = defaultdict(list)
    stops: set[nn.Module] = set()
    for modules in (*units, [root]):
        seen = set(stops)  # ``named_modules`` leaves these out with all inside, and adds to them
        for _, module in chain.from_iterable(outer.named_modules(seen) for outer in modules):
            reached_by[module].append(modules)
        stops.update(modules)
    shared = [m for m, users in reached_by.items() if _nest(users) and _is_apart(root, m)]
    inside = {inner for module in shared for inner in _below(module)}
    if outermost := [module for module in shared if module not in inside]:
        # Of what is inside of them, others may call a part.
        return [*of_several_units(root, [*([m] for m in outermost), *units]), *outermost]
    return []


def stands_alone(
    root: nn.Module, unit: Sequence[nn.Module], apart: Collection[nn.Parameter]
) -> bool:
    """Whether a unit can be gathered by itself; else it is left to what encloses it.

    Args:
        root: The whole model.
        unit: Modules that are gathered together.
        apart: Parameters that are gathered alone, wherever they are.
    """
    own = {p for module in unit for p in module.parameters()}.difference(apart)
    return not _nest([[m] for m in unit]) and own.isdisjoint(
        p for _, m in root.named_modules(set(unit)) for p in m._parameters.values()
    )


def _nest(units: Sequence[Sequence[nn.Module]]) -> bool:
    """Whether a module of a unit is inside of another unit."""
    firsts = {module: number for number, unit in enumerate(units) for module in unit}
    inside = ((m, number) for number, unit in enumerate(units) for o in unit for m in _below(o))
    return len(units) > 1 and any(firsts.get(m, number) != number for m, number in inside)


def _below(module: nn.Module) -> Iterator[nn.Module]:
    return islice(module.modules(), 1, None)


def _is_apart(root: nn.Module, module: nn.Module) -> bool:
    """Whether a module is called, and has parameters, which are registered nowhere else."""
    own, inside = set(module.parameters()), set(module.modules())
    others = (m for m in root.modules() if m not in inside)
    return (
        bool(own)
        and has_forward(module)
        and own.isdisjoint(p for other in others for p in other._parameters.values())
    )


def _inside(plan: UnitPlan, trained_only: bool) -> list[nn.Module]:
    counted = {p: sites for p, sites in plan.sites.items() if p.requires_grad or not trained_only}
    counts: Counter[torch.dtype] = Counter()
    for parameter in counted:
        counts[parameter.dtype] += parameter.numel()
    main = max(counts, key=counts.__getitem__, default=None)
    found = []
    for parameter, sites in counted.items():
        for module in (site.module for site in sites if parameter.dtype != main):
            # Torch's own layers are read by nobody but their forward; DoRA's read each other.
            kind = type(module)
            is_layer = kind.__module__.startswith("torch.nn.") and has_forward(module)
            dtypes = {inner.dtype for inner in module.parameters()}
            if not is_layer or len(sites) > 1 or dtypes != {parameter.dtype}:
                engine, others = ("FSDP2", "") if trained_only else ("FSDP1", _FSDP2)
                raise NotImplementedError(
                    f"{engine}: expected one dtype in the unit of {plan.names[parameter]!r}, got "
                    f"{main} and, in a {kind.__name__}, which cannot be gathered alone, "
                    f"{parameter.dtype}. Give both one dtype (peft: autocast_adapter_dtype=False), "
                    f"or use scratch_fsdp{others}."
                )
            found.append(module)
    return found
