"""This rank's own gradients of one unit, from their arrival until they are reduced or dropped.

They are collected in *runs*: pieces of the segment's region, each with memory of its own. Where the
reduction wants one flat input, the whole region is one run. Where it sends pieces (gloo), a large
parameter is a run by itself, and its run *is* the gradient that autograd made: nothing is copied.

Until the unit's backward ends, gradients stay as autograd made them. By then the unit's parameters
are freed and the previous reduction has landed, so that a run's memory never stands beside theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_fsdp.core import host_memory
from lightning_fsdp.core.collectives import Piece
from lightning_fsdp.core.layout import SegmentLayout
from lightning_fsdp.core.sharded_tensor import ShardedTensor
from lightning_fsdp.core.unreduced_gradient import UnreducedGradient

_LARGE_NUMEL = 2**14  # a message of its own costs about as much as copying so many elements


@dataclass(eq=False)
class _Run:
    """Neighbouring slots and the memory of their gradients.

    Attributes:
        slots: Their indices.
        start: First element in the region.
        stop: Past the last.
        kept: By slot, gradients as they arrived; empty once there is a buffer.
        buffer: ``(stop - start,)``, or ``None``. Between an unsynced backward and the
            next, only the stand-ins in ``.grad`` keep it alive.
        between: The buffer, in that time.
        arrived: Slots of the buffer that hold a gradient.
    """

    slots: range
    start: int
    stop: int
    kept: dict[int, Tensor] = field(default_factory=dict)
    buffer: Tensor | None = None
    between: weakref.ref[Tensor] | None = None
    arrived: set[int] = field(default_factory=set)


class LocalGradients:
    """Gradients of a segment's parameters as one unit's backward leaves them.

    Args:
        layout: The segment's.
        parameters: The sharded parameters, one per slot.
        dtype: In which those of several backwards are summed.
        device: Of the unit.
        in_pieces: Whether the reduction takes pieces, or one flat region.
    """

    def __init__(
        self,
        layout: SegmentLayout,
        parameters: Sequence[ShardedTensor],
        dtype: torch.dtype,
        device: torch.device,
        *,
        in_pieces: bool,
    ) -> None:
        self._layout = layout
        self._parameters = parameters
        self._dtype = dtype
        self._device = device
        self._runs = list(_cut(layout)) if in_pieces else [_whole_region(layout)]
        self._run_of = {index: run for run in self._runs for index in run.slots}
        self._stand_ins: dict[int, weakref.ref[UnreducedGradient]] = {}

    def add(self, index: int, gradient: Tensor) -> None:
        """Take in one parameter's gradient.

        Args:
            index: The parameter's slot.
            gradient: Original shape, compute dtype; owned by this call, which may keep it.
        """
        run = self._run_of[index]
        self._reopen(run)
        if run.buffer is None and index not in run.kept:
            run.kept[index] = gradient
            return
        self._collect(run, self._dtype)
        part = self._part(run, index)
        if index in run.arrived:
            part.add_(gradient)
        else:
            part.copy_(gradient)
            run.arrived.add(index)

    def take(self, dtype: torch.dtype) -> tuple[list[Piece], list[bool]]:
        """Hand over all runs, with zeros wherever no gradient is; ``.grad`` forgets its stand-ins.

        Args:
            dtype: Of the pieces.

        Returns:
            The runs as pieces of the region, and per slot, whether it holds a gradient.
        """
        pieces, arrived = [], [False] * len(self._layout.slots)
        for run in self._runs:
            self._reopen(run)
            self._collect(run, dtype)
            for index in run.slots:
                if index in run.arrived:
                    arrived[index] = True
                else:
                    self._part(run, index).zero_()
            assert run.buffer is not None, "it was just collected"
            pieces.append(Piece(run.start, run.buffer.to(dtype)))
            self._withdraw_stand_ins(run)
            run.buffer, run.between, run.arrived = None, None, set()
        self._stand_ins = {}
        return pieces, arrived

    def leave_unreduced(self) -> None:
        """End a backward without reduction: stand-ins in ``.grad`` now own the runs."""
        for run in self._runs:
            if run.kept:
                self._collect(run, self._dtype)
            if run.buffer is None:
                continue
            for index in run.arrived:
                stand_in = self._stand_in_at(self._parameters[index])
                stand_in.memory, stand_in.part = run.buffer, self._part(run, index)
                self._stand_ins[index] = weakref.ref(stand_in)
            run.between = weakref.ref(run.buffer)
            run.buffer, run.arrived = None, set()

    @property
    def is_waiting(self) -> bool:
        """Whether gradients wait here that were not reduced and not dropped."""
        return any(
            run.kept or (run.arrived if run.buffer is not None else self._held(run))
            for run in self._runs
        )

    def drop(self) -> None:
        """Forget the gradients of a step that failed."""
        for run in self._runs:
            run.kept = {}
            run.buffer, run.between, run.arrived = None, None, set()
        self._stand_ins = {}

    @staticmethod
    def _fills(run: _Run, dtype: torch.dtype, gradient: Tensor) -> bool:
        """Whether a gradient is laid out as the run's memory would be, so that none is needed."""
        return (
            gradient.numel() == run.stop - run.start
            and gradient.dtype == dtype
            and gradient.is_contiguous()
        )

    def _collect(self, run: _Run, dtype: torch.dtype) -> None:
        """Give a run its memory, and move the gradients that were kept into it, casting."""
        if run.buffer is not None:
            return
        kept, run.kept, run.arrived = run.kept, {}, set(run.kept)
        if len(kept) == 1 and self._fills(run, dtype, *kept.values()):
            (gradient,) = kept.values()
            run.buffer = gradient.view(-1)
            return
        run.buffer = host_memory.empty(run.stop - run.start, dtype, self._device)
        for start, stop in self._layout.padding(run.start, run.stop):
            run.buffer[start - run.start : stop - run.start].zero_()
        while kept:  # each is freed as soon as it is copied
            index, gradient = kept.popitem()
            self._part(run, index).copy_(gradient)

    def _part(self, run: _Run, index: int) -> Tensor:
        """The place of one parameter in its run's memory, original shape."""
        assert run.buffer is not None, "it was collected"
        slot = self._layout.slots[index]
        return run.buffer.narrow(0, slot.offset - run.start, slot.numel).view(slot.shape)

    def _reopen(self, run: _Run) -> None:
        """Take a run's memory back from the stand-ins, as far as they still hold it."""
        if run.buffer is None and run.between is not None:
            run.arrived = self._held(run)
            run.buffer = run.between() if run.arrived else None
            run.between = None

    def _held(self, run: _Run) -> set[int]:
        # ``.grad`` is the one truth: what was set to None or zeroed there is gone here too.
        if run.between is None:
            return set()
        return {index for index in run.slots if self._stand_in_of(index) is not None}

    def _withdraw_stand_ins(self, run: _Run) -> None:
        for index in run.slots:
            stand_in = self._stand_in_of(index)
            if stand_in is not None:
                self._parameters[index].grad = stand_in.prior

    def _stand_in_of(self, index: int) -> UnreducedGradient | None:
        reference = self._stand_ins.get(index)
        stand_in = None if reference is None else reference()
        is_there = stand_in is not None and self._parameters[index].grad is stand_in
        return stand_in if is_there else None

    @staticmethod
    def _stand_in_at(parameter: ShardedTensor) -> UnreducedGradient:
        present = parameter.grad
        if isinstance(present, UnreducedGradient):
            return present
        stand_in = UnreducedGradient(parameter.spec, parameter.to_local(), present)  # type: ignore[arg-type]
        parameter.grad = stand_in
        return stand_in


def _cut(layout: SegmentLayout) -> Iterator[_Run]:
    for slots in layout.runs(_LARGE_NUMEL):
        first, last = layout.slots[slots[0]], layout.slots[slots[-1]]
        yield _Run(slots, first.offset, last.offset + last.numel)


def _whole_region(layout: SegmentLayout) -> _Run:
    return _Run(range(len(layout.slots)), 0, layout.numel)
