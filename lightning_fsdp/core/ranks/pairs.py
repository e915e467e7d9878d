"""Over gloo, up to 8 ranks: sends and receives per pair, and a sum in rank order.

gloo's ring algorithms take two to three times as long at these sizes. Large gradients are not
packed but sent from where autograd made them. The sum in rank order gives the same bits whichever
rank owns a shard.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fsdp.core.engine.communicator import (
    Communicator,
    LocalRegion,
    Pending,
    Works,
    collective,
)
from lightning_fsdp.core.engine.layout import FlatLayout
from lightning_fsdp.core.ranks.narrow import sum_dtype

MAX_PAIRWISE_WORLD_SIZE = 8
_LARGE_NUMEL = 2**14  # a message costs about as much as copying this many elements

Parts = Mapping[int, Sequence[Tensor]]
"""By peer, what it gets or what it gives, each ``(n,)``."""


def exchanges_in_pairs(backend: str, world_size: int) -> bool:
    """Whether ranks of a group with this backend and size send to each other in pairs."""
    return backend == "gloo" and world_size <= MAX_PAIRWISE_WORLD_SIZE


class Span(NamedTuple):
    """Elements ``[start, stop)`` of a region (or of a shard).

    Attributes:
        start: First element.
        stop: Past-the-last element.
        data: ``(stop - start,)``.
    """

    start: int
    stop: int
    data: Tensor


class PairCommunicator(Communicator):
    """Every rank sends to every other rank what is for it."""

    def _gather(self, whole: Tensor, what: str, unit_name: str) -> Works:
        shards = whole.view(self.world_size, -1)
        to = {peer: [shards[self.rank]] for peer in self._peers()}
        into = {peer: [shards[peer]] for peer in to}
        return self._exchange(what, to, into, tag_of(unit_name, reduces=False))

    def _reduce(self, region: LocalRegion, what: str) -> Pending:
        (keeps, mine, to), shard_numel = self._cut(region), region.layout.shard_numel
        received = {peer: region.empty(shard_numel, region.sent_dtype) for peer in self._peers()}
        for row in received.values():
            zero_padding(row, mine)
        into = {p: [row[a:b] for a, b, _ in mine] for p, row in received.items()}
        tag = tag_of(f"{region.unit_name} {region.sent_dtype}", reduces=True)
        works = self._exchange(what, to, into, tag)
        finish = functools.partial(mean, received, mine, self.rank, region.dtype)
        return Pending(what, works, finish, keeps=keeps)

    def _cut(self, region: LocalRegion) -> tuple[list[Tensor], list[Span], Parts]:
        """Pack a region: what to keep alive meanwhile, this rank's spans, and the peers' parts."""
        layout, numel = region.layout, region.layout.shard_numel
        spans = [
            Span(*layout.extent(run), region.pack(run))
            for run in cut_into_runs(layout, _LARGE_NUMEL)
        ]
        shards = [cut_out(spans, rank * numel, numel) for rank in range(self.world_size)]
        to = {peer: [span.data for span in shards[peer]] for peer in self._peers()}
        num_bytes = sum(part.nbytes for parts in to.values() for part in parts)
        self.traffic["reduce_scatter"].add(num_bytes)
        return [span.data for span in spans], shards[self.rank], to

    def _exchange(self, what: str, to: Parts, into: Parts, tag: int) -> Works:
        return send_and_receive(self.group, what, to, into, tag)

    def _peers(self) -> list[int]:
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]


def send_and_receive(
    group: dist.ProcessGroup, what: str, to: Parts, into: Parts, tag: int
) -> Works:
    """Start sends to every peer and receives from it, each ``(n,)``, in the same order.

    Returns:
        What waits for each, with its peer.
    """

    def start(peer: int) -> list[dist.Work]:
        return [group.recv([data], peer, tag) for data in into[peer]] + [
            group.send([data], peer, tag) for data in to[peer]
        ]

    # No variable holds a handle before all are started: see FlatParameter.wait_for_unshard.
    return [
        (work.wait, f"rank {peer}")
        for peer in into
        for work in collective(what, f"rank {peer}", start, peer)
    ]


def mean(
    received: dict[int, Tensor], mine: Sequence[Span], rank: int, dtype: torch.dtype
) -> Tensor:
    """The mean over ranks, ``(n,)`` of ``dtype``, summed in rank order; fp16 is summed in fp32.

    Args:
        received: By peer, its part of this rank's shard, ``(n,)``; taken out, to free it.
        mine: This rank's own spans of it; between them lies padding.
        rank: This rank.
        dtype: Of the result.
    """
    # a + b and b + a have the same bits, so the first two terms may change places: the sum starts
    # with a row that was received, so that it can be made in that row's memory.
    first, world_size = min(received), len(received) + 1
    shard = received.pop(first).to(sum_dtype(dtype))
    for peer in range(world_size):
        if peer == rank:
            for span in mine:
                shard[span.start : span.stop].add_(span.data)
        elif peer != first:
            shard.add_(received.pop(peer))
    return shard.div_(world_size).to(dtype)


def cut_out(spans: Sequence[Span], start: int, numel: int) -> list[Span]:
    """What of ``spans`` lies in ``[start, start + numel)``, with offsets from ``start``."""
    cut = []
    for span in spans:
        low, high = max(span.start, start), min(span.stop, start + numel)
        if low < high:
            data = span.data[low - span.start : high - span.start]
            cut.append(Span(low - start, high - start, data))
    return cut


@functools.cache
def tag_of(name: str, *, reduces: bool) -> int:
    """A tag for each name and operation; odd for reductions.

    Messages of two ranks that are about to do different things then never match: they end in the
    group's timeout, and write nothing into the wrong place. Nor do they match the user's own.
    """
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 2 << 1 | reduces


def cut_into_runs(layout: FlatLayout, min_numel: int) -> list[range]:
    """Cut the slots of a layout into runs of neighbours: large ones alone, small ones together.

    Args:
        layout: Layout of a region.
        min_numel: Number of elements from which a slot is a run by itself.

    Returns:
        The indices of each run's slots, in order.
    """
    is_large = [slot.numel >= min_numel for slot in layout.slots]
    firsts = [i for i, large in enumerate(is_large) if large or i == 0 or is_large[i - 1]]
    return [range(a, b) for a, b in zip(firsts, [*firsts[1:], len(is_large)], strict=True)]


def zero_padding(shard: Tensor, spans: Sequence[Span]) -> None:
    """Write zeros to what of a shard, ``(n,)``, lies between its spans, and behind the last."""
    position = 0
    for start, stop in (*(span[:2] for span in spans), (shard.numel(), 0)):
        if start > position:
            shard[position:start].zero_()
        position = stop
