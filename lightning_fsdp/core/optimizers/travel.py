"""Sends what ranks hold of tensors to the owners of these, and slices back to every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fsdp.core.engine.communicator import Communicator
from lightning_fsdp.core.optimizers.owned import Owned
from lightning_fsdp.core.ranks.exchange import exchange
from lightning_fsdp.core.ranks.groups import control_of

_BUCKET_BYTES = 2**25
"""How much is sent at once, per rank on average; a single tensor may be larger."""


def grouped(tensors: Iterable[Owned]) -> dict[Communicator, list[Owned]]:
    """Tensors by the ranks that they are cut over, in order."""
    by_group: dict[Communicator, list[Owned]] = {}
    for owned in tensors:
        by_group.setdefault(owned.communicator, []).append(owned)
    return by_group


def collect(communicator: Communicator, mine: Any) -> list[Any]:
    """Gather ``mine`` of each rank of the sharding group, in order. Collective, with replicas."""
    control = control_of(communicator)
    every = control.collect(mine)
    return [every[control.ranks.index(rank)] for rank in communicator.ranks]


def _buckets(tensors: Iterable[Owned]) -> Iterator[list[Owned]]:
    """Those of the tensors that are cut, a few at a time, each time of one dtype."""
    by_dtype: dict[torch.dtype, list[Owned]] = {}
    for owned in tensors:
        if not owned.is_cut:
            continue
        bucket = by_dtype.setdefault(owned.local.dtype, [])
        num_bytes = sum(p.cut.numel for p in [*bucket, owned]) * owned.local.itemsize
        if bucket and num_bytes > _BUCKET_BYTES * owned.communicator.world_size:
            yield by_dtype.pop(owned.local.dtype)
            bucket = by_dtype.setdefault(owned.local.dtype, [])
        bucket.append(owned)
    yield from by_dtype.values()


def to_owners(local_of: Mapping[Owned, Tensor], what: str) -> Iterator[tuple[Owned, Tensor]]:
    """Gather what ranks hold at the owners. Collective over the group of the tensors.

    Args:
        local_of: By tensor, all of one group and the same on every rank, this rank's elements,
            ``(n,)``: parameters, or gradients.
        what: What they are, for the message if it fails.

    Yields:
        Each tensor that this rank owns, with the whole, original shape; a view of this rank's
        elements if it holds all of them.
    """
    for owned, local in local_of.items():
        if owned.is_here and not owned.is_cut:
            yield owned, local.view(owned.cut.shape)
    for bucket in _buckets(local_of):
        communicator = bucket[0].communicator
        flat = {p: local_of[p].new_empty(p.cut.numel) for p in bucket if p.is_here}
        for owned, whole in flat.items():
            whole[slice(*owned.cut.ranges[communicator.rank])].copy_(local_of[owned])
        outgoing, incoming = _by_rank(bucket, local_of, flat)
        exchange(communicator, outgoing, incoming, f"{what} to owners")
        for owned, whole in flat.items():
            yield owned, whole.view(owned.cut.shape)


def from_owners(tensors: Sequence[Owned]) -> None:
    """Write what owners have to every rank's elements. Collective over the group of the tensors."""
    for bucket in _buckets(tensors):
        communicator = bucket[0].communicator
        local_of = {owned: owned.local.detach() for owned in bucket}
        flat = {p: p.whole.view(-1) for p in bucket if p.whole is not None}
        for owned, whole in flat.items():
            local_of[owned].copy_(whole[slice(*owned.cut.ranges[communicator.rank])])
        incoming, outgoing = _by_rank(bucket, local_of, flat)
        exchange(communicator, outgoing, incoming, "parameters from owners")


def _by_rank(
    bucket: Sequence[Owned], local_of: Mapping[Owned, Tensor], flat: Mapping[Owned, Tensor]
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """What is sent between this rank and each other one, as lists by the other's rank.

    Returns:
        This rank's elements of what the other one owns; and the places in ``flat``, of what this
        rank owns, of the elements that the other one holds. To owners, the first are sent and the
        second received; from owners it is the other way round.
    """
    communicator = bucket[0].communicator
    me, ranks = communicator.rank, range(communicator.world_size)
    held = [[local_of[p] for p in bucket if me != p.owner == r] for r in ranks]
    return held, [[w[slice(*p.cut.ranges[r])] for p, w in flat.items() if r != me] for r in ranks]
