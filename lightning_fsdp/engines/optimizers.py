"""Optimizers that were built before sharding go on to train what sharding has put in their place.

torch's FSDP2 makes new parameters. An optimizer that was built before would go on stepping the old
ones: nothing trains, all old memory stays, and no error is raised.

    with optimizers_follow(model, optimizer):   each parameter of the optimizer becomes a stand-in
        fully_shard(model)                      that knows its place: a module and an attribute
                                                afterwards: what is at that place now

A place, unlike an address, is there on the meta device too, and is the same for all uses of a tied
weight; unlike a name, it stays what it is when a module is compiled or wrapped. The optimizer, its
groups and its entries of state stay the same objects, so whatever was attached to it still is.

A parameter that was replaced is marked. The first step of an optimizer that holds it still, raises.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_fsdp.core.engine.unit import Site
from lightning_fsdp.core.optimizers.optimizer_classes import SCALARS, parameters_of
from lightning_fsdp.core.optimizers.optimizer_guard import no_values, slice_state
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor
from lightning_fsdp.engines.owned_state import owned_by_number

_REPLACED = "_lightning_fsdp_replaced"  # on a parameter that sharding replaced: its name
_MOST_NAMES = 3


@contextmanager
def optimizers_follow(model: nn.Module, *optimizers: Optimizer) -> Iterator[None]:
    """Inside, shard ``model``; afterwards the optimizers hold its sharded parameters.

    For torch's FSDP2. With this package's ``fully_shard``, where parameters stay the same objects,
    it only cuts state that is there already. The optimizers, their groups and schedulers and
    scalers attached to them stay as they are. State is sharded entry by entry; counts go on.
    Inside, the optimizers hold nothing of the model, so that sharding frees as it goes, and a step
    raises. No communication::

        with optimizers_follow(model, optimizer):
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)

    Args:
        model: The outermost module, whose parameters may be on the meta device. It may be
            materialized (``to_empty``) inside or afterwards.
        optimizers: Those built over its parameters. Any other that holds parameters which sharding
            replaces raises at its first step.

    Raises:
        TypeError: Something else than an optimizer.
        ValueError: An optimizer has a parameter that the model does not have, or state without
            values; nothing was changed in the first case.
        RuntimeError: At the end: a parameter is not in the model any more, or a tied one is not
            tied any more.
        NotImplementedError: At the end: state that cannot be sharded.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizers_follow: expected an optimizer, got {optimizer!r}.")
        refuse_foreign(
            optimizer,
            model.parameters(),
            type(model).__name__,
            "Give optimizers_follow the module that holds all that the optimizer trains, e.g. "
            "nn.ModuleList([first, second]).",
        )
    stand_ins = {id(p): _StandIn(p, sites) for p, sites in sites_in(model).items()}
    mark_replaced(dict(model.named_parameters()))
    for optimizer in optimizers:
        hand_over(optimizer, {key: stand_in.parameter for key, stand_in in stand_ins.items()})
    try:
        yield
    finally:
        unmark(model.parameters())
        for optimizer in optimizers:
            _arrive(optimizer, stand_ins.values())


def _arrive(optimizer: Optimizer, stand_ins: Iterable[_StandIn]) -> None:
    """Put what trains now in the place of stand-ins."""
    held = {id(p) for p in parameters_of(optimizer)}
    found = {s: s.look_up() for s in stand_ins if id(s.parameter) in held}
    hand_over(optimizer, {id(s.parameter): parameter for s, parameter in found.items()})
    owned = {id(tensor.parameter) for tensor in owned_by_number(optimizer).values()}
    for stand_in, parameter in found.items():
        if id(parameter) in owned:
            continue
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        for key, value in state.items():
            state[key] = stand_in.shard_state(parameter, key, value)


class _StandIn:
    """What an optimizer holds while the parameter that it trains is being replaced.

    Attributes:
        name: The parameter's.
        shape: Likewise, before sharding.
        sites: Where it is, by name; several if it is tied.
        parameter: ``(0,)``, in the optimizer meanwhile.
    """

    def __init__(self, original: nn.Parameter, sites: dict[str, Site]) -> None:
        self.name, self.shape, self.sites = next(iter(sites)), original.shape, sites
        self.parameter = nn.Parameter(torch.empty(0), requires_grad=False)
        mark_replaced({self.name: self.parameter})

    def look_up(self) -> nn.Parameter:
        """What is in the parameter's places now.

        Raises:
            RuntimeError: Nothing, or not the same in all of them.
        """
        now = {name: cast(nn.Parameter | None, site.get()) for name, site in self.sites.items()}
        first = now[self.name]
        if first is None:
            raise RuntimeError(
                f"optimizers_follow: expected a parameter where {self.name!r} was before sharding, "
                "got none. Shard with fully_shard and leave the modules' attributes as they are."
            )
        for name, parameter in now.items():
            if parameter is not first:
                raise RuntimeError(
                    f"optimizers_follow: expected {self.name!r} and {name!r} to be one parameter, "
                    "as before sharding, got two, which would train apart. Shard the modules that "
                    "share it together: fully_shard([first, second])."
                )
        return first

    def shard_state(self, parameter: nn.Parameter, key: str, value: Any) -> Any:
        """One entry of the optimizer's state as it belongs beside what trains now.

        Raises:
            NotImplementedError: It has another shape than the parameter had, or is sharded already.
            ValueError: It has no values.
        """
        if isinstance(parameter, ShardedTensor):
            return slice_state(parameter, key, value)
        if not isinstance(value, Tensor) or key in SCALARS or value.dim() == 0:
            return value
        if not isinstance(parameter, DTensor) and parameter.shape == self.shape:
            return value  # it was not sharded
        can_shard = isinstance(parameter, DTensor) and not isinstance(value, DTensor)
        if not can_shard or value.shape != parameter.shape:
            raise NotImplementedError(
                f"optimizers_follow: expected state {key!r} of {self.name!r} to be a plain tensor "
                f"of the parameter's shape {tuple(self.shape)}, to be cut as FSDP2 cuts it, got "
                f"{type(value).__name__} {tuple(value.shape)} for a {type(parameter).__name__} "
                f"{tuple(parameter.shape)}. Build this optimizer after sharding."
            )
        if value.is_meta:
            raise ValueError(no_values(self.name, key))
        return shard_like(parameter, value)


def shard_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a plain tensor, in memory of its own, sharded as a DTensor is.

    No communication: every rank has the whole.
    """
    assert isinstance(parameter, DTensor), "FSDP2's parameters are"
    with torch.no_grad():
        sharded = distribute_tensor(
            whole.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        return sharded.to(parameter.device)  # offloaded ones are not where their mesh is


def hand_over(optimizer: Optimizer, successors: Mapping[int, nn.Parameter]) -> None:
    """Let an optimizer hold other parameters, with their groups and state.

    The optimizer, its groups and their lists stay the same objects.

    Args:
        optimizer: Any.
        successors: By the ``id`` of a parameter; others stay.
    """
    for group in optimizer.param_groups:
        group["params"][:] = [successors.get(id(p), p) for p in group["params"]]
    state = {successors.get(id(p), p): values for p, values in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(state)


def refuse_foreign(
    optimizer: Optimizer, parameters: Iterable[Tensor], what: str, advice: str
) -> None:
    """Refuse an optimizer over parameters that are not among those that train.

    Args:
        optimizer: Any.
        parameters: Those that train.
        what: Whose they are.
        advice: What else to do.

    Raises:
        ValueError: Names the first one, as far as it has a name.
    """
    known = {id(p) for p in parameters}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                names = group.get("param_names") or {}  # if it was built from named_parameters()
                name = names[position] if names else parameter.__dict__.get(_REPLACED, "no name")
                raise ValueError(
                    f"{type(optimizer).__name__}: expected parameters of {what} only, got "
                    f"{tuple(parameter.shape)} ({name}) at position {position} of group {index}. "
                    f"{advice}"
                )


def mark_replaced(originals: Mapping[str, nn.Parameter]) -> None:
    """From now on an optimizer's step on these parameters raises.

    Args:
        originals: By name.
    """
    _watch_steps()
    for name, parameter in originals.items():
        parameter.__dict__[_REPLACED] = name


def unmark(parameters: Iterable[nn.Parameter]) -> None:
    """These train; a step on them is right."""
    for parameter in parameters:
        parameter.__dict__.pop(_REPLACED, None)


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_refuse_replaced)


def _refuse_replaced(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    replaced = [p.__dict__[_REPLACED] for p in parameters_of(optimizer) if _REPLACED in p.__dict__]
    if replaced:
        some = ", ".join(map(repr, replaced[:_MOST_NAMES]))
        more = len(replaced) - _MOST_NAMES
        raise RuntimeError(
            f"{type(optimizer).__name__}: expected parameters that train, got {some}"
            f"{f' and {more} more' if more > 0 else ''} as they were before sharding replaced "
            "them. Shard inside of `with optimizers_follow(model, optimizer):` and step after it; "
            "under a strategy, return the optimizer from configure_optimizers."
        )


def sites_in(model: nn.Module) -> dict[nn.Parameter, dict[str, Site]]:
    """Where each parameter is, by name; the first is its own."""
    sites: dict[nn.Parameter, dict[str, Site]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                full_name = f"{prefix}.{name}" if prefix else name
                sites.setdefault(parameter, {})[full_name] = Site(module, name)
    return sites
