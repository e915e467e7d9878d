"""Pieces of whole tensors on their way: to owners, and back to every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from lightning_fsdp.core.engine.communicator import Communicator
from lightning_fsdp.core.optimizers.pieces import Piece
from lightning_fsdp.core.ranks.exchange import exchange

_BUCKET_BYTES = 2**25
"""Of a rank, on average, that travel at once; a tensor of one owner may be larger."""


def grouped(pieces: Iterable[Piece]) -> dict[Communicator, list[Piece]]:
    """By the ranks that they are cut over, in order."""
    by_group: dict[Communicator, list[Piece]] = {}
    for piece in pieces:
        by_group.setdefault(piece.communicator, []).append(piece)
    return by_group


def _buckets(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Those that are cut, of one dtype, a few at a time."""
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


def to_owners(
    pieces: Sequence[Piece], locals_: Sequence[Tensor], what: str
) -> Iterator[tuple[Piece, Tensor]]:
    """Make whole what ranks hold, at owners. Collective over the one group of the pieces.

    Args:
        pieces: Of one group, the same on every rank.
        locals_: ``(n,)``, this rank's elements of each.
        what: They are, for the message if it fails.

    Yields:
        What this rank owns, and the whole, of the original shape; over the memory of this rank's
        elements where they are all.
    """
    local_of = dict(zip(pieces, locals_, strict=True))
    for piece in pieces:
        if piece.is_here and not piece.is_cut:
            yield piece, local_of[piece].view(piece.cut.shape)
    for bucket in _buckets(pieces):
        communicator = bucket[0].communicator
        me, ranks = communicator.rank, range(communicator.world_size)
        flat = {p: local_of[p].new_empty(p.cut.numel) for p in bucket if p.is_here}
        for piece, whole in flat.items():
            whole[slice(*piece.cut.ranges[me])].copy_(local_of[piece])
        outgoing = [[local_of[p] for p in bucket if me != p.owner == r] for r in ranks]
        incoming = [
            [whole[slice(*p.cut.ranges[r])] for p, whole in flat.items() if r != me] for r in ranks
        ]
        exchange(communicator, outgoing, incoming, f"{what} to owners")
        for piece, whole in flat.items():
            yield piece, whole.view(piece.cut.shape)


def from_owners(pieces: Sequence[Piece]) -> None:
    """Write what owners have to every rank's elements. Collective, likewise."""
    for bucket in _buckets(pieces):
        communicator = bucket[0].communicator
        me, ranks = communicator.rank, range(communicator.world_size)
        parts: list[list[Tensor]] = [[] for _ in ranks]
        for piece in bucket:
            if piece.whole is not None:
                flat = piece.whole.view(-1)
                for rank, (start, stop) in enumerate(piece.cut.ranges):
                    parts[rank].append(flat[start:stop])
        own = [p.local.detach() for p in bucket if p.owner == me]
        for local, part in zip(own, parts[me], strict=True):
            local.copy_(part)
        parts[me] = []
        incoming = [[p.local.detach() for p in bucket if me != p.owner == r] for r in ranks]
        exchange(communicator, parts, incoming, "parameters from owners")
