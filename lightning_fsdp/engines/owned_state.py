"""The state of an optimizer over all ranks, of which owners of whole tensors have their part alone.

Slices of state are sharded tensors. What an optimizer over whole tensors keeps is its owner's
alone, and every rank is told of it.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fsdp.core.engine.home import Home
from lightning_fsdp.core.engine.layout import FlatLayout, plan_layout
from lightning_fsdp.core.engine.sharded import ShardSpec
from lightning_fsdp.core.engine.structures import map_tensors, tensors_in
from lightning_fsdp.core.optimizers.optimizer_classes import parameters_of
from lightning_fsdp.core.optimizers.owned import Owned
from lightning_fsdp.core.optimizers.travel import collect, grouped
from lightning_fsdp.core.optimizers.whole_tensors import whole_tensors_of
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor


def owned_by_number(optimizer: Optimizer) -> dict[int, Owned]:
    """The tensors that owners step whole, by the parameter's number, as in a state dict."""
    if (whole_tensors := whole_tensors_of(optimizer)) is None:
        return {}
    tensors = whole_tensors.stepped_whole()
    numbered = enumerate(parameters_of(optimizer))
    return {number: tensors[id(p)] for number, p in numbered if id(p) in tensors}


def state_of_all(optimizer: Optimizer, state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The state of all ranks, with an owner's tensors as sharded tensors that the owner has wholly.

    Collective if there are owners. Numbers, and tensors without dimensions, are the owners'.

    Args:
        optimizer: Any optimizer.
        state: This rank's state, by the parameter's number.

    Returns:
        State by the parameter's number, in order; what owners do not step is as it was given.
    """
    owned, every = owned_by_number(optimizer), dict(state)
    outlines = {
        number: map_tensors(state[number], _outline)
        for number, tensor in owned.items()
        if tensor.is_here and number in state
    }
    told = {group: collect(group, outlines) for group in grouped(owned.values())}
    for number, tensor in owned.items():
        of_owner = told[tensor.communicator][tensor.owner]
        every.pop(number, None)
        if number in of_owner:
            values = state[number] if tensor.is_here else of_owner[number]
            every[number] = map_tensors(values, functools.partial(_all_at_owner, tensor))
    return dict(sorted(every.items(), key=lambda e: e[0] if isinstance(e[0], int) else math.inf))


def state_of_rank(
    optimizer: Optimizer, state: Mapping[Any, Any], cut: Callable[[int, str, Any], Any]
) -> dict[Any, Any]:
    """What this rank keeps of whole state that is the same on every rank, copied.

    Args:
        optimizer: Any optimizer.
        state: By the parameter's number; what is under other keys belongs to the optimizer itself.
        cut: Called with number, key and value of what owners do not step; returns this rank's part.
    """
    owned, kept = owned_by_number(optimizer), {}
    for number, values in state.items():
        if not isinstance(number, int):
            kept[number] = copy.deepcopy(values)
        elif number not in owned:
            kept[number] = {key: cut(number, key, value) for key, value in values.items()}
        elif owned[number].is_here:
            copied = functools.partial(_copied_to, owned[number].local.device)
            kept[number] = map_tensors(values, copied)
    return kept


def kept_by(optimizer: Optimizer) -> Iterator[Tensor]:
    """The tensors that an optimizer keeps here: its state, and an owner's copies of parameters."""
    yield from tensors_in(*optimizer.state.values())
    whole_tensors = whole_tensors_of(optimizer)
    for tensor in [] if whole_tensors is None else whole_tensors.as_agreed():
        if tensor.is_cut and tensor.whole is not None:
            yield tensor.whole


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """A structure of dicts, lists and tuples with ``function`` applied to everything else."""
    if isinstance(value, Mapping):
        return {key: map_leaves(function, each) for key, each in value.items()}
    if type(value) in (list, tuple):  # not named tuples
        return type(value)(map_leaves(function, each) for each in value)
    return function(value)


def _copied_to(device: torch.device, value: Tensor) -> Tensor:
    return value.detach().to(device if value.dim() else value.device, copy=True)


def _outline(value: Tensor) -> Tensor:
    """What other ranks are told of a tensor: its shape and dtype, or a number's value."""
    if not value.dim():
        return value.cpu()
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _all_at_owner(tensor: Owned, value: Tensor) -> Tensor:
    """A tensor of state as a sharded tensor that the owner holds all of; a number as it is."""
    if not value.dim():
        return value
    communicator, size = tensor.communicator, tensor.communicator.world_size
    alone = plan_layout([(tensor.name, tuple(value.shape))], 1)
    places = tuple((rank - tensor.owner) % size for rank in range(size))  # the owner's is the first
    layout = FlatLayout(alone.slots, alone.shard_numel, size, places)
    spec = ShardSpec(tensor.name, 0, layout, communicator, Home(communicator.device))
    mine = value.detach() if tensor.is_here else tensor.local.new_empty(0, dtype=value.dtype)
    return ShardedTensor(mine, spec)
