"""State of an optimizer over whole tensors: owners have it, and every rank is to know of it."""

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
from lightning_fsdp.core.optimizers.pieces import Piece
from lightning_fsdp.core.optimizers.travel import collect, grouped
from lightning_fsdp.core.optimizers.whole_tensors import whole_tensors_of
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor


def owned_places(optimizer: Optimizer) -> dict[int, Piece]:
    """By the place of a parameter that owners step whole, who does."""
    if (whole_tensors := whole_tensors_of(optimizer)) is None:
        return {}
    pieces = {id(piece.parameter): piece for piece in whole_tensors.owned()}
    places = enumerate(parameters_of(optimizer))
    return {place: pieces[id(p)] for place, p in places if id(p) in pieces}


def state_of_all(optimizer: Optimizer, state: Mapping[Any, Any]) -> dict[Any, Any]:
    """State of all ranks; each tensor that an owner has is a sharded one, all of it there.

    Collective where there are owners. Numbers, and tensors without dimensions, are the owners'.

    Args:
        optimizer: Any.
        state: This rank's, by the place of the parameter.

    Returns:
        Likewise, in order; of what owners do not step, as it was given.
    """
    owned, every = owned_places(optimizer), dict(state)
    outlines = {
        place: map_tensors(state[place], _outline)
        for place, piece in owned.items()
        if piece.is_here and place in state
    }
    told = {group: collect(group, outlines) for group in grouped(owned.values())}
    for place, piece in owned.items():
        of_owner = told[piece.communicator][piece.owner]
        every.pop(place, None)
        if place in of_owner:
            values = state[place] if piece.is_here else of_owner[place]
            every[place] = map_tensors(values, functools.partial(_all_at_owner, piece))
    return dict(sorted(every.items(), key=lambda e: e[0] if isinstance(e[0], int) else math.inf))


def state_of_rank(
    optimizer: Optimizer, state: Mapping[Any, Any], cut: Callable[[int, str, Any], Any]
) -> dict[Any, Any]:
    """Of a whole state that every rank brings, what this one keeps, in memory of its own.

    Args:
        optimizer: Any.
        state: By the place of the parameter; what is under other keys is the optimizer's own.
        cut: Takes a place, key and value of what owners do not step, and gives this rank's part.
    """
    owned, kept = owned_places(optimizer), {}
    for place, values in state.items():
        if not isinstance(place, int):
            kept[place] = copy.deepcopy(values)
        elif place not in owned:
            kept[place] = {key: cut(place, key, value) for key, value in values.items()}
        elif owned[place].is_here:
            copied = functools.partial(_copied_to, owned[place].local.device)
            kept[place] = map_tensors(values, copied)
    return kept


def kept_by(optimizer: Optimizer) -> Iterator[Tensor]:
    """What an optimizer keeps on this rank: its state, and an owner's copies of cut parameters."""
    yield from tensors_in(*optimizer.state.values())
    whole_tensors = whole_tensors_of(optimizer)
    for piece in [] if whole_tensors is None else whole_tensors.known():
        if piece.is_cut and piece.whole is not None:
            yield piece.whole


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same structure of dicts, lists and tuples, ``function`` of everything else."""
    if isinstance(value, Mapping):
        return {key: map_leaves(function, each) for key, each in value.items()}
    if type(value) in (list, tuple):  # no named ones
        return type(value)(map_leaves(function, each) for each in value)
    return function(value)


def _copied_to(device: torch.device, value: Tensor) -> Tensor:
    return value.detach().to(device if value.dim() else value.device, copy=True)


def _outline(value: Tensor) -> Tensor:
    """What others are told of it: shape and dtype; of a number, all."""
    if not value.dim():
        return value.cpu()
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _all_at_owner(piece: Piece, value: Tensor) -> Tensor:
    """As a sharded tensor of which the owner holds all; a number as it is."""
    if not value.dim():
        return value
    communicator, size = piece.communicator, piece.communicator.world_size
    alone = plan_layout([(piece.name, tuple(value.shape))], 1)
    places = tuple((rank - piece.owner) % size for rank in range(size))  # the owner's is the first
    layout = FlatLayout(alone.slots, alone.shard_numel, size, places)
    spec = ShardSpec(piece.name, 0, layout, communicator, Home(communicator.device))
    mine = value.detach() if piece.is_here else piece.local.new_empty(0, dtype=value.dtype)
    return ShardedTensor(mine, spec)
