"""Signals, ``trainer.should_stop`` and clocks, answered by all ranks at the same place.

Lightning answers where each rank is when it hears one. It saves there for SLURM, to requeue the
job: under DDP rank 0 does so alone; slices would be of different steps, or ranks would wait for
each other for ever. To end, each rank waits there for a broadcast, in the middle of whatever
collective it is in; and one that is told to stop, or validates as its clock says, leaves the
others, who wait for it. So it is only noted:

    to requeue    answered after the first optimizer step by whose end all ranks have heard it
    SIGTERM       a fit ends after the first optimizer step by which any rank has heard it, another
                  run before its next batch
    should_stop   as in Lightning, on all ranks as soon as on one
    a clock       where ``val_check_interval`` is a time: likewise

For the first, one all-reduce of a number after each step, and for the last, after each batch. For
the others, one takes the place of Lightning's own broadcast for each batch; one is sent after each
validation and epoch, and before each batch of a run that only evaluates. (A validation in a fit is
not left: what goes on from a checkpoint in the middle of it would take its metrics of the batches
that were left.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from typing_extensions import override

from lightning_fsdp.strategies import lightning_internals
from lightning_fsdp.strategies.checkpoint import Checkpoints
from lightning_fsdp.strategies.host_numbers import all_reduce_numbers


class RequeueTogether(pl.Callback):
    """Answers the signal; added by the strategy where the Trainer would."""

    def __init__(self, trainer: pl.Trainer, checkpoints: Checkpoints) -> None:
        """Take the place of the Trainer's handler."""
        self._checkpoints = checkpoints
        self._signal = 0  # its number; 0: not heard
        self._handle = lightning_internals.answer_requeue_by(trainer, self._note)

    def _note(self, number: int) -> None:
        self._signal = number

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if lightning_internals.is_inside_step(trainer):
            return  # what goes on from there would have lost the gradients so far
        (number,) = all_reduce_numbers([self._signal], dist.ReduceOp.MIN)
        if number:
            self._signal = 0
            with self._checkpoints.in_foreground():  # what is requeued is killed
                self._handle(number)


def requeue_together(trainer: pl.Trainer, checkpoints: Checkpoints) -> None:
    """Let all ranks of a SLURM job that requeues itself save at the same place."""
    environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [each for each in callbacks if not isinstance(each, RequeueTogether)]
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        callbacks.append(RequeueTogether(trainer, checkpoints))


def end_together(trainer: pl.Trainer) -> Callable[[], None]:
    """Let all ranks end after the same batch, if one of them hears a SIGTERM or is to stop.

    They begin a validation after the same one, too, if a clock tells when.

    Returns:
        What an evaluation calls before a batch; the Trainer asks after one that trains.
    """

    def of_any_rank(*mine: bool) -> Iterable[bool]:
        try:
            return map(bool, all_reduce_numbers(mine, dist.ReduceOp.MAX))
        except RuntimeError:
            return mine  # a rank is lost; the next collective tells which

    lightning_internals.validate_by_agreement(trainer, of_any_rank)
    return lightning_internals.end_by_agreement(trainer, of_any_rank)
