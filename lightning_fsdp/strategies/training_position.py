"""Where a resumed run stands in its epoch, counted in the batches of this run.

The Trainer saves how many micro-batches of the epoch were read. That number is another one under
another batch of all ranks together. A :class:`ResumableLoader` knows it in samples; so the count is
corrected, and optimizer steps and the end of the epoch fall where they would have fallen. (Not with
several training loaders, which may be read at different paces.)

All of this is asked and done in ``on_train_start``, between the loops' own preparations.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn

from lightning_fsdp.data import ResumableLoader


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
    further = int(num_read) - progress.current.ready
    counted: Any
    for counted in (progress.current, progress.total):
        counted.ready += further
        counted.started += further
        counted.processed += further
        counted.completed += further
