"""What callbacks have in common that look at training while it goes on, and when they end."""

from __future__ import annotations

import lightning.pytorch as pl
from typing_extensions import override

from lightning_fsdp.callbacks.plain_access import ReadableGradients, close, gradients_of
from lightning_fsdp.engines.access import Removable


class ObservingCallback(pl.Callback):
    """Relies on Lightning's own order of micro-batches, and looks until training ends or fails.

    Raises:
        NotImplementedError: Manual optimization.
    """

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a module that steps by hand."""
        if not pl_module.automatic_optimization:
            raise NotImplementedError(
                f"{type(self).__name__}: expected automatic optimization, got "
                f"{type(pl_module).__name__} with automatic_optimization=False, where nothing "
                "tells which backwards make up a step. Leave the callback out; gradients come to "
                "your training_step by self.trainer.strategy.gradients.on_local()."
            )

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look no more."""
        self.release(trainer)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Look no more."""
        self.release(trainer)

    def release(self, trainer: pl.Trainer) -> None:
        """Give back what was taken to look; may come before training has started, and twice."""


class GradientReader(ObservingCallback):
    """Has access to gradients while training goes on, under every strategy that gives any.

    Raises:
        NotImplementedError: A strategy without access to gradients.
    """

    _access: ReadableGradients | None = None
    _handle: Removable | None = None  # of a hook on the gradients

    @property
    def access(self) -> ReadableGradients:
        """From the start of training to its end."""
        assert self._access is not None, "training has started"
        return self._access

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the gradients."""
        super().on_train_start(trainer, pl_module)
        self._access = gradients_of(trainer, pl_module)

    @override
    def release(self, trainer: pl.Trainer) -> None:
        """Take the hook off."""
        if self._handle is not None:
            self._handle.remove()
        close(self._access)
        self._handle, self._access = None, None
