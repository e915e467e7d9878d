"""Signals to save or to end, answered by all ranks at the same place.

Lightning answers where each rank is when it hears one. It saves there for SLURM, to requeue the
job: under DDP rank 0 does so alone; slices would be of different steps, or ranks would wait for
each other for ever. To end, each rank waits there for a broadcast, in the middle of whatever
collective it is in. So a signal is only noted:

    to requeue    answered after the first optimizer step by whose end all ranks have heard it
    SIGTERM       a fit ends after the first optimizer step by which any rank has heard it, another
                  run before its next batch

For the first, one all-reduce of a number after each step. For the second, one takes the
place of Lightning's own broadcast between steps; one is sent at the end of each epoch, and before
each batch of a run that only evaluates. (A validation in a fit is not left: what goes on from a
checkpoint in the middle of it would take its metrics of the batches that were left.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from typing_extensions import override

from lightning_fsdp.strategies import lightning_internals
from lightning_fsdp.strategies.checkpoint import Checkpoints


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
        every = torch.tensor(self._signal, device=trainer.strategy.root_device)
        dist.all_reduce(every, dist.ReduceOp.MIN)
        if number := int(every.item()):
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
    """Let all ranks end before the same batch, if one of them hears a SIGTERM.

    Returns:
        What an evaluation calls before a batch; the Trainer asks before one that trains.
    """

    def heard_by_any(is_heard: bool) -> bool:
        every = torch.tensor(int(is_heard), device=trainer.strategy.root_device)
        try:
            dist.all_reduce(every, dist.ReduceOp.MAX)
        except RuntimeError:
            return False  # a rank is lost; the next collective tells which
        return bool(every.item())

    return lightning_internals.answer_sigterm_by(trainer, heard_by_any)
