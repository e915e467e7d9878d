"""Where the memory of an optimizer step goes: by phase, by owner, on every rank.

=========== =============================================================================
phase       from, to
=========== =============================================================================
forward     ``on_train_batch_start`` to ``on_before_backward``
backward    to ``on_after_backward``
step        ``on_before_optimizer_step`` to ``on_train_batch_end``: clipping, the optimizer
=========== =============================================================================

Owners are told apart by storage: this rank's *parameters* (shards, under a sharded strategy;
buffers too), *gradients* that wait or were reduced, *optimizer* state; and *activations*, which is
all the rest: activations, the batch, gathered parameters, gradients on their way, workspace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fsdp.callbacks import memory_picture, modes, reporting, torch_internals
from lightning_fsdp.callbacks.observing import GradientReader
from lightning_fsdp.callbacks.plain_access import ReadableGradients
from lightning_fsdp.callbacks.storages import Ledger, local_part
from lightning_fsdp.engines.owned_state import kept_by

OWNERS = ("parameters", "gradients", "optimizer", "activations")
PHASES = ("forward", "backward", "step")


@dataclass(frozen=True)
class PhaseMemory:
    """One phase on one rank; of several micro-batches the highest peak and the last rest.

    Attributes:
        resting: Bytes by owner when the phase has ended.
        peak: Bytes by owner at the moment of the phase with most bytes.
        allocated: Peak of torch's CUDA allocator, bytes; 0 on CPU. More than the sum of ``peak`` by
            what no tensor shows: workspaces inside of operations.
        reserved: Peak of what the allocator took from the device, bytes; 0 on CPU.
    """

    resting: dict[str, int]
    peak: dict[str, int]
    allocated: int
    reserved: int


@dataclass(frozen=True)
class MemoryReport:
    """One step.

    Attributes:
        step: Optimizer step, from 0.
        ranks: By rank and phase.
    """

    step: int
    ranks: list[dict[str, PhaseMemory]]


class MemoryProbe(GradientReader):
    """Measures the bytes of tensors, exactly, in the chosen steps; those run slower, uncompiled.

    Logged: ``memory/{phase}/{resting,peak}_bytes/rank{r}``, on CUDA also ``reserved_bytes``; and
    ``memory/{phase}/{resting,peak}/{owner}`` of the rank with the highest peak. TensorBoard also
    gets a picture of rank 0's step.

    Args:
        steps: Optimizer steps to look at: a period, or a collection of step numbers from 0. A first
            step, in which an optimizer makes its state, is unlike the others.
        snapshot: Folder for torch's snapshot of every CUDA allocation in those steps, one file per
            rank and step.

    Attributes:
        reports: One per step looked at, the same on all ranks.

    Raises:
        ValueError: A snapshot without CUDA.
        NotImplementedError: A strategy without access to gradients, or manual optimization.
    """

    def __init__(
        self, *, steps: reporting.Steps = (0, 1, 10), snapshot: str | Path | None = None
    ) -> None:
        self.steps = reporting.checked_steps(steps, self)
        self.snapshot = None if snapshot is None else Path(snapshot)
        self.reports: list[MemoryReport] = []
        self._ledger: Ledger | None = None
        self._phases: list[tuple[str, int, int]] = []  # name, clock at its beginning and end
        self._device_peaks: dict[str, list[tuple[int, int]]] = {}  # allocated, reserved; by phase
        self._opened: tuple[str, int] | None = None
        self._step = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a snapshot without CUDA."""
        super().on_train_start(trainer, pl_module)
        if self.snapshot is not None and trainer.strategy.root_device.type != "cuda":
            raise ValueError(
                f"MemoryProbe(snapshot={str(self.snapshot)!r}): expected a CUDA device, whose "
                f"allocator keeps a history, got {trainer.strategy.root_device}. Leave it out."
            )

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a forward; in the first micro-batch of a chosen step, begin to watch."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._stop(trainer)  # a step that was left before its end
        if self._ledger is None and reporting.is_chosen(self.steps, trainer.global_step):
            self._step = trainer.global_step
            self._ledger = Ledger(trainer.strategy.root_device)
            self._phases, self._device_peaks = [], defaultdict(list)
            if self.snapshot is not None:
                torch_internals.record_memory_history(True)
            tell_owners(self._ledger, self.access, trainer, pl_module)
            self._ledger.settle()
            modes.enter(self._ledger)
        self._begin(trainer, "forward")

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """From forward to backward."""
        self._end(trainer, pl_module)
        self._begin(trainer, "backward")

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Backward ends."""
        self._end(trainer, pl_module)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """The step begins."""
        self._begin(trainer, "step")

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Report, where this was the last micro-batch of a step. Collective."""
        if self._ledger is None or self._opened is None or self._opened[0] != "step":
            return
        self._end(trainer, pl_module)
        ledger = self._ledger
        self._stop(trainer)
        moments = ledger.moments(OWNERS)
        mine = {phase: self._memory_in(phase, moments) for phase in PHASES}
        ranks = reporting.objects_of_every_rank(trainer, mine)
        self.reports.append(MemoryReport(self._step, ranks))
        self._report(trainer, moments)

    # -- phases ------------------------------------------------------------------------------------

    def _begin(self, trainer: pl.Trainer, phase: str) -> None:
        if self._ledger is None:
            return
        self._opened = (phase, self._ledger.num_operations)
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def _end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self._ledger is None or self._opened is None:
            return
        # Sizes first: asking for owners makes views and copies of its own, which do not count.
        self._ledger.settle()
        phase, start = self._opened
        self._opened = None
        self._phases.append((phase, start, self._ledger.num_operations))
        device = trainer.strategy.root_device
        on_device = (0, 0)
        if device.type == "cuda":
            on_device = (
                torch.cuda.max_memory_allocated(device),
                torch.cuda.max_memory_reserved(device),
            )
        self._device_peaks[phase].append(on_device)
        tell_owners(self._ledger, self.access, trainer, module)

    def _stop(self, trainer: pl.Trainer) -> None:
        if self._ledger is None:
            return
        modes.leave(self._ledger)
        self._ledger, self._opened = None, None
        if self.snapshot is not None:
            self.snapshot.mkdir(parents=True, exist_ok=True)
            name = f"step{self._step}_rank{trainer.global_rank}.pickle"
            torch_internals.dump_memory_snapshot(str(self.snapshot / name))
            torch_internals.record_memory_history(False)

    @override
    def release(self, trainer: pl.Trainer) -> None:
        """Watch no more."""
        self._stop(trainer)
        super().release(trainer)

    # -- figures -----------------------------------------------------------------------------------

    def _memory_in(self, phase: str, moments: list[dict[str, int]]) -> PhaseMemory:
        ranges = [(start, stop) for name, start, stop in self._phases if name == phase]
        if not ranges:  # a step without a backward
            return PhaseMemory(dict.fromkeys(OWNERS, 0), dict.fromkeys(OWNERS, 0), 0, 0)
        inside = (moments[i] for start, stop in ranges for i in range(start, stop + 1))
        peak, resting = max(inside, key=_total), moments[ranges[-1][1]]
        allocated, reserved = map(max, zip(*self._device_peaks[phase], strict=True))
        return PhaseMemory(resting, peak, allocated, reserved)

    def _report(self, trainer: pl.Trainer, moments: list[dict[str, int]]) -> None:
        ranks, metrics = self.reports[-1].ranks, dict[str, float]()
        for phase in PHASES:
            for rank, of_rank in enumerate(ranks):
                found = of_rank[phase]
                metrics[f"memory/{phase}/resting_bytes/rank{rank}"] = _total(found.resting)
                metrics[f"memory/{phase}/peak_bytes/rank{rank}"] = _total(found.peak)
                if found.reserved:
                    metrics[f"memory/{phase}/reserved_bytes/rank{rank}"] = found.reserved
            highest = max((of_rank[phase] for of_rank in ranks), key=lambda m: _total(m.peak))
            for owner in OWNERS:
                metrics[f"memory/{phase}/resting/{owner}"] = highest.resting[owner]
                metrics[f"memory/{phase}/peak/{owner}"] = highest.peak[owner]
        reporting.log(trainer, metrics, self._step)
        peaks = [max(_total(of_rank[phase].peak) for phase in PHASES) for of_rank in ranks]
        for logger in reporting.tensorboards(trainer):
            title = f"memory of optimizer step {self._step}, rank 0 of {len(ranks)}"
            figure = memory_picture.draw(moments, self._phases, peaks, title)
            logger.experiment.add_figure("memory/timeline", figure, self._step, close=False)


def tell_owners(
    ledger: Ledger, access: ReadableGradients, trainer: pl.Trainer, module: pl.LightningModule
) -> None:
    """Tell a ledger whose the tensors are that this rank holds at this moment."""
    ledger.tell("parameters", _parameters(trainer, module))
    ledger.tell("optimizer", _optimizer_state(trainer))
    ledger.tell("gradients", _gradients(access))


def _total(of_owners: dict[str, int]) -> int:
    return sum(of_owners.values())


def _parameters(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[Tensor]:
    weights = getattr(trainer.strategy, "weights", None)
    if weights is None:
        yield from (parameter.detach() for parameter in module.parameters())
    else:
        yield from (weights[name].shard for name in weights.names())
        yield from trainer.strategy.engine.kept_parts()  # type: ignore[attr-defined]
    yield from module.buffers()


def _gradients(access: ReadableGradients) -> Iterator[Tensor]:
    for name in access.names():
        gradient = access[name]
        if gradient.state not in ("none", "replica"):  # what waits in a replica is read by nobody
            yield gradient.local() if gradient.state == "local" else gradient.shard


def _optimizer_state(trainer: pl.Trainer) -> Iterator[Tensor]:
    for optimizer in trainer.optimizers:
        yield from map(local_part, kept_by(optimizer))
