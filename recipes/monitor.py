"""What a run shows (its settings, tokens per second, memory), and how Ctrl-C stops it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.tensorboard.summary import hparams
from typing_extensions import override

from lightning_fsdp.config import ZERO3
from recipes.causal_lm import CausalLM
from recipes.data import TextData

_RATE = "throughput/tokens_per_s"  # as the benchmark and `ThroughputMonitor` call it


class Settings(L.Callback):
    """Gives the run a line in TensorBoard's HParams: its settings, last losses and throughput."""

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the line; the metrics are what the run logs under these names."""
        metrics = dict.fromkeys(("train/loss", "val/loss", _RATE), 0.0)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            if isinstance(logger, TensorBoardLogger):
                for summary in hparams(_settings(trainer, pl_module), metrics):  # type: ignore[no-untyped-call]
                    logger.experiment.file_writer.add_summary(summary)


class Throughput(L.Callback):
    """Logs tokens per second of all ranks together, and every rank's memory.

    ``throughput/tokens_per_s`` (in the progress bar ``tokens/s``) counts positions of ``input_ids``
    over the wall time of training since the last log: with the data, without validation. Packed
    text has no padding; of prompts with answers, what fills a sequence up counts as well.
    ``memory/rank{r}_GiB`` is on CUDA the peak of allocated device memory since the last log, on CPU
    the resident size of the process. Both are logged in the steps that the Trainer logs.

    Attributes:
        num_tokens: Of this rank, since the last log.
        seconds: Spent in training since the last log, up to the last pause.
        resumed_at: When the clock was started; ``None`` while it stands.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.seconds = 0.0
        self.resumed_at: float | None = None

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to count."""
        self._restart()

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self._pause()

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start it again."""
        self.resumed_at = time.perf_counter()

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the batch; log when it is time."""
        self.num_tokens += batch["input_ids"].numel()
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not every or trainer.global_step % every or not is_step_complete(trainer, batch_idx):
            return
        device = pl_module.device
        memory = _memory_bytes(device)
        self._pause()
        # Rank r fills slot r, all add to the last one; a sum then gathers, on every strategy.
        shared = torch.zeros(trainer.world_size + 1, device=device)
        shared[trainer.global_rank] = memory / 2**30
        shared[-1] = self.num_tokens / self.seconds
        *memories, rate = trainer.strategy.reduce(shared, reduce_op="sum").tolist()
        pl_module.log_dict({f"memory/rank{rank}_GiB": size for rank, size in enumerate(memories)})
        pl_module.log(_RATE, rate)
        pl_module.log("tokens/s", rate, prog_bar=True, logger=False)
        self._restart()

    def _restart(self) -> None:
        self.num_tokens, self.seconds = 0, 0.0
        self.resumed_at = time.perf_counter()

    def _pause(self) -> None:
        if self.resumed_at is not None:
            self.seconds += time.perf_counter() - self.resumed_at
            self.resumed_at = None


class BatchProgressBar(RichProgressBar):
    """Lightning's bar, with the batches that the run reads of an epoch as its total.

    Lightning's total is the number of steps that are left, but its count is that of batches since
    the beginning of the epoch: a run that is resumed inside of one ends at 6 of 1, and one that
    accumulates two batches in a step at 12 of 6. Epochs are not counted to where steps end the run.

    Attributes:
        num_batches: That the run reads of the current epoch.
    """

    num_batches: int | float = 0

    @property
    @override
    def total_train_batches(self) -> int | float:
        return self.num_batches

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the total."""
        self.num_batches = batches_of_epoch(trainer, 0)
        super().on_train_epoch_start(trainer, pl_module)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Find the total of a run that is resumed inside of an epoch, which has no start then."""
        self.num_batches = batches_of_epoch(trainer, batch_idx)

    @override
    def _get_train_description(self, current_epoch: int) -> str:
        if self.trainer.max_epochs != -1:
            return super()._get_train_description(current_epoch)
        # Where steps end the run, Lightning's would be "Epoch 0/-2".
        return f"Epoch {current_epoch}".ljust(len(self.validation_description))


class GracefulStop(L.Callback):
    """Ctrl-C ends the run after the current optimizer step, with a checkpoint to go on from.

    The ranks agree in every step, so that all of them save and stop at the same one, also when only
    one was interrupted. A second Ctrl-C stops at once and saves nothing.

    Attributes:
        is_asked: This process was interrupted.
        has_stopped: It ended the run, which had steps left.
    """

    def __init__(self) -> None:
        self.is_asked = self.has_stopped = False
        self._previous: Any = None
        self._speaks = False  # on one rank
        self._process = os.getpid()

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take over Ctrl-C, where Python lets us: in the main thread."""
        self.is_asked, self.has_stopped, self._speaks = False, False, trainer.is_global_zero
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_interrupt)

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save and stop if any rank was asked to, whatever the least number of steps."""
        if not is_step_complete(trainer, batch_idx):
            return
        if not trainer.strategy.reduce_boolean_decision(self.is_asked, all=False):
            return
        path = Path(trainer.log_dir or trainer.default_root_dir) / "interrupted.ckpt"
        trainer.save_checkpoint(path)
        # Below these the Trainer would go on, and be stopped and saved again in every step.
        trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = 0, None
        trainer.should_stop = True
        self.has_stopped = trainer.global_step != trainer.max_steps
        rank_zero_info(
            f"Stopped after optimizer step {trainer.global_step}. Go on with: --ckpt_path {path}"
        )

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give Ctrl-C back."""
        self._release()

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Give Ctrl-C back."""
        self._release()

    def _on_interrupt(self, *_: object) -> None:
        if os.getpid() != self._process:
            return  # a data loader's worker, forked with the handler; it leaves with its rank
        if self.is_asked:
            self._release()
            raise KeyboardInterrupt
        self.is_asked = True
        if self._speaks:
            # A signal handler may interrupt a print, which then refuses to be entered again.
            os.write(2, b"\nStopping after this step. Press Ctrl-C again to stop at once.\n")

    def _release(self) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None


def is_step_complete(trainer: L.Trainer, batch_idx: int) -> bool:
    """Whether this micro-batch ended an optimizer step.

    Args:
        trainer: In ``on_train_batch_end``.
        batch_idx: Of the micro-batch, in its epoch.
    """
    is_last = batch_idx + 1 == trainer.num_training_batches
    return is_last or (batch_idx + 1) % trainer.accumulate_grad_batches == 0


def batches_of_epoch(trainer: L.Trainer, batch_idx: int) -> int | float:
    """How many batches of the current epoch are read by its end, or by that of the run.

    Args:
        trainer: In ``on_train_epoch_start`` or ``on_train_batch_start``.
        batch_idx: Of the next micro-batch, in its epoch.
    """
    if trainer.max_steps < 0:
        return trainer.num_training_batches
    per_step = trainer.accumulate_grad_batches
    num_steps = batch_idx // per_step + trainer.max_steps - trainer.global_step
    return min(trainer.num_training_batches, num_steps * per_step)


def _settings(trainer: L.Trainer, model: L.LightningModule) -> dict[str, str | int | float]:
    """Columns of HParams, which shows five by the alphabet: those that a benchmark has as well."""
    settings: dict[str, str | int | float] = {
        "accumulation": trainer.accumulate_grad_batches,
        "engine": _engine(trainer.strategy),
        "ranks": trainer.world_size,
        "stage": _stage(trainer.strategy),
        "train/model": type(model).__name__,
        "train/precision": trainer.precision,
    }
    data = getattr(trainer, "datamodule", None)
    if isinstance(data, TextData):
        settings |= {"batch": data.batch_size, "train/seq_len": data.seq_len}
    if isinstance(model, CausalLM):
        optimizer = model.optimizer_config
        settings |= {"train/lr": optimizer.lr, "train/optimizer": optimizer.name}
    return settings


def _engine(strategy: Strategy) -> str:
    """The name of a benchmark's arm, such as ``scratch``, ``fsdp2``, ``ddp`` or ``single``."""
    name = type(strategy).__name__.removesuffix("Strategy").lower()
    return {"scratchfsdp": "scratch", "singledevice": "single"}.get(name, name)


def _stage(strategy: Strategy) -> str:
    """The stage of ZeRO, as a benchmark writes it."""
    engine = getattr(strategy, "engine", None)
    return "none" if engine is None else "3" if engine.plan == ZERO3 else "2"


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    return int(psutil.Process().memory_info().rss)
