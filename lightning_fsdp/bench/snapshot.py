"""The callback that writes a snapshot of CUDA's memory: every allocation of a step, with its stack.

It records the last warm-up step: by then everything is compiled and the optimizer has its state,
and the timed steps after it are undisturbed. The first two it records as well, for a run that they
end: what does not fit is found out there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_fsdp.callbacks.torch_internals import dump_memory_snapshot, record_memory_history

_FIRST_STEPS = (0, 1)  # the optimizer has its state from the end of the first one on


class Snapshot(L.Callback):
    """Records one step of rank 0; where training fails in the first two, that one.

    Args:
        path: Of the snapshot, for https://pytorch.org/memory_viz.
        step: Optimizer step, from 0.
    """

    def __init__(self, path: str, step: int) -> None:
        self.path = Path(path)
        self.step = step
        self._recorded: int | None = None  # the step that is being recorded

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse a snapshot of nothing, on every rank.

        Raises:
            ValueError: The arm does not train on CUDA.
        """
        if pl_module.device.type != "cuda":
            raise ValueError(
                f"--snapshot: expected training on CUDA, got device {str(pl_module.device)!r}."
            )

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin with the first micro-batch of the step."""
        is_due = trainer.global_step in (*_FIRST_STEPS, self.step)
        if trainer.global_rank == 0 and is_due and self._recorded is None:
            self._recorded = trainer.global_step
            record_memory_history(is_on=True)

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Once a step is over, write it; one of the first, which came through, is dropped."""
        if self._recorded != trainer.global_step:
            self._end(is_kept=self._recorded == self.step)

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Write what there is: of a step that ran out of memory, that is the picture to see."""
        self._end(is_kept=True)

    def _end(self, *, is_kept: bool) -> None:
        if self._recorded is None:
            return
        if is_kept:
            dump_memory_snapshot(str(self.path))
        self._recorded = None
        record_memory_history(is_on=False)
