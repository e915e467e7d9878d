"""A tensor that no rank has whole: what this rank holds of it, and how all make it whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor
from lightning_fsdp.engines.owned_state import map_leaves


@dataclass(frozen=True, eq=False)
class Gatherable:
    """One tensor of a state dict. Names of a tied tensor have one in common.

    Attributes:
        name: For messages.
        shape: Of the whole.
        dtype: Of the whole.
        piece: What this rank holds, in the engine's form; shares memory with what is trained.
        make_whole: Turns every rank's piece into the whole; if the second argument says so, for
            rank 0 alone, as far as the engine can. Collective.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    piece: Tensor
    make_whole: Callable[[Tensor, bool], Tensor]

    def whole(self, *, rank0_only: bool = False) -> Tensor:
        """A plain tensor on the host that shares no memory with the module. Collective.

        Args:
            rank0_only: The others throw away what they get, which may have no values.
        """
        with torch.no_grad():
            whole = self.make_whole(self.piece, rank0_only)
            return whole if whole.is_meta else whole.cpu()

    def kept(self) -> Gatherable:
        """The same with the values of now: with a copy of this rank's piece."""
        return replace(self, piece=self.piece.detach().clone())


def gather_all(state: Mapping[Any, Any], *, rank0_only: bool = False) -> dict[Any, Any]:
    """A state dict with whole tensors. Collective.

    Args:
        state: Nested or not.
        rank0_only: The other ranks get tensors on the meta device.
    """

    def whole(gatherable: Gatherable) -> Tensor:
        tensor = gatherable.whole(rank0_only=rank0_only)
        return tensor.to("meta") if rank0_only and dist.get_rank() else tensor

    return map_gatherables(whole, state)


def map_gatherables(
    function: Callable[[Gatherable], Any], state: Mapping[Any, Any]
) -> dict[Any, Any]:
    """A state dict, nested or not, with what ``function`` makes of each ``Gatherable``, once."""
    once = functools.cache(function)
    made: dict[Any, Any] = map_leaves(lambda v: once(v) if isinstance(v, Gatherable) else v, state)
    return made


def gatherable_of(value: Any) -> Any:
    """Of what the core has sharded, or an owner has whole; other tensors are copied to the host."""
    if not isinstance(value, ShardedTensor):
        return value.detach().cpu().clone() if isinstance(value, Tensor) else value

    def make_whole(piece: Any, rank0_only: bool) -> Tensor:
        whole: Tensor = piece.full_tensor(rank0_only=rank0_only)
        return whole

    return Gatherable(value.spec.name, value.shape, value.dtype, value, make_whole)
