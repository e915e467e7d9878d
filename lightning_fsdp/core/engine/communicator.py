"""Every collective of the core that moves data: one gather, one reduction.

Each is a single asynchronous collective (all-gather, reduce-scatter), and is counted. Subclasses in
``ranks/`` move the same data in other ways.

Note: lifetimes
c10d's asynchronous ``Work`` already is the pair of events that a collective needs on CUDA: it
starts when everything queued on the current stream at the call has finished, and ``wait()`` makes
the current stream (not the host) wait for its end. Buffers are allocated, freed and computed with
on one stream, and a :class:`Pending` keeps what it reads or writes alive until it was waited for;
so no memory is reused early, and ``record_stream`` is not needed. On CPU the same code runs with
host waits.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fsdp.core.engine import torch_internals
from lightning_fsdp.core.engine.layout import FlatLayout

Works = Sequence[tuple[Callable[[], object], str]]
"""Functions that wait, each with the ranks that it depends on in words (``"rank 3"``)."""


@dataclass
class Traffic:
    """How much this rank has sent with one kind of collective.

    Attributes:
        calls: Number of collectives, however many messages each takes.
        sent_bytes: Bytes of payload that left this rank.
    """

    calls: int = 0
    sent_bytes: int = 0

    def add(self, sent_bytes: int) -> None:
        """Count a collective, or a copy between host and device."""
        self.calls += 1
        self.sent_bytes += sent_bytes


@dataclass(eq=False)
class Pending:
    """A collective in flight.

    Attributes:
        what: The operation and this rank, for the message if it fails.
        works: Functions that wait, each with the ranks that it depends on.
        finish: Runs once after the wait, on the current stream, and gives the result.
        keeps: Tensors that the collective reads or writes; kept alive until it was waited for.
    """

    what: str
    works: Works
    finish: Callable[[], Tensor]
    keeps: Sequence[Tensor] = field(default=(), repr=False)

    def wait(self) -> Tensor:
        """Make the current stream (on CPU: the caller) wait for the result, and return it.

        To be called once.

        Raises:
            RuntimeError: Another rank did not take part within the group's timeout.
        """
        self.join()
        return self.finish()

    def join(self) -> None:
        """Wait in the same way, without computing the result.

        Raises:
            RuntimeError: Another rank did not take part within the group's timeout.
        """
        while self.works:  # in no variable: see FlatParameter.wait_for_unshard
            collective(self.what, self.works[0][1], self.works[0][0])
            self.works = self.works[1:]
        self.keeps = ()


Stage = Callable[[Tensor, str], Pending]
"""What follows a collective: takes its result and the unit's name, and starts the next one."""


def collective(what: str, ranks: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Start a collective, or wait for one; an error names it and the ranks that did not take part.

    The start may raise as well as the wait: a rank that was stopped for longer than the timeout
    finds its connections closed by the others.

    Args:
        what: The operation and this rank.
        ranks: The ranks that it depends on.
        call: What starts it or waits for it, with its arguments.
        args: As above.
        kwargs: As above.

    Raises:
        RuntimeError: ``call`` raised one.
    """
    try:
        return call(*args, **kwargs)
    except RuntimeError as error:
        raise RuntimeError(
            f"{what}: expected {ranks} to take part within the group's timeout, but that did not "
            "happen: it left the recorded order of units, waits elsewhere or has ended. Look for "
            "the first error on the other ranks; make all ranks run the same units in the same "
            "order, and reduce in the same backwards (no_sync)."
        ) from error
    finally:
        del call, args, kwargs  # no handle in a traceback: see FlatParameter.wait_for_unshard


@dataclass(eq=False)
class LocalRegion:
    """This rank's own gradients of one flat region: the input of a reduction.

    Attributes:
        gradients: By slot, original shape, any dtype. Packing takes them out and frees them; a slot
            without a gradient counts as zeros.
        layout: Layout of the region.
        unit_name: For the message if the reduction fails.
        empty: Allocates ``(numel,)`` of a dtype on the device of the gradients.
        sent_dtype: The dtype in which gradients are sent, the same on every rank.
        dtype: The dtype of the sum: ``sent_dtype``, or one that can hold all of its values.
    """

    gradients: dict[int, Tensor]
    layout: FlatLayout
    unit_name: str
    empty: Callable[[int, torch.dtype], Tensor]
    sent_dtype: torch.dtype
    dtype: torch.dtype

    def pack(self, slots: range | None = None) -> Tensor:
        """Copy gradients end to end, zeros where there are none: ``(n,)`` of ``sent_dtype``.

        Args:
            slots: A run of neighbours; default: the whole region, padding at its end included.
        """
        layout, gradients = self.layout, self.gradients
        start, stop = (0, layout.numel) if slots is None else layout.extent(slots)
        slots = range(len(layout.slots)) if slots is None else slots
        if len(slots) == 1 and self._can_be_sent(slots[0], stop - start):
            return gradients.pop(slots[0]).view(-1)  # read from where autograd made it
        packed, parts, position = self.empty(stop - start, self.sent_dtype), [], start
        for index in slots:
            slot, gradient = layout.slots[index], gradients.pop(index, None)
            if slot.offset > position:  # padding
                parts.append(packed.new_zeros(slot.offset - position))
            if gradient is None:
                gradient = packed.new_zeros(1).expand(slot.numel)  # as many, in the memory of one
            parts.append(gradient.reshape(-1))
            position = slot.offset + slot.numel
        if stop > position:
            parts.append(packed.new_zeros(stop - position))
        return torch.cat(parts, out=packed)  # on CUDA few kernels, not one for each

    @property
    def is_narrow(self) -> bool:
        """Whether the dtype that is sent cannot hold the sum; a sum in fp16 may overflow."""
        return self.sent_dtype != self.dtype or self.dtype == torch.float16

    def _can_be_sent(self, slot: int, numel: int) -> bool:
        """Whether a gradient need not be copied: it is all of a run of ``numel`` elements."""
        gradient, num_ranks = self.gradients.get(slot), self.layout.shard_world_size
        # A single rank sends nothing: what is packed becomes the result, which is written to, while
        # a gradient may be a view of what autograd still needs.
        if gradient is None or gradient.dtype != self.sent_dtype or num_ranks == 1:
            return False
        return gradient.numel() == numel and gradient.is_contiguous()


class Control(Protocol):
    """The ranks that train a model together, replicas included; see ``ranks/agreement.py``.

    Attributes:
        rank: This process among them.
        world_size: Their number.
    """

    rank: int
    world_size: int

    def any_rank(self, is_set: Flags) -> Callable[[], Flags]:
        """Ask which flags are set on any rank; returns what waits for the answer. Collective."""


class Communicator:
    """The collectives of one sharding group.

    The group is referred to weakly: ``destroy_process_group`` ends it when it is called, as its
    threads must not outlive it.

    Attributes:
        ranks: The ranks of the group, as numbers in the default group.
        rank: Rank of this process in the group.
        world_size: Number of ranks in the group.
        places: Where each rank's shard lies in a region; see :class:`FlatLayout`.
        control: All ranks that train the model together, replicas included.
        mesh_rank: Rank of this process among those. Messages name this one.
        mesh_size: Their number.
        where: ``mesh_rank`` and ``mesh_size`` in words, for messages.
        device: Device of the tensors that the group moves: the one that was current at the
            sharding. It is not asked for again, as the current device may be another one in
            each thread.
        after_reduction: Stages that follow each reduction, with their names.
        keeps_parts: Whether :meth:`regather` moves less where no shard has changed. It is the same
            on all ranks.
        any_rank: See :meth:`Control.any_rank`.
        traffic: What was sent, by kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``.
    """

    keeps_parts = False

    def __init__(self, group: dist.ProcessGroup, control: Control, device: torch.device) -> None:
        self._group, self.device = weakref.ref(group), device
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.control, self.any_rank = control, control.any_rank
        self.mesh_rank, self.mesh_size = control.rank, control.world_size
        self.where = f"(rank {self.mesh_rank} of {self.mesh_size})"
        self.places: tuple[int, ...] = ()
        self.after_reduction: tuple[tuple[str, Stage], ...] = ()
        self.traffic = {kind: Traffic() for kind in ("all_gather", "reduce_scatter", "all_reduce")}

    def __deepcopy__(self, memo: object) -> Communicator:
        return self  # one per group; copies of a module share it

    @property
    def group(self) -> dist.ProcessGroup:
        """The data group."""
        return alive(self._group)

    def gather(self, whole: Tensor, unit_name: str) -> Pending:
        """All-gather in place: every rank's shard lands in its slot of ``whole``.

        Args:
            whole: ``(world_size * shard_numel,)``; this rank's slot holds its shard, the others are
                written.
            unit_name: For the message if it fails.

        Returns:
            The collective; its result is ``whole``.
        """
        what = f"gather of unit {unit_name!r} {self.where}"
        self.traffic["all_gather"].add(whole.nbytes // self.world_size * (self.world_size - 1))
        start = self._gather if self.world_size > 1 else lambda *_: []
        return Pending(what, start(whole, what, unit_name), lambda: whole, keeps=(whole,))

    def reduce(self, region: LocalRegion) -> Pending:
        """Reduce-scatter: the mean over ranks of this rank's shard of a region.

        Args:
            region: This rank's own gradients, which are taken out of it.

        Returns:
            The collective; its result is the shard, ``(shard_numel,)`` of ``region.dtype``, padding
            zero. On one rank that is the region itself.

        Source: ZeRO (arXiv 1910.02054), section 5.
        """
        what = f"reduction of unit {region.unit_name!r} {self.where}"
        if self.world_size == 1:
            self.traffic["reduce_scatter"].add(0)
            packed = region.pack()
            return Pending(what, (), lambda: packed.to(region.dtype))
        return (self._reduce_narrow if region.is_narrow else self._reduce)(region, what)

    def regather(self, whole: Tensor, unit_name: str, is_stale: bool) -> Pending:
        """:meth:`gather` a whole copy that was freed, of which a rank may have kept a part.

        Args:
            whole: The same tensor each time.
            unit_name: For the message if it fails.
            is_stale: Whether the shard was written to since the last time, or may have been.
        """
        return self.gather(whole, unit_name)

    def break_off(self) -> None:
        """Give up a gather that was interrupted: its memory may change while peers still read."""

    def _gather(self, whole: Tensor, what: str, unit_name: str) -> Works:
        group, shard_numel = self.group, whole.numel() // self.world_size
        mine = whole[self.rank * shard_numel : (self.rank + 1) * shard_numel]
        work = collective(what, "every rank", torch_internals.all_gather_in(group), whole, mine)
        return [(work.wait, "every rank")]

    def _reduce_narrow(self, region: LocalRegion, what: str) -> Pending:
        """Reduce a region that is narrow; here, it is widened before it is sent."""
        return self._reduce(region, what)

    def _reduce(self, region: LocalRegion, what: str) -> Pending:
        sent, group = region.pack().to(region.dtype), self.group
        self.traffic["reduce_scatter"].add(sent.nbytes // self.world_size * (self.world_size - 1))
        shard = sent.new_empty(region.layout.shard_numel)
        work = collective(what, "every rank", torch_internals.reduce_scatter_in(group), shard, sent)
        mean = functools.partial(shard.div_, self.world_size)
        return Pending(what, [(work.wait, "every rank")], mean, keeps=(sent, shard))


def alive(reference: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    """The group behind a weak reference, which ``destroy_process_group`` may have ended.

    Raises:
        RuntimeError: It was destroyed.
    """
    if (group := reference()) is None:
        raise RuntimeError(
            "a sharded module: expected its process group, got none: it was destroyed. Take "
            "full_state_dict(module) before destroy_process_group(), and shard a new module after."
        )
    return group


Flags = list[Any]
"""Nested lists of bool, ``(n,)`` or ``(m, n)``; the same shape on every rank."""
