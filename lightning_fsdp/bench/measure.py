"""The callback that measures an arm from inside, and writes one JSON file per rank.

A run is four stretches of optimizer steps, each of which ends with a step that was made, so that no
half of an accumulation reaches into the next:

======== ===========================================================================================
warm-up  nothing; allocators, compilers and the optimizer's state come to be
timed    wall time, tokens, the host's work, utilization, the device's and the process's memory
profiled where the time of a step goes; a profiler slows it down
observed bytes of tensors, collectives, floating-point operations; tracking slows it down a lot
======== ===========================================================================================

What is not measured stays ``None``, or an empty list.

A rank that raises writes what it raised in place of what it measured.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fsdp.bench import documents
from lightning_fsdp.bench.memory import StepObserver, comm_of
from lightning_fsdp.bench.parts import PhaseName, StepProfiler
from lightning_fsdp.bench.records import RankMeasurement
from lightning_fsdp.bench.snapshot import Snapshot
from lightning_fsdp.bench.theory import model_units
from lightning_fsdp.bench.utilization import Utilization
from lightning_fsdp.callbacks.throughput import tokens_in
from lightning_fsdp.core.tensors.norms import global_norm
from lightning_fsdp.harness.environment import process_bytes
from lightning_fsdp.harness.failures import RankFailure
from lightning_fsdp.simulate.groups import find_usage
from lightning_fsdp.simulate.transfer import Usage


@dataclass(eq=False)
class Measure(Callback):
    """Measures the run that it is a callback of.

    Args:
        out: Folder for ``rank{r}.json``, or ``failure{r}.json``.
        warmup_steps: Optimizer steps before the clock starts.
        timed_steps: Optimizer steps on the clock.
        profiled_steps: Optimizer steps after them; what follows is observed.
        writes_traces: Whether rank 0 writes the profiled steps as ``trace_rank0.json``.
        writes_snapshots: Whether rank 0 writes CUDA's memory in the last warm-up step as
            ``memory_rank0.pickle``.
    """

    out: Path
    warmup_steps: int
    timed_steps: int
    profiled_steps: int
    writes_traces: bool = False
    writes_snapshots: bool = False

    def __post_init__(self) -> None:
        self.first_profiled = self.warmup_steps + self.timed_steps
        self.first_observed = self.first_profiled + self.profiled_steps
        self._snapshot = Snapshot(self.out / "memory_rank0.pickle")
        self._num_steps = 0  # optimizer steps that were made
        self._is_step = False
        self._tokens = 0
        self._losses: list[Tensor] = []  # since the last step; reading one would wait for it
        self._fit_start = 0.0
        self._last = (0.0, 0.0)  # wall and CPU time at the end of the last step
        self._watcher: Utilization | StepProfiler | StepObserver | None = None  # of the stretch
        self._usage_before: Usage | None = None  # of a simulated network

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The model is not yet built."""
        self._fit_start = time.perf_counter()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin."""
        self._device = trainer.strategy.root_device
        if self.writes_snapshots and trainer.is_global_zero:
            self._snapshot.step = self.warmup_steps - 1
        self.measured = RankMeasurement(trainer.global_rank, trainer.world_size, [], [], [])
        self.measured.utilization_of = "gpu" if self._device.type == "cuda" else "cpu"
        if not hasattr(trainer.strategy, "engine"):
            self.measured.units = model_units(pl_module)
        self.measured.comm = comm_of(trainer)
        self._begin_stretch(trainer)
        self._last = self._now()

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Data is there. The first observed batch begins to be observed."""
        self._snapshot.begin(self._num_steps)
        self._enter("compute")
        if self._num_steps >= self.first_observed and self._watcher is None:
            self._watcher = StepObserver(trainer, pl_module, int(tokens_in(batch)))

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gradients are there."""
        if isinstance(self._watcher, StepObserver):
            self._watcher.after_backward()

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """An optimizer step is made."""
        self._is_step = True
        self._enter("optimizer")
        if self._num_steps == 0 < self.warmup_steps:
            self.measured.grad_norm = _grad_norm(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the time at the end of each optimizer step."""
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        assert isinstance(loss, Tensor), "a recipe's training step returns its loss"
        # Lightning divides the loss by the number of micro-batches before the backward.
        self._losses.append(loss.detach() * trainer.accumulate_grad_batches)
        self._tokens += int(tokens_in(batch))
        if not self._is_step:
            self._enter("data")
            return
        before, self._last = self._last, self._now()
        self._is_step = False
        self._snapshot.end()
        self._refuse_a_short_step(trainer)
        if self.warmup_steps <= self._num_steps < self.first_profiled:
            self.measured.step_s.append(self._last[0] - before[0])
            self.measured.host_s.append(self._last[1] - before[1])
            self.measured.step_tokens.append(self._tokens)
        if isinstance(self._watcher, (StepProfiler, StepObserver)):
            self._watcher.end_step()
        self._num_steps += 1
        self._begin_stretch(trainer)
        self.measured.losses += [loss.item() for loss in self._losses]
        self._losses, self._tokens = [], 0
        self._last = self._now()  # what was done since is no part of the next step

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what was measured.

        Raises:
            RuntimeError: Something ended the run before its time.
        """
        if self._num_steps < trainer.max_steps:
            raise RuntimeError(
                f"expected {trainer.max_steps} optimizer steps, got {self._num_steps} before the "
                "run ended. Take out of the model what ends it, such as `trainer.should_stop`."
            )
        self._end_stretch()
        documents.write(self.out / f"rank{self.measured.rank}.json", self.measured)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop all watching, and write why; what was measured of an unfinished run is dropped."""
        self._snapshot.end(has_failed=True)
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher = None
        failure = RankFailure.of(trainer.global_rank, exception)
        documents.write(self.out / f"failure{failure.rank}.json", failure)

    # -- stretches ---------------------------------------------------------------------------------

    def _begin_stretch(self, trainer: Trainer) -> None:
        """End the stretch that ends between two steps, and begin what begins there."""
        if self._num_steps in (self.first_profiled, self.first_observed):
            self._end_stretch()
        if self.warmup_steps == self._num_steps < self.first_profiled:
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
            self._watcher = Utilization.of(self._device)
            self._watcher.start()
            self._usage_before = find_usage()
        if self.first_profiled == self._num_steps < self.first_observed:
            waits_unseen = isinstance(trainer.model, DistributedDataParallel)
            self._watcher = StepProfiler(
                self._device, world_size=trainer.world_size, waits_unseen=waits_unseen
            )
            self._watcher.start()

    def _enter(self, phase: PhaseName) -> None:
        if isinstance(self._watcher, StepProfiler):
            self._watcher.enter(phase)

    def _end_stretch(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is None:
            return
        watcher.stop()
        if isinstance(watcher, Utilization):
            self.measured.utilization = watcher.samples
            self._write_timed()
        elif isinstance(watcher, StepObserver):
            watcher.write(self.measured)
        else:
            self.measured.parts = watcher.parts()
            if self.writes_traces and self.measured.rank == 0:
                watcher.write(self.out / "trace_rank0.json")

    def _write_timed(self) -> None:
        self.measured.fit_s = self._last[0] - self._fit_start
        usage = find_usage()
        if usage is not None and self._usage_before is not None:
            num_steps = len(self.measured.step_s)
            self.measured.simulated = usage.per_step_since(self._usage_before, num_steps)
        self.measured.peak_rss_bytes = process_bytes("VmHWM")
        if self._device.type == "cuda":
            self.measured.cuda_peak_allocated_bytes = torch.cuda.max_memory_allocated(self._device)
            self.measured.cuda_peak_reserved_bytes = torch.cuda.max_memory_reserved(self._device)

    def _refuse_a_short_step(self, trainer: Trainer) -> None:
        """Lightning makes a step of what is left when the data ends.

        Raises:
            RuntimeError: Then the step is of another size than the others, and than in other arms.
        """
        expected, found = trainer.accumulate_grad_batches, len(self._losses)
        if found != expected:
            raise RuntimeError(
                f"optimizer step {self._num_steps}: expected {expected} micro-batches, got {found} "
                "before this rank's data ended. Take more of it, or fewer ranks, sequences or "
                "micro-batches."
            )

    def _now(self) -> tuple[float, float]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter(), time.process_time()


def _grad_norm(trainer: Trainer, module: LightningModule) -> float:
    """Of all ranks' mean gradients. Collective."""
    access = getattr(trainer.strategy, "gradients", None)
    if access is not None:
        return float(access.norm())
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return float(global_norm(gradients, 2.0, None))
