"""HSDP: gradients that were reduced within a replica are averaged over the replicas, now or later.

Later, after ``set_requires_all_reduce(False)``: the means of several micro-batches add up in this
rank's slices, which wait in ``.grad``, until a reduction includes them.
"""

from __future__ import annotations

import functools

import torch.distributed as dist
from torch import Tensor

from lightning_fsdp.core.engine import torch_internals
from lightning_fsdp.core.engine.communicator import Communicator, Pending, collective
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.sharded import let_wait, waiting_gradient
from lightning_fsdp.core.ranks.narrow import sum_dtype


def average_over(column: Communicator, row: Communicator) -> None:
    """Let the mean over replicas follow each reduction.

    Args:
        column: Between the ranks that hold the same shard as this one.
        row: Between the ranks that hold one replica; its reductions get this stage.
    """
    column.traffic = row.traffic
    row.after_reduction = (("average", functools.partial(_average, column)),)


def _average(column: Communicator, shard: Tensor, unit_name: str) -> Pending:
    """All-reduce: the mean over replicas of ``shard``, ``(n,)``, which may be overwritten.

    Every replica gets the same bits.
    """
    what = f"mean over replicas of unit {unit_name!r} {column.where}"
    group, size, dtype = column.group, column.world_size, shard.dtype
    shard = shard.to(sum_dtype(dtype))
    column.traffic["all_reduce"].add(2 * (size - 1) * (shard.nbytes // size))
    work = collective(what, "every replica", dist.all_reduce, shard, group=group, async_op=True)
    works = [(work.wait, "every replica")]
    return Pending(what, works, lambda: shard.div_(size).to(dtype), keeps=(shard,))


class ReplicatedFlatParameter(FlatParameter):
    """A flat parameter whose reductions are followed by a mean over replicas, or over hosts."""

    # Per parameter, whether this rank has a gradient in a reduction in flight that leaves the mean
    # out.
    _used: list[bool]

    def reduce(self) -> list[bool]:
        """Start the reduction, with the mean over replicas unless it stays in this one.

        Returns:
            See :meth:`FlatParameter.reduce`.
        """
        has_one = super().reduce()
        assert self._reduction is not None, "it was started"
        self.waits_for_mean = self.stays_in_replica
        if self.stays_in_replica:
            self._stages.clear()  # neither that mean nor the way to the host: it waits where it is
            self._used = has_one
            return []
        # What has waited here is added before the mean over replicas starts.
        taken, finish = self._take_of_replica(has_one), self._reduction.finish

        def joined() -> Tensor:
            shard = finish()
            for index, part in taken.items():
                self.parameters[index].spec.part_of(shard).add_(part)
            return shard

        self._reduction.finish = joined
        return has_one

    def land(self) -> None:
        """Let the reduction end: in ``.grad``, or beside what waits there for the replicas."""
        if self._reduction is None or not self.waits_for_mean:
            super().land()
            return
        reduction, self._reduction = self._reduction, None
        with torch_internals.profiled("wait_for_reduce", self.name), torch_internals.unrecorded():
            shard = reduction.wait()
            for parameter, has_trained, is_used in zip(
                self.parameters, self._trained, self._used, strict=True
            ):  # ``_trained`` stays, for the reduction that takes the mean over replicas
                if has_trained:
                    waiting = let_wait(parameter, self.make_waiting)
                    part, before = parameter.spec.part_of(shard), waiting.of_replica
                    waiting.of_replica = part if before is None else before.add_(part)
                    waiting.is_used |= is_used

    def abandon(self, holder: object, *, drops_gradients: bool) -> None:
        """See :meth:`FlatParameter.abandon`."""
        if drops_gradients:
            self._take_of_replica([False] * len(self.parameters))
        super().abandon(holder, drops_gradients=drops_gradients)

    def _take_of_replica(self, has_one: list[bool]) -> dict[int, Tensor]:
        """Take out what waits here, by index; sets ``has_one`` where this rank had a gradient."""
        taken = {}
        for index, parameter in enumerate(self.parameters):
            waiting = waiting_gradient(parameter)
            if waiting is not None and waiting.of_replica is not None:
                taken[index], parameter.grad = waiting.of_replica, waiting.prior
                has_one[index] |= waiting.is_used
        return taken
