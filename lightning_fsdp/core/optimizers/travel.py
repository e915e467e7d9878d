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
        communicator, none = bucket[0].communicator, local_of[bucket[0]][:0]
        me, ranks = communicator.rank, range(communicator.world_size)
        mine = [piece for piece in bucket if piece.is_here]
        outgoing = [[none, *(local_of[p] for p in bucket if me != p.owner == r)] for r in ranks]
        counts = [sum(p.cut.num_held(r) for p in mine) * (r != me) for r in ranks]
        received = exchange(communicator, outgoing, counts, f"{what} to owners")
        received[me] = torch.cat([none, *(local_of[p] for p in mine)])
        sizes = [[p.cut.num_held(r) for p in mine] for r in ranks]
        parts = [torch.split(flat, of_rank) for flat, of_rank in zip(received, sizes, strict=True)]
        for piece, of_ranks in zip(mine, zip(*parts, strict=True), strict=True):
            in_order = sorted(ranks, key=piece.cut.ranges.__getitem__)
            yield piece, torch.cat([of_ranks[r] for r in in_order]).view(piece.cut.shape)


def from_owners(pieces: Sequence[Piece]) -> None:
    """Write what owners have to every rank's elements. Collective, likewise."""
    for bucket in _buckets(pieces):
        communicator, none = bucket[0].communicator, bucket[0].local[:0].detach()
        me, ranks = communicator.rank, range(communicator.world_size)
        outgoing = [[none] for _ in ranks]
        for piece in bucket:
            if piece.whole is not None:
                flat = piece.whole.view(-1)
                for rank, (start, stop) in enumerate(piece.cut.ranges):
                    if rank == me:
                        piece.local.detach().copy_(flat[start:stop])
                    else:
                        outgoing[rank].append(flat[start:stop])
        others = [[p for p in bucket if me != p.owner == r] for r in ranks]
        counts = [sum(p.local.numel() for p in of_rank) for of_rank in others]
        received = exchange(communicator, outgoing, counts, "parameters from owners")
        for of_rank, flat in zip(others, received, strict=True):
            parts = torch.split(flat, [p.local.numel() for p in of_rank])
            for piece, part in zip(of_rank, parts, strict=True):
                piece.local.detach().copy_(part)
