"""Modules of units -> flat parameters: which parameters are gathered together. Changes nothing.

A unit's parameters are cut into flat parameters by dtype, by ``requires_grad``, and by the set of
units that use them: a weight tied across units is a flat parameter of its own, gathered alone for
each use.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    One of a module that several units reach, without one of them between, is in all of these.

    Args:
        root: The module that is being sharded.
        units: Name and modules per unit, inner ones first, as ``find_units`` gives them.
        ignored: Parameters to leave alone.
        managed: Modules that earlier calls made units; what is inside of them alone is left alone.
    """
    names: dict[Tensor, str] = {p: name for name, p in root.named_parameters()}
    plans = [UnitPlan(name, modules, names) for name, modules in units]
    stops = set(managed)
    for plan in plans:
        # ``named_modules`` leaves out these modules with all that is inside of them, and adds those
        # that it yields. What is reached on another way, too, is in several units.
        seen = set(stops)
        for _, module in chain.from_iterable(m.named_modules(seen) for m in plan.modules):
            for attribute, parameter in module._parameters.items():
                if parameter is not None and parameter not in ignored:
                    plan.sites.setdefault(parameter, []).append(Site(module, attribute))
        stops.update(plan.modules)
    return [plan for plan in plans if plan.sites]


def cut_flat_params(plans: Sequence[UnitPlan]) -> list[FlatParameterPlan]:
    """Cut the units' parameters into flat parameters, in order; sharded ones have theirs already.

    The order is backwards in every second block.
    """
    users: dict[Tensor, list[UnitPlan]] = {}
    for plan in plans:
        for parameter in reversed(plan.sites) if _is_backwards(plan.name) else plan.sites:
            if not isinstance(parameter, Sharded):
                users.setdefault(parameter, []).append(plan)
    flat_params: dict[object, FlatParameterPlan] = {}
    for parameter, plans_of_parameter in users.items():
        key = (parameter.dtype, parameter.requires_grad, *plans_of_parameter)
        flat_param = flat_params.setdefault(key, FlatParameterPlan([], plans_of_parameter))
        flat_param.parameters.append(parameter)
    return list(flat_params.values())


def _is_backwards(unit_name: str) -> bool:
    """Whether a unit is laid out from its last parameter to its first: every second block is.

    A rank that holds the large matrices of one block then holds the small ones of the next, so that
    owners of whole tensors (``optimizers/owners.py``) have equal work where most of each tensor
    lies. Two copies of a model have the same slices: what counts is a block's number in its list,
    not how many units there are before it.
    """
    number = next(filter(str.isdecimal, reversed(unit_name.split("."))), "0")
    return int(number) % 2 == 1


def reads_weights_in_backward(module: nn.Module) -> bool:
    """Whether a module's backward may read its weights; a plain embedding's does not."""
    is_plain = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
    # A weight may be computed from parameters, by a parametrization or by the old weight_norm's
    # forward pre-hook; the backward of that reads them.
    return not is_plain or is_parametrized(module) or bool(module._forward_pre_hooks)
