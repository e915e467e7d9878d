"""The callback that measures an arm from inside, and writes one JSON file per rank.

A run is three stretches of optimizer steps: warm-up, timed, observed. Only wall time is taken in
the timed ones; memory and traffic come from the observed ones, which exact tracking makes slow.

A rank that raises writes what it raised in place of what it measured.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_fsdp.bench.simulated import find_usage
from lightning_fsdp.callbacks.storages import Observer, nbytes_of, resting_tensors


@dataclass
class RankMeasurement:
    """What one rank writes.

    Attributes:
        losses: Training loss of every micro-batch, from the first on.
        step_s: Seconds per timed optimizer step, data loading and logging included.
        step_tokens: Tokens of this rank per timed optimizer step; padding is not counted.
        resting_bytes: Parameters, gradients, buffers and optimizer state between two steps.
        peak_bytes: Most bytes of tensors alive at once, resting ones included.
        collectives: Calls per observed optimizer step, by kind.
        payload_bytes: Bytes that this rank passed to them, per observed optimizer step.
        simulated: On a simulated network, what a timed step took of it; see ``simulated.py``. The
            two above know real collectives only.
    """

    rank: int
    world_size: int
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)
    resting_bytes: int | None = None
    peak_bytes: int | None = None
    collectives: dict[str, float] = field(default_factory=dict)
    payload_bytes: float | None = None
    simulated: dict[str, Any] | None = None


@dataclass(frozen=True)
class RankFailure:
    """What a rank writes that raised.

    Attributes:
        type: Of the exception, with its module.
        message: First line of what it says.
        is_out_of_memory: By type, of the exception or of one that led to it. (torch's allocator on
            CPU raises a plain ``RuntimeError``, which is not told from others.)
    """

    rank: int
    type: str
    message: str
    is_out_of_memory: bool

    @classmethod
    def of(cls, rank: int, exception: BaseException) -> RankFailure:
        """Describe an exception, or the one among those that led to it that is about memory."""
        shown, is_out_of_memory = exception, False
        link: BaseException | None = exception
        seen: set[int] = set()
        while link is not None and id(link) not in seen and not is_out_of_memory:
            seen.add(id(link))  # a chain may close
            if isinstance(link, (torch.OutOfMemoryError, MemoryError)):
                shown, is_out_of_memory = link, True
            link = link.__cause__ or link.__context__
        lines = str(shown).strip().splitlines() or [""]
        module, name = type(shown).__module__, type(shown).__qualname__
        full_name = name if module == "builtins" else f"{module}.{name}"
        return cls(rank, full_name, lines[0], is_out_of_memory)


class Measure(L.Callback):
    """Measures the run that it is a callback of.

    Args:
        out: Folder for ``rank{r}.json``, or ``failure{r}.json``.
        warmup_steps: Optimizer steps before the clock starts.
        timed_steps: Optimizer steps on the clock; those after them are observed.
    """

    def __init__(self, out: str, warmup_steps: int, timed_steps: int) -> None:
        self.out = Path(out)
        self.warmup_steps = warmup_steps
        self.timed_steps = timed_steps
        self._tokens = 0
        self._last_end = 0.0
        self._observer: Observer | None = None
        self._observed_steps = 0

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin."""
        self.measured = RankMeasurement(trainer.global_rank, trainer.world_size)
        self._note_simulated(trainer.global_step)
        self._last_end = time.perf_counter()

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Enter the observer once the timed steps are over."""
        if trainer.global_step >= self.warmup_steps + self.timed_steps and self._observer is None:
            resting = resting_tensors(pl_module, trainer.optimizers)
            self.measured.resting_bytes = nbytes_of(resting)
            self._observer = Observer(resting)
            self._observer.start()

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Take the time at the end of each optimizer step."""
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        assert isinstance(loss, torch.Tensor), "a recipe's training step returns its loss"
        # Lightning divides the loss by the number of micro-batches before the backward.
        self.measured.losses.append(loss.item() * trainer.accumulate_grad_batches)
        self._tokens += _num_tokens(batch)
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        now = time.perf_counter()
        if self.warmup_steps < trainer.global_step <= self.warmup_steps + self.timed_steps:
            self.measured.step_s.append(now - self._last_end)
            self.measured.step_tokens.append(self._tokens)
        if self._observer is not None:
            self._observed_steps += 1
        self._note_simulated(trainer.global_step)
        self._last_end, self._tokens = time.perf_counter(), 0

    def _note_simulated(self, num_steps: int) -> None:
        usage = find_usage()
        if usage is not None and num_steps == self.warmup_steps:
            self._usage_before = usage.copy()
        elif usage is not None and num_steps == self.warmup_steps + self.timed_steps:
            per_step = usage.per_step_since(self._usage_before, self.timed_steps)
            self.measured.simulated = per_step

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write what was measured."""
        if self._observer is not None:
            seen = self._observer.stop()
            steps = self._observed_steps
            self.measured.peak_bytes = seen.peak_bytes
            self.measured.payload_bytes = seen.payload_bytes / steps
            self.measured.collectives = {kind: n / steps for kind, n in seen.calls.items()}
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / f"rank{self.measured.rank}.json"
        path.write_text(json.dumps(vars(self.measured)))

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Stop observing, and write why; what was measured of an unfinished run is dropped."""
        if self._observer is not None:
            self._observer.stop()
            self._observer = None
        failure = RankFailure.of(trainer.global_rank, exception)
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / f"failure{failure.rank}.json"
        unfinished = path.with_suffix(".part")  # other ranks may end this one while it writes
        unfinished.write_text(json.dumps(asdict(failure)))
        unfinished.replace(path)


def _num_tokens(batch: Any) -> int:
    """Tokens that are trained on: no padding."""
    mask = batch.get("attention_mask")
    if mask is not None:
        return int(mask.sum())
    num_tokens: int = batch["input_ids"].numel()
    return num_tokens
