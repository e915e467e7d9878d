"""Over gloo, if all ranks are on one host: each reads what is for it from the others' memory.

gloo sends between processes of one machine over TCP, which copies twice in the kernel. Here a rank
copies once, from where the data is to where it is needed. What is exchanged, and the order in which
it is added up, are those of the pairs, and so are the bits.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fsdp.core import torch_internals
from lightning_fsdp.core.engine.communicator import LocalRegion, Pending, Works, collective
from lightning_fsdp.core.ranks import pairs
from lightning_fsdp.core.ranks.lines import Lines, Refused, Stretches, Take
from lightning_fsdp.core.ranks.pairs import Parts, Span

_log = logging.getLogger(__name__)

_BLOCK_NUMEL = 2**18  # read and added up at a time, so that it is still in a cache


class OneHostCommunicator(pairs.PairCommunicator):
    """Every rank reads what every other rank has for it; they send in pairs if not all of them can.

    Attributes:
        refusal: Why they send instead, the same on all ranks; empty if they read; ``None`` before
            they have tried.
        lines: The lines to the other ranks, if they read.
    """

    refusal: str | None = None
    lines: Lines | None = None

    def connect(self, *, may_read: bool = True) -> None:
        """Find out whether all ranks can read, and log it; only the first call does anything.

        Collective over the group, whose ranks have agreed to use it.

        Args:
            may_read: Whether the user permits it.
        """
        if self.refusal is not None or self.world_size == 1:
            return
        refusal = "comm='pairs'"
        if may_read:
            try:
                what, refusal = f"first exchange {self.where}", ""
                self.lines = collective(what, "every rank", Lines, self.group)
                self._shown = torch_internals.likeness_of(self.group)
                weakref.finalize(self.group, self.lines.close)  # also when the process exits
            except Refused as refused:
                refusal = str(refused)
        self.refusal = refusal
        if self.rank == 0:
            way = f"send in pairs: {refusal}" if refusal else "read each other's memory"
            _log.info("ranks %s of %d %s", list(self.ranks), self.mesh_size, way)

    def gather(self, whole: Tensor, unit_name: str) -> Pending:
        """See :meth:`Communicator.gather`; an interrupt during the start breaks it off."""
        try:
            return super().gather(whole, unit_name)
        except BaseException:  # or the memory would be freed while peers read it
            self.break_off()
            raise

    def break_off(self) -> None:
        """End all lines, so that no peer trusts what it reads from now on."""
        if self.lines is not None:
            self.lines.hang_up("this rank was interrupted")

    def exchange(
        self, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[Tensor]], what: str
    ) -> None:
        """All-to-all of parts, without packing them; see ``exchange.py``. Synchronous."""
        to, into = ({p: parts[p] for p in self._peers()} for parts in (outgoing, incoming))
        where = f"{what} {self.where}"
        try:
            tag = pairs.tag_of(f"all_to_all {what}", reduces=False)
            Pending(where, self._exchange(where, to, into, tag), Tensor).join()  # has no result
        except BaseException:  # what peers still read may change from now on
            self.break_off()
            raise

    def _reduce(self, region: LocalRegion, what: str) -> Pending:
        if self.lines is None:
            return super()._reduce(region, what)
        keeps, mine, to = self._cut(region)
        shard = region.empty(region.layout.shard_numel, region.dtype)
        like = {peer: [span.data for span in mine] for peer in to}  # peers' parts are as long
        tag = pairs.tag_of(f"{region.unit_name} {region.sent_dtype}", reduces=True)
        take = functools.partial(_take_mean, mine, self.rank, shard, region.sent_dtype)
        return Pending(what, self._exchange(what, to, like, tag, take), lambda: shard, keeps=keeps)

    def _exchange(
        self, what: str, to: Parts, into: Parts, tag: int, take: Take | None = None
    ) -> Works:
        if self.lines is None:
            return super()._exchange(what, to, into, tag)
        assert self.group is not None, "the property raises if the group was destroyed"
        # The sends and receives of the pairs, for profilers and whatever else counts calls, on a
        # group that does nothing.
        pairs.send_and_receive(self._shown, what, to, into, tag)
        sizes = {peer: [part.nbytes for part in parts] for peer, parts in into.items()}
        try:
            return self.lines.start(tag, to, sizes, take or functools.partial(_take, into))
        except BaseException:  # else peers would wait for what was not posted
            self.break_off()
            raise


def _take(incoming: Parts, stretches: Stretches) -> None:
    for peer, parts in incoming.items():
        for part, stretch in zip(parts, stretches[peer], strict=True):
            stretch.read(part.data_ptr(), stretch.nbytes)


@torch.no_grad()
def _take_mean(
    mine: list[Span], rank: int, shard: Tensor, sent_dtype: torch.dtype, stretches: Stretches
) -> None:
    """Read the peers' parts of a shard, and write the mean over all ranks, by blocks."""
    pairs.zero_padding(shard, mine)
    scratch = torch.empty(len(stretches), _BLOCK_NUMEL, dtype=sent_dtype, device="cpu")
    for index, span in enumerate(mine):
        for start in range(0, span.data.numel(), _BLOCK_NUMEL):
            own = span.data[start : start + _BLOCK_NUMEL]
            block = shard.narrow(0, span.start + start, own.numel())
            rows = dict(zip(stretches, scratch[:, : own.numel()], strict=True))
            if sent_dtype == shard.dtype:  # the sum is made in the first row: let that be the shard
                rows[min(rows)] = block
            for peer, row in rows.items():
                stretches[peer][index].read(row.data_ptr(), row.nbytes, start * row.itemsize)
            result = pairs.mean(rows, [Span(0, own.numel(), own)], rank, shard.dtype)
            block.copy_(result)  # which does nothing if the result is the block
