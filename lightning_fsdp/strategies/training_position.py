"""Where a resumed run stands in its epoch, counted in the batches of this run.

The Trainer saves how many micro-batches of the epoch were read. That number is another one under
another batch of all ranks together. A :class:`ResumableLoader` knows it in samples; so the count is
corrected, and optimizer steps and the end of the epoch fall where they would have fallen. (Not with
several training loaders, which may be read at different paces.)

All of this is asked and done in ``on_train_start``, between the loops' own preparations. So is what
Lightning 2.6 leaves out in an epoch that is resumed: its ``on_train_epoch_start``, where a
``GradientAccumulationScheduler`` acts, the metrics that callbacks go by, and the step of a
``ReduceLROnPlateau`` at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor

from lightning_fsdp.data import ResumableLoader
from lightning_fsdp.strategies import lightning_internals


def is_inside_epoch(trainer: pl.Trainer) -> bool:
    """Whether training goes on in the middle of an epoch; asked before its first batch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return progress.current.ready > 0 and not progress.is_last_batch


def leave_finished_epoch(trainer: pl.Trainer) -> None:
    """Where the last batch of an epoch was saved, begin the next one as any other.

    Lightning 2.6 takes it for the rest of the saved epoch: it calls no ``on_train_epoch_start`` and
    does not count it, so that a checkpoint at its end makes a third run train it once more.
    """
    fit_loop = trainer.fit_loop
    if (
        fit_loop.restarted_mid_epoch
        and fit_loop.epoch_loop.restarted_on_train_batch_end
        and fit_loop.epoch_loop.batch_progress.is_last_batch
    ):
        fit_loop.reset_restart_stage()


def accumulate_as_scheduled(trainer: pl.Trainer) -> None:
    """Take the number of micro-batches of a step that the callback has for a resumed epoch."""
    fit_loop = trainer.fit_loop
    if not (fit_loop.restarted_mid_epoch or fit_loop.restarted_on_epoch_end):
        return  # the hook will be called
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            callback.on_train_epoch_start(trainer, trainer.lightning_module)


def monitored(trainer: pl.Trainer) -> dict[str, Tensor]:
    """On the CPU, what schedulers, callbacks and hooks may go by: all that was logged by now."""
    return {name: value.detach().cpu() for name, value in trainer.callback_metrics.items()}


def restore_monitored(
    trainer: pl.Trainer, saved: Mapping[str, Tensor], device: torch.device
) -> None:
    """Let callbacks go by the metrics they would go by if nothing had stopped.

    Lightning's checkpoints do not have them, so that an ``EarlyStopping`` finds none where a run is
    resumed after the validation at the end of an epoch.

    Args:
        trainer: About to train.
        saved: What :func:`monitored` returned when the checkpoint was saved.
        device: Where metrics are.
    """
    trainer.callback_metrics.update({name: value.to(device) for name, value in saved.items()})


def let_plateaus_step(trainer: pl.Trainer) -> None:
    """Let each ``ReduceLROnPlateau`` step when it would if nothing had stopped.

    One steps after the Trainer saves, and Lightning does not make up for that; nor does it step one
    at the end of an epoch that was resumed.

    Args:
        trainer: About to train, with the metrics of the checkpoint.
    """
    metrics, fit_loop = trainer.callback_metrics, trainer.fit_loop

    def has_all(interval: str) -> bool:
        return all(name in metrics for name in _monitors(trainer.lr_scheduler_configs, interval))

    epoch_loop = fit_loop.epoch_loop
    if epoch_loop.restarted_on_train_batch_end and has_all("step"):
        epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)
    # The end of the saved epoch comes without another batch, which would log what is missing.
    is_at_end = fit_loop.restarted_on_epoch_end or epoch_loop.restarted_on_last
    if (fit_loop.resumed_on_epoch_end or is_at_end) and not has_all("epoch"):
        return
    if fit_loop.resumed_on_epoch_end:  # and does not come again
        lightning_internals.step_at_plateaus(trainer)
    lightning_internals.step_at_plateaus_from_now(trainer)


def _monitors(configs: Iterable[LRSchedulerConfig], interval: str) -> list[str]:
    """What schedulers fail without; one that is not strict is passed over."""
    plateaus = [c for c in configs if c.reduce_on_plateau and c.interval == interval and c.strict]
    return [config.monitor for config in plateaus if config.monitor is not None]


def count_in_own_batches(trainer: pl.Trainer) -> None:
    """Correct the count of micro-batches read in this epoch by the training loader's position."""
    loader, progress = trainer.train_dataloader, trainer.fit_loop.epoch_loop.batch_progress
    if not isinstance(loader, ResumableLoader) or not trainer.fit_loop.restarting:
        return
    # An epoch that was over is over, even if this run would have found another batch in it.
    is_over = progress.is_last_batch
    num_read = trainer.num_training_batches if is_over else loader.num_batches_read
    inside = num_read % trainer.accumulate_grad_batches
    if inside and not is_over:
        rank_zero_warn(
            "The checkpoint lies inside of an optimizer step of this run: "
            f"{loader.state_dict()['num_samples']} samples of the epoch were read, and a step "
            f"takes {loader.batch_size} x {trainer.accumulate_grad_batches} on each of "
            f"{trainer.world_size} ranks. The first step will take the rest only, without {inside} "
            "of its micro-batches. Save after an optimizer step, and keep the product of batch "
            "size, accumulate_grad_batches and ranks."
        )
    progress.increment_by(int(num_read) - progress.current.ready, is_last_batch=is_over)
