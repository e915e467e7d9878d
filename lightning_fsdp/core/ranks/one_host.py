"""Over gloo, where all ranks are on one host: each reads what it is to get from the others' memory.

gloo sends between processes of one machine over TCP, which copies twice in the kernel. Here a rank
copies once, from where the data lies to where it is to be. What is exchanged, and in which order it
is added up, is that of the pairs, so the bits are too.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_fsdp.core import torch_internals
from lightning_fsdp.core.engine.communicator import LocalRegion, Pending, Works, collective
from lightning_fsdp.core.engine.layout import complement
from lightning_fsdp.core.ranks.lines import Exchange, Lines, Places
from lightning_fsdp.core.ranks.neighbours import connect
from lightning_fsdp.core.ranks.pairs import PairCommunicator, Piece, cut_out, mean, tag_of

_log = logging.getLogger(__name__)

_BLOCK_NUMEL = 2**18  # read and added up at a time: what caches hold


class OneHostCommunicator(PairCommunicator):
    """Every rank reads what each other rank has for it; in pairs, where not all of them can.

    Attributes:
        refusal: Why they do not, the same on all ranks; ``None`` before they have tried, empty
            where they do.
    """

    refusal: str | None = None
    _lines: Lines | None = None

    @property
    def reads_memory(self) -> bool:
        """Whether it does."""
        return self._lines is not None

    def connect(self, *, may_read: bool = True) -> None:
        """Find out whether all ranks can, and say so in the log; nothing the next times.

        Collective over the group; ranks have agreed that they use it.

        Args:
            may_read: Whether the user permits it.
        """
        if self.refusal is not None or self.world_size == 1:
            return
        found: Lines | str = "comm='pairs'"
        if may_read:
            with collective(f"first exchange {self.where}", "every rank"):
                found = connect(self.group)
        if isinstance(found, Lines):
            self.refusal, self._lines = "", found
            weakref.finalize(self.group, found.close)  # also when the process exits
            self._shown = torch_internals.likeness_of(self.group)
        else:
            self.refusal = found
        if self.rank == 0:
            way = (
                f"send to each other in pairs: {found}"
                if self.refusal
                else "read each other's memory"
            )
            _log.info("ranks %s of %d %s", list(self.ranks), self.mesh_size, way)

    def gather(self, whole: Tensor, unit_name: str) -> Pending:
        """As everywhere; what is interrupted in between breaks it off."""
        try:
            return super().gather(whole, unit_name)
        except BaseException:  # or the memory would be freed while peers read it
            self.break_off()
            raise

    def break_off(self) -> None:
        """Let no peer take for true what it reads from now on: all lines end."""
        if self._lines is not None:
            self._lines.hang_up("this rank was interrupted")

    def exchange(
        self, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[Tensor]], what: str
    ) -> None:
        """All-to-all of parts that lie where they are; see ``exchange.py``. Synchronous."""

        def take(places: Places) -> None:
            for peer, found in places.items():
                for part, place in zip(incoming[peer], found, strict=True):
                    place.read(part.data_ptr(), place.nbytes)

        peers, tag = self._peers(), tag_of(f"all_to_all {what}", reduces=False)
        to, into = {peer: outgoing[peer] for peer in peers}, {p: incoming[p] for p in peers}
        try:
            for work, peer in self._start(tag, to, into, take):
                with collective(f"{what} {self.where}", peer):
                    work.wait()
        except BaseException:  # what peers still read may change from now on
            self.break_off()
            raise

    def _gather(self, whole: Tensor, slots: Tensor, what: str, unit_name: str) -> Works:
        if self._lines is None:
            return super()._gather(whole, slots, what, unit_name)

        def take(places: Places) -> None:
            for peer, (place,) in places.items():
                place.read(slots[peer].data_ptr(), place.nbytes)

        mine, tag = slots[self.rank], tag_of(unit_name, reduces=False)
        return self._start(
            tag,
            {peer: [mine] for peer in self._peers()},
            {peer: [slots[peer]] for peer in self._peers()},
            take,
        )

    def _reduce(self, region: LocalRegion, what: str) -> Pending:
        if self._lines is None:
            return super()._reduce(region, what)
        pieces, shards = self._pieces(region)
        mine, shard = shards[self.rank], region.empty(region.layout.shard_numel, region.dtype)
        works = self._start(
            tag_of(f"{region.unit_name} {region.sent_dtype}", reduces=True),
            {peer: [piece.data for piece in shards[peer]] for peer in self._peers()},
            {peer: [piece.data for piece in mine] for peer in self._peers()},  # as many and as long
            functools.partial(_take_mean, mine, self.rank, shard, region.sent_dtype),
        )
        return Pending(what, works, lambda: shard, keeps=[piece.data for piece in pieces])

    def _start(
        self,
        tag: int,
        outgoing: Mapping[int, Sequence[Tensor]],
        like_incoming: Mapping[int, Sequence[Tensor]],
        take: Callable[[Places], None],
    ) -> Works:
        assert self.group is not None, "it raises where the group is gone"
        assert self._lines is not None, "it was asked"
        for peer in self._peers():  # for whoever counts or traces what is sent
            for data in like_incoming[peer]:
                self._shown.recv([data], peer, tag)
            for data in outgoing[peer]:
                self._shown.send([data], peer, tag)
        sizes = {peer: [data.nbytes for data in like] for peer, like in like_incoming.items()}
        try:
            return self._lines.start(Exchange(tag, outgoing, sizes, take))
        except BaseException:  # or what is started next would be taken for what was not posted
            self.break_off()
            raise


@torch.no_grad()
def _take_mean(
    mine: list[Piece], rank: int, shard: Tensor, sent_dtype: torch.dtype, places: Places
) -> None:
    """Read the peers' parts of a shard, and write the mean over all ranks, by blocks."""
    itemsize = sent_dtype.itemsize
    scratch = torch.empty(len(places), _BLOCK_NUMEL, dtype=sent_dtype, device="cpu")
    for start in range(0, shard.numel(), _BLOCK_NUMEL):
        block = shard[start : start + _BLOCK_NUMEL]
        stop, own = start + block.numel(), cut_out(mine, start, block.numel())
        rows = {p: row[: block.numel()] for p, row in zip(sorted(places), scratch, strict=True)}
        if sent_dtype == shard.dtype:  # the sum is made in the first row
            rows[min(rows)] = block
        free = list(complement([piece.extent for piece in own], 0, block.numel()))
        for peer, row in rows.items():
            for free_start, free_stop in free:
                row[free_start:free_stop].zero_()
            for piece, place in zip(mine, places[peer], strict=True):
                low, high = max(piece.offset, start), min(piece.extent[1], stop)
                if low < high:
                    place.read(
                        row.data_ptr() + (low - start) * itemsize,
                        (high - low) * itemsize,
                        (low - piece.offset) * itemsize,
                    )
        result = mean(rows, own, rank, shard.dtype)
        if result.data_ptr() != block.data_ptr():
            block.copy_(result)
