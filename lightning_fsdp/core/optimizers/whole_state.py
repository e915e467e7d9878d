"""State of an optimizer over whole tensors: owners have it, and every rank is to know of it."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fsdp.core.engine.communicator import Communicator
from lightning_fsdp.core.engine.structures import map_tensors, tensors_in
from lightning_fsdp.core.optimizers.optimizer_classes import parameters_of
from lightning_fsdp.core.optimizers.pieces import Piece
from lightning_fsdp.core.optimizers.travel import collect, grouped
from lightning_fsdp.core.optimizers.whole_tensors import whole_tensors_of
from lightning_fsdp.core.ranks.exchange import move_each


@dataclass(frozen=True, eq=False)
class Owned:
    """A tensor of state that one rank has whole.

    Attributes:
        owner: That rank.
        communicator: The ranks that its parameter is cut over.
        shape: Of the tensor, whatever its parameter's is.
        value: Itself; ``(0,)`` on the others.
    """

    owner: int
    communicator: Communicator
    shape: torch.Size
    value: Tensor

    def whole(self, value: Tensor, *, rank0_only: bool = False) -> Tensor:
        """A copy on every rank, or on the first of those that train together. Collective.

        Args:
            value: As :attr:`value`, of now or kept since.
            rank0_only: The others get one on the meta device.
        """
        communicator, me = self.communicator, self.communicator.rank
        if rank0_only and me != 0 and me != self.owner:
            return value.new_empty(self.shape, device="meta")
        whole = value.new_empty(self.shape, device=communicator.device)
        if me == self.owner:
            whole.copy_(value)
        parts = {self.owner: whole.view(-1)}
        move_each(communicator, parts, "optimizer state", rank0_only=rank0_only)
        return whole.to("meta") if rank0_only and communicator.mesh_rank != 0 else whole


def owned_places(optimizer: Optimizer) -> dict[int, Piece]:
    """By the place of a parameter that owners step whole, who does."""
    whole_tensors = whole_tensors_of(optimizer)
    if whole_tensors is None:
        return {}
    pieces = {id(piece.parameter): piece for piece in whole_tensors.owned()}
    places = enumerate(parameters_of(optimizer))
    return {place: pieces[id(p)] for place, p in places if id(p) in pieces}


def state_of_all(optimizer: Optimizer, state: Mapping[Any, Any]) -> dict[Any, Any]:
    """State of all ranks, an :class:`Owned` for each tensor that an owner has.

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
            every[place] = map_tensors(values, functools.partial(_owned, piece))
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


def _owned(piece: Piece, value: Tensor) -> Any:
    if not value.dim():
        return value
    mine = value.detach() if piece.is_here else piece.local.new_empty(0, dtype=value.dtype)
    return Owned(piece.owner, piece.communicator, value.shape, mine)
