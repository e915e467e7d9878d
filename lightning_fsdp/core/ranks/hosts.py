"""Shards over all ranks of a 2-D mesh, gathers within a host: ZeRO++'s hpZ, Megatron's HFSDP.

The ranks of a host are a row of the mesh. A gather moves data between them alone, from the part of
the whole copy that each keeps. What a row reduces, a column reduces further. Drawn for two hosts of
two ranks, and a region of four shards:

    shards of the region        0         1         2         3
    owned by                    rank 0    rank 2    rank 1    rank 3
    kept by ranks 0 and 2       [ 0         1 ]
    kept by ranks 1 and 3                           [ 2         3 ]

    after a step    column      gather of shards: each rank gets the part that it keeps
    every gather    row         gather of the kept parts: the whole copy
    gradients       row         reduce-scatter: the mean over the host, as long as a kept part
                    column      reduce-scatter: the mean over all ranks, as long as a shard

So the shards of a column are neighbours, and a shard's place is not the number of its rank. The
kept parts are the second copy of the weights within the host that ZeRO++ calls hpZ; gathers of the
backward read them, too.

Note: when parts are filled
A part is as old as the last gather between hosts. There is one when the shard has changed, which is
once per optimizer step. Either all ranks write to their shards or none does; otherwise they start
different gathers, which the agreement on their order reports.

Source: ZeRO++ (arXiv 2306.10209), hpZ.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import MutableMapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_fsdp.core.engine import torch_internals
from lightning_fsdp.core.engine.communicator import Communicator, LocalRegion, Pending
from lightning_fsdp.core.engine.layout import FlatLayout, Slot

BETWEEN_HOSTS = "_between_hosts"
"""Suffix of the kinds of traffic that columns move."""


class HostsCommunicator(Communicator):
    """The collectives of all ranks of a 2-D mesh.

    Args:
        row: Between the ranks of this host.
        column: Between the ranks of all hosts that have this rank's place in theirs.
        places: By rank, as a number in the default group and ascending, the place of its shard.
    """

    keeps_parts = True

    def __init__(self, row: Communicator, column: Communicator, places: dict[int, int]) -> None:
        super().__init__(row.group, row.control, row.device)
        self.row, self.column = row, column
        self.ranks, self.places = tuple(places), tuple(places.values())
        self.rank, self.world_size = row.mesh_rank, row.mesh_size
        # By whole copy, what this rank keeps of it.
        self._kept: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
        self.traffic = row.traffic
        for kind in tuple(self.traffic):
            self.traffic[kind + BETWEEN_HOSTS] = column.traffic[kind]
        self.after_reduction = (("average", functools.partial(_reduce_in_column, column)),)

    def open(self, group: dist.ProcessGroup) -> None:
        """Use a group of all ranks for collectives that go over neither rows nor columns."""
        self._group = weakref.ref(group)

    def gather(self, whole: Tensor, unit_name: str) -> Pending:
        """Gather between the hosts; waiting for that gathers within this one."""
        part, kept = self._part_of(whole), self._kept.get(whole)
        gather = self.column.gather(part, unit_name)

        def gather_in_row() -> Tensor:
            with torch_internals.profiled("gather_in_host", unit_name):
                if kept is not None:
                    kept.copy_(part)
                in_row = self.row.gather(whole, unit_name)
            try:
                return in_row.wait()
            finally:
                in_row.works = ()  # see FlatParameter.wait_for_unshard

        gather.finish = gather_in_row
        return gather

    def regather(self, whole: Tensor, unit_name: str, is_stale: bool) -> Pending:
        """Gather within this host; if the shard has changed, between the hosts first."""
        if whole not in self._kept:
            with torch.inference_mode(False):  # else it could never be written to in training
                self._kept[whole] = torch.empty_like(self._part_of(whole))
        elif not is_stale:
            self._part_of(whole).copy_(self._kept[whole])
            return self.row.gather(whole, unit_name)
        return self.gather(whole, unit_name)

    def reduce(self, region: LocalRegion) -> Pending:
        """Reduce to the mean over this host; the stage that follows takes that over all hosts.

        Returns:
            The collective; its result, ``(shard_numel * hosts,)``, lies where the kept part does.
        """
        numel = region.layout.shard_numel * self.column.world_size
        layout = FlatLayout(region.layout.slots, numel, self.row.world_size)
        return self.row.reduce(dataclasses.replace(region, layout=layout))

    def break_off(self) -> None:
        """Give up gathers in the row and in the column."""
        self.row.break_off()
        self.column.break_off()

    def _part_of(self, whole: Tensor) -> Tensor:
        """The part of a whole copy that this rank keeps, ``(numel / row.world_size,)``: a view."""
        return whole.view(self.row.world_size, -1)[self.row.rank]


def kept_of(communicator: Communicator, whole: Tensor) -> list[Tensor]:
    """What this rank keeps of a whole copy that is freed; empty before its first gather."""
    kept = communicator._kept if isinstance(communicator, HostsCommunicator) else {}
    return [kept[whole]] if whole in kept else []


def _reduce_in_column(column: Communicator, shard: Tensor, unit_name: str) -> Pending:
    """The mean over hosts, ``(n / hosts,)``, of the means over each, ``(n,)``."""
    numel, size, dtype = shard.numel(), column.world_size, shard.dtype
    layout = FlatLayout((Slot(unit_name, (numel,), 0),), numel // size, size)
    empty = functools.partial(torch.empty, device=shard.device)
    return column.reduce(
        LocalRegion({0: shard}, layout, unit_name, lambda n, d: empty(n, dtype=d), dtype, dtype)
    )
