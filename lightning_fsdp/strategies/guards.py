"""What a sharded run cannot do yet: refused before training starts, by name, on every rank.

Each of these would otherwise train something else than it says, or wait for ever.
"""

from __future__ import annotations

from datetime import timedelta

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from lightning_fsdp.core.sharded_module import ShardedModule
from lightning_fsdp.strategies.lightning_internals import runs_the_model_on_one_rank

# Callbacks that read or replace whole parameters between steps, and the nearest thing that works.
_CALLBACKS: dict[type[pl.Callback], str] = {
    WeightAveraging: "it would average slices with whole weights. lightning_fsdp.ShardedEMA "
    "averages slices, with the options of EMAWeightAveraging",
    StochasticWeightAveraging: "it would average slices with whole weights. Average the weights of "
    "saved checkpoints instead",
    BaseFinetuning: "it compares whole weights to find those that an optimizer has. Give the "
    "optimizer all parameters, and freeze and thaw them with requires_grad_",
    ModelPruning: "its masks need whole weights. Prune the module before training",
}


def refuse_unsupported(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse what would be silently wrong or hang under sharding.

    Raises:
        NotImplementedError: A callback or logger that needs whole weights, named.
        TypeError: A module that another wrapper distributes already.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        for kind, reason in _CALLBACKS.items():
            if isinstance(callback, kind) and not getattr(callback, "averages_shards", False):
                raise NotImplementedError(
                    f"{type(callback).__name__} does not work with a sharded module: {reason}."
                )
    for logger in trainer.loggers:
        if runs_the_model_on_one_rank(logger):
            raise NotImplementedError(
                f"{type(logger).__name__}(log_graph=True) runs the model on rank 0 alone, where it "
                "would wait for the other ranks for ever. Set log_graph=False."
            )
    for name, child in module.named_modules():
        if isinstance(child, DistributedDataParallel | FullyShardedDataParallel):
            raise TypeError(
                f"{name or type(module).__name__}: expected a plain module, got one wrapped in "
                f"{type(child).__name__}. Give the strategy the module inside it."
            )
        if isinstance(child, ShardedModule | FSDPModule):
            raise TypeError(
                f"{name or type(module).__name__}: expected a module that is not sharded, got a "
                f"{type(child).__name__} that fully_shard has sharded. Leave it to the strategy, "
                "which shards after the ranks have agreed on the weights; say units=[...] to "
                "choose what is gathered at a time."
            )


def refuse_unsupported_options(
    *,
    checkpoint: str,
    activation_checkpointing: object,
    accumulation: str,
    cpu_offload: object,
    compiles: object,
    timeout: object,
) -> None:
    """Refuse constructor options that do not work yet.

    Raises:
        ValueError: A value that will never be one.
        TypeError: A kind of value that will never be one.
    """
    if accumulation not in ("local", "sum"):
        raise ValueError(
            f"accumulation: expected 'local' (no communication until the last micro-batch) or "
            f"'sum' (reduce every micro-batch), got {accumulation!r}."
        )
    if checkpoint not in ("full", "sharded"):
        raise ValueError(
            "checkpoint: expected 'full' (one file that plain torch.load reads) or 'sharded' (a "
            f"folder to which each rank writes its slices), got {checkpoint!r}."
        )
    is_names = isinstance(activation_checkpointing, (list, tuple)) and all(
        isinstance(name, str) for name in activation_checkpointing
    )
    if not is_names and not isinstance(activation_checkpointing, bool | None):
        raise TypeError(
            "activation_checkpointing: expected True (every unit) or a list of class names, got "
            f"{activation_checkpointing!r}."
        )
    for option, value in {"cpu_offload": cpu_offload, "compile": compiles}.items():
        if not isinstance(value, bool):  # any other would be taken for one of the two
            raise TypeError(f"{option}: expected True or False, got {value!r}.")
    if not isinstance(timeout, timedelta | None):
        raise TypeError(
            "timeout: expected a datetime.timedelta, such as timedelta(minutes=10), got "
            f"{timeout!r}."
        )
