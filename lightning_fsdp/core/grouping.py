"""Modules of units -> flat parameters: which parameters are gathered together. Changes nothing.

A unit's parameters are cut into flat parameters by dtype, by ``requires_grad``, and by the set of
units that use them: a weight tied across units is a flat parameter of its own, gathered alone for
each use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_fsdp.core.engine.sharded import Sharded
from lightning_fsdp.core.engine.unit import Site


@dataclass(eq=False)
class UnitPlan:
    """One unit to be.

    Attributes:
        name: Original name of the first module.
        modules: The modules whose forward needs the parameters.
        names: Original name of every parameter of the module that is being sharded.
        sites: Every place where a parameter of the unit is registered, by parameter.
    """

    name: str
    modules: list[nn.Module]
    names: dict[Tensor, str]
    sites: dict[Tensor, list[Site]] = field(default_factory=dict)

    def site_modules(self) -> Iterator[nn.Module]:
        """The module of every place; one with several places comes several times."""
        return (site.module for sites in self.sites.values() for site in sites)


@dataclass(frozen=True)
class FlatParameterPlan:
    """Parameters that share one flat region, and the units that use it."""

    parameters: list[Tensor]
    users: list[UnitPlan]


def plan_units(
    root: nn.Module,
    units: Sequence[tuple[str, list[nn.Module]]],
    ignored: set[nn.Parameter],
    managed: set[nn.Module],
) -> list[UnitPlan]:
    """Assign every parameter below ``root`` to the unit of the innermost module that encloses it.

    Args:
        root: The module that is being sharded.
        units: Name and modules per unit, inner ones first, as ``find_units`` gives them.
        ignored: Parameters to leave alone.
        managed: Modules that earlier calls made part of a unit; their subtrees are left alone.
    """
    names: dict[Tensor, str] = {p: name for name, p in root.named_parameters()}
    plans = [UnitPlan(name, modules, names) for name, modules in units]
    taken_by: dict[UnitPlan, set[nn.Module]] = {}
    for plan in plans:
        tree = {inner for outer in plan.modules for inner in outer.modules()}
        # Modules of units inside are left out. A module that two blocks share is in both units.
        inside = [taken for other, taken in taken_by.items() if not tree.isdisjoint(other.modules)]
        taken = taken_by[plan] = managed.union(*inside)
        outermost = [m for m in plan.modules if not any(m in other for other in taken_by.values())]
        # ``named_modules(taken)`` leaves out the modules in ``taken`` with all that is inside of
        # them, and adds those that it yields.
        for _, module in chain.from_iterable(outer.named_modules(taken) for outer in outermost):
            for attribute, parameter in module._parameters.items():
                if parameter is not None and parameter not in ignored:
                    plan.sites.setdefault(parameter, []).append(Site(module, attribute))
    return [plan for plan in plans if plan.sites]


def cut_flat_params(plans: Sequence[UnitPlan]) -> list[FlatParameterPlan]:
    """Cut the units' parameters into flat parameters, in order; sharded ones have theirs already.

    Every second block is laid out backwards. A rank that holds the large matrices of one block then
    holds the small ones of the next, so that owners of whole tensors (``optimizers/owners.py``)
    have equal work where most of each tensor lies. Two copies of a model have the same slices: what
    counts is a block's number in its list, not how many units there are before it.
    """
    users: dict[Tensor, list[UnitPlan]] = {}
    for plan in plans:
        number = next(filter(str.isdecimal, reversed(plan.name.split("."))), "0")
        for parameter in reversed(plan.sites) if int(number) % 2 else plan.sites:
            if not isinstance(parameter, Sharded):
                users.setdefault(parameter, []).append(plan)
    flat_params: dict[object, FlatParameterPlan] = {}
    for parameter, plans_of_parameter in users.items():
        key = (parameter.dtype, parameter.requires_grad, *plans_of_parameter)
        flat_param = flat_params.setdefault(key, FlatParameterPlan([], plans_of_parameter))
        flat_param.parameters.append(parameter)
    return list(flat_params.values())


def reads_weights_in_backward(module: nn.Module) -> bool:
    """Whether a module's backward may read its weights; a plain embedding's does not."""
    is_plain = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
    # A weight may be computed from parameters, by a parametrization or by the old weight_norm's
    # forward pre-hook; the backward of that reads them.
    return not is_plain or is_parametrized(module) or bool(module._forward_pre_hooks)
