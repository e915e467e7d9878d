"""An exponential moving average of the weights, on shards: 1/W of the memory, no communication.

What Lightning's ``EMAWeightAveraging`` does with whole weights, this does with each rank's pieces:

    after a step        average = decay * average + (1 - decay) * weights, piece by piece
    validation          runs with the average, buffers being those of rank 0; the weights come back
                        after it
    a checkpoint        ``state_dict`` is the average, ``current_model_state`` the weights
    end of training     the module has the average; after an exception, and where there was no
                        update, the weights

Only a checkpoint gathers. Files are those of Lightning's callback: either goes on from the other's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim.swa_utils import get_ema_avg_fn
from typing_extensions import override

from lightning_fsdp.checkpoint.deferred import DeferredTensor
from lightning_fsdp.engines.base import Engine


class ShardedEMA(EMAWeightAveraging):
    """Averages the weights of a sharded run under any of this package's strategies.

    Args:
        decay: What the average keeps of itself at each update, between 0 and 1.
        use_buffers: Average buffers as well; otherwise the average has the current ones.
        update_every_n_steps: In optimizer steps; 0: not after steps.
        update_starting_at_step: The first such step, from 0.
        update_starting_at_epoch: From this epoch on, also update at the end of each.

    Raises:
        ValueError: ``decay`` is not between 0 and 1, or ``update_every_n_steps`` is negative.
        TypeError: When a fit begins, under a strategy that does not shard.
    """

    averages_shards = True  # by which the strategies tell it from Lightning's own

    def __init__(
        self,
        decay: float = 0.999,
        use_buffers: bool = True,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
    ) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"decay: expected a number between 0 and 1, got {decay}.")
        if update_every_n_steps < 0:  # which would be taken for 0
            raise ValueError(
                "update_every_n_steps: expected a number of optimizer steps, or 0 for no update "
                f"after steps, got {update_every_n_steps}."
            )
        super().__init__(
            decay=decay,
            use_buffers=use_buffers,
            update_every_n_steps=update_every_n_steps,
            update_starting_at_step=update_starting_at_step,
            update_starting_at_epoch=update_starting_at_epoch,
        )
        self._mean = get_ema_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._has_buffers = use_buffers
        self._average: dict[str, Tensor] = {}  # this rank's pieces by name, while there is a fit
        self._is_swapped = False  # the module has the average, and the weights are in its place
        self._num_averaged = 0
        self._step_of_update = 0  # optimizer steps taken then
        self._epoch_of_update = -1
        self._loaded: dict[str, Any] | None = None  # a whole average from a file, until sharding

    # -- what is averaged --------------------------------------------------------------------------

    def _current(
        self, trainer: pl.Trainer, module: pl.LightningModule
    ) -> Iterator[tuple[str, Any]]:
        """This rank's pieces of the weights, and buffers; they share memory with the module."""
        for name, weight in _engine(trainer).weights.items():
            yield name, weight.shard
        for name, buffer in module.named_buffers():
            yield name, buffer.detach()

    @torch.no_grad()
    def _update(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        buffers = dict(module.named_buffers())
        for name, current in self._current(trainer, module):
            average = self._average[name]
            if self._num_averaged == 0 or (name in buffers and not self._has_buffers):
                average.copy_(current)
            else:
                average.copy_(self._mean(average, current, self._num_averaged))
        self._num_averaged += 1

    @torch.no_grad()
    def _swap(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        _engine(trainer).read_shards_again()  # an evaluation may have kept units whole
        for name, current in self._current(trainer, module):
            average = self._average[name]
            before = current.clone()
            current.copy_(average)
            average.copy_(before)
        self._is_swapped = not self._is_swapped

    # -- hooks, in the order in which the Trainer calls them ---------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and not isinstance(getattr(trainer.strategy, "engine", None), Engine):
            raise TypeError(
                "ShardedEMA: expected a strategy of lightning_fsdp, got "
                f"{type(trainer.strategy).__name__}. Without sharding use Lightning's "
                "EMAWeightAveraging."
            )

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return  # the module has got the average
        if "current_model_state" not in checkpoint:
            rank_zero_warn(
                "ShardedEMA: the checkpoint was saved without an average. It starts from the "
                "weights in the checkpoint."
            )
            return
        self._loaded = dict(checkpoint["state_dict"])
        self._num_averaged = int(checkpoint["averaging_state"]["n_averaged"])
        # The module got the average; in its place come the weights.
        current = {"state_dict": checkpoint["current_model_state"]}
        trainer.strategy.load_model_state_dict(current, strict=pl_module.strict_loading)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pieces = {name: piece.clone() for name, piece in self._current(trainer, pl_module)}
        self._average, self._is_swapped = pieces, self._loaded is not None
        self._epoch_of_update = -1
        if self._loaded is None:  # nothing of a fit before
            self._num_averaged, self._step_of_update = 0, trainer.global_step
            return
        loaded, self._loaded = self._loaded, None
        average = {"state_dict": loaded}
        trainer.strategy.load_model_state_dict(average, strict=pl_module.strict_loading)
        self._swap(trainer, pl_module)  # the weights are back, and the average is in its place

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step = trainer.global_step
        if step > self._step_of_update and self.should_update(step_idx=step - 1):
            self._update(trainer, pl_module)
            self._step_of_update = step

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        epoch = trainer.current_epoch
        if epoch > self._epoch_of_update and self.should_update(epoch_idx=epoch):
            self._update(trainer, pl_module)
            self._epoch_of_update = epoch

    @override
    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._average:
            self._swap(trainer, pl_module)
            # What the strategy shared before were the current ones; running statistics differ by
            # rank, in the average as well.
            _engine(trainer).broadcast_buffers()

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._average:
            self._swap(trainer, pl_module)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if self._average and self._is_swapped:  # a validation has failed
            self._swap(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._num_averaged > 0:
            self._swap(trainer, pl_module)
        elif trainer.global_step > self._step_of_update:
            rank_zero_warn(
                "ShardedEMA: the training has ended before the first update, so there is no "
                "average, and the module keeps its weights. Let updates begin earlier "
                "(update_starting_at_step, update_starting_at_epoch, update_every_n_steps)."
            )
        self._average = {}

    # -- checkpoints -------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"latest_update_step": self._step_of_update}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._step_of_update = state_dict["latest_update_step"]

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["current_model_state"] = checkpoint["state_dict"]
        if self._average:  # otherwise the module has it
            other = "current_model_state" if self._is_swapped else "state_dict"
            self._swap(trainer, pl_module)
            state = trainer.strategy.lightning_module_state_dict()
            # It shares memory with the module, where the others are again when it is written.
            copies = {id(v): _kept(v) for v in state.values() if isinstance(v, Tensor)}
            checkpoint[other] = {name: copies.get(id(v), v) for name, v in state.items()}
            self._swap(trainer, pl_module)
        checkpoint["averaging_state"] = {"n_averaged": torch.tensor(self._num_averaged)}


def _kept(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DeferredTensor):
        tensor.keep_values()
        return tensor
    return tensor.clone()


def _engine(trainer: pl.Trainer) -> Engine:
    engine: Engine = trainer.strategy.engine  # type: ignore[attr-defined]
    return engine
