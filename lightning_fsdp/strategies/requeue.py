"""SLURM's signal to save and requeue the job, answered by all ranks at the same place.

Lightning saves where each rank is when it hears the signal. Under DDP rank 0 does so alone. Slices
would be of different steps there, or ranks would wait for each other for ever. So the signal is
only noted, and answered after the first training batch by whose end all ranks have heard it:

    signal on a rank         noted
    on_train_batch_end       one all-reduce of a number; then Lightning's own handler on every rank

Lightning itself sends a number around before each batch.
"""

from __future__ import annotations

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
