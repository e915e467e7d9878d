"""Sends pieces of whole tensors to their owners, and slices back to every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fsdp.core.engine.communicator import Communicator
from lightning_fsdp.core.optimizers.pieces import Piece
from lightning_fsdp.core.ranks.exchange import exchange
from lightning_fsdp.core.ranks.groups import control_of

_BUCKET_BYTES = 2**25
"""How much is sent at once, per rank on average; a single tensor may be larger."""


def grouped(pieces: Iterable[Piece]) -> dict[Communicator, list[Piece]]:
    """Pieces by the ranks that they are cut over, in order."""
    by_group: dict[Communicator, list[Piece]] = {}
    for piece in pieces:
        by_group.setdefault(piece.communicator, []).append(piece)
    return by_group


def collect(communicator: Communicator, mine: Any) -> list[Any]:
    """Gather ``mine`` of each rank of the sharding group, in order. Collective, with replicas."""
    control = control_of(communicator)
    every = control.collect(mine)
    return [every[control.ranks.index(rank)] for rank in communicator.ranks]


def _buckets(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Those of the pieces that are cut, a few at a time, each time of one dtype."""
    by_dtype: dict[torch.dtype, list[Piece]] = {}
    for piece in pieces:
        if not piece.is_cut:
            continue
        bucket = by_dtype.setdefault(piece.local.dtype, [])
        num_bytes = sum(p.cut.numel for p in [*bucket, piece]) * piece.local.itemsize
        if bucket and num_bytes > _BUCKET_BYTES * piece.communicator.world_size:
            yield by_dtype.pop(piece.local.dtype)
            bucket = by_dtype.setdefault(piece.local.dtype, [])
        bucket.append(piece)
    yield from by_dtype.values()


def to_owners(local_of: Mapping[Piece, Tensor], what: str) -> Iterator[tuple[Piece, Tensor]]:
    """Gather what ranks hold at the owners. Collective over the group of the pieces.

    Args:
        local_of: By piece, all of one group and the same on every rank, this rank's elements,
            ``(n,)``: parameters, or gradients.
        what: What they are, for the message if it fails.

    Yields:
        Each piece that this rank owns, with the whole, original shape; a view of this rank's
        elements if it holds all of them.
    """
    for piece, local in local_of.items():
        if piece.is_here and not piece.is_cut:
            yield piece, local.view(piece.cut.shape)
    for bucket in _buckets(local_of):
        communicator = bucket[0].communicator
        flat = {p: local_of[p].new_empty(p.cut.numel) for p in bucket if p.is_here}
        for piece, whole in flat.items():
            whole[slice(*piece.cut.ranges[communicator.rank])].copy_(local_of[piece])
        outgoing, incoming = _by_rank(bucket, local_of, flat)
        exchange(communicator, outgoing, incoming, f"{what} to owners")
        for piece, whole in flat.items():
            yield piece, whole.view(piece.cut.shape)


def from_owners(pieces: Sequence[Piece]) -> None:
    """Write what owners have to every rank's elements. Collective over the group of the pieces."""
    for bucket in _buckets(pieces):
        communicator = bucket[0].communicator
        local_of = {piece: piece.local.detach() for piece in bucket}
        flat = {p: p.whole.view(-1) for p in bucket if p.whole is not None}
        for piece, whole in flat.items():
            local_of[piece].copy_(whole[slice(*piece.cut.ranges[communicator.rank])])
        incoming, outgoing = _by_rank(bucket, local_of, flat)
        exchange(communicator, outgoing, incoming, "parameters from owners")


def _by_rank(
    bucket: Sequence[Piece], local_of: Mapping[Piece, Tensor], flat: Mapping[Piece, Tensor]
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """By other rank: this rank's parts of what that one owns, and its parts of what is owned here.

    The first are sent to owners, and received from them; the second the other way round.
    """
    communicator = bucket[0].communicator
    me, ranks = communicator.rank, range(communicator.world_size)
    held = [[local_of[p] for p in bucket if me != p.owner == r] for r in ranks]
    return held, [[w[slice(*p.cut.ranges[r])] for p, w in flat.items() if r != me] for r in ranks]
