"""What a sharded run cannot do yet: refused before training starts, by name, on every rank.

Each of these would otherwise train something else than it says, or wait for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from lightning_fsdp.core.sharded_module import ShardedModule
from lightning_fsdp.strategies.lightning_internals import runs_the_model_on_one_rank
from lightning_fsdp.strategies.token_mean import NUM_TOKENS

# Callbacks that read or replace whole parameters between steps, and the nearest thing that works.
_CALLBACKS: dict[type[pl.Callback], str] = {
    WeightAveraging: "it would average slices with whole weights. lightning_fsdp.ShardedEMA "
    "averages slices, with the options of EMAWeightAveraging",
    StochasticWeightAveraging: "it would average slices with whole weights. Average the weights of "
    "saved checkpoints instead",
    ModelPruning: "its masks need whole weights. Prune the module before training",
}


def refuse_unsupported(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    *,
    saves_in_background: bool,
    saves_base: bool,
    weigh_by: str | None,
) -> None:
    """Refuse what would be silently wrong or hang under sharding.

    Raises:
        NotImplementedError: A callback or logger that needs whole weights, or a hyper-parameter
            that holds some, named; or weights of micro-batches with manual optimization.
        TypeError: A module that another wrapper distributes already.
    """
    if weigh_by is not None and not module.automatic_optimization:
        raise _weighing_by_hand(f"weigh_by={weigh_by!r}")
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        for kind, reason in _CALLBACKS.items():
            if isinstance(callback, kind) and not getattr(callback, "averages_shards", False):
                raise NotImplementedError(
                    f"{type(callback).__name__} does not work with a sharded module: {reason}."
                )
        if not saves_base and getattr(callback, "averages_shards", False):
            raise NotImplementedError(
                f"{type(callback).__name__} with checkpoint_base=False: expected checkpoints of "
                "one set of weights, got an average beside them, which has its own of the base. "
                "Set checkpoint_base=True."
            )
        is_linked = isinstance(callback, ModelCheckpoint) and callback.save_last == "link"
        if saves_in_background and is_linked:
            raise NotImplementedError(
                f"{type(callback).__name__}(save_last='link') with async_save=True: expected a "
                "link to a checkpoint that is in place, got one that is being written; a run that "
                "is killed meanwhile could not resume from it. Set save_last=True, which saves "
                "once more."
            )
    if trainer.state.fn == TrainerFn.FITTING and trainer.checkpoint_callbacks:
        _refuse_modules_in(module)
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


def _refuse_modules_in(module: pl.LightningModule) -> None:
    """Refuse hyper-parameters that no checkpoint could hold, before the first is due."""
    mine = {id(parameter) for parameter in module.parameters()}
    for name, value in module.hparams.items() if isinstance(module.hparams, dict) else ():
        if isinstance(value, nn.Module) and any(id(p) in mine for p in value.parameters()):
            raise NotImplementedError(
                f"{type(module).__name__}.save_hyperparameters(): expected plain data for "
                f"checkpoints, got {name!r}, a {type(value).__name__} that is sharded with the "
                f"module it is in. Write save_hyperparameters(ignore=[{name!r}]); its weights are "
                "in the state dict."
            )


def refuse_num_tokens(output: object) -> None:
    """Refuse a number of tokens from a ``training_step`` that has run its own backward and step.

    Raises:
        NotImplementedError: There is one.
    """
    if isinstance(output, Mapping) and NUM_TOKENS in output:
        raise _weighing_by_hand(f"{NUM_TOKENS!r} in training_step's dictionary")


def _weighing_by_hand(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"{what}: expected automatic optimization, got automatic_optimization=False, where nothing "
        "tells which backwards make up a step. Divide your sum of losses by the tokens of all "
        "ranks, times the number of ranks, before manual_backward."
    )


# Of Lightning's FSDPStrategy and torch's engines -> what takes its place here.
_ELSEWHERE = {
    "sharding_strategy": (
        "zero_stage=3 for FULL_SHARD, zero_stage=2 for SHARD_GRAD_OP, shard_size for HYBRID_SHARD"
    ),
    "reshard_after_forward": (
        "zero_stage=3 for True, zero_stage=2 for False, shard_size='host', state_over='all' for a "
        "number (ZeRO++'s hpZ)"
    ),
    "mixed_precision": "Trainer(precision='bf16-mixed')",
    "mp_policy": "Trainer(precision='bf16-mixed')",
    "auto_wrap_policy": "units, such as units=['Block']",
    "activation_checkpointing_policy": "activation_checkpointing",
    "offload_policy": "cpu_offload=True",
    "state_dict_type": "checkpoint='full' or checkpoint='sharded'",
    "save_distributed_checkpoint": "checkpoint='sharded'",
    "data_parallel_size": "device_mesh=(replicas, shards)",
}


def refuse_other_options(strategy: str, others: Mapping[str, object]) -> None:
    """Refuse constructor options that there are not.

    Raises:
        TypeError: There is one.
    """
    for name, value in others.items():
        cure = f"Use {_ELSEWHERE[name]}." if name in _ELSEWHERE else "Leave it out."
        raise TypeError(f"{strategy}: expected an option of its own, got {name}={value!r}. {cure}")


def refuse_unsupported_options(
    *,
    checkpoint: str,
    checkpoint_base: object,
    async_save: bool,
    activation_checkpointing: object,
    accumulation: str,
    cpu_offload: object,
    compiles: object,
    on_nonfinite: object,
    weigh_by: object,
    timeout: object,
) -> None:
    """Refuse constructor options that do not work yet.

    Raises:
        NotImplementedError: Options that do not work together.
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
    if async_save and checkpoint != "sharded":
        raise NotImplementedError(
            "async_save=True: expected checkpoint='sharded', of which every rank copies its slices "
            f"and writes them while training goes on, got checkpoint={checkpoint!r}, for which "
            "rank 0 gathers whole tensors while it writes."
        )
    is_names = isinstance(activation_checkpointing, (list, tuple)) and all(
        isinstance(name, str) for name in activation_checkpointing
    )
    if not is_names and not isinstance(activation_checkpointing, bool | None):
        raise TypeError(
            "activation_checkpointing: expected True (every unit) or a list of class names, got "
            f"{activation_checkpointing!r}."
        )
    flags = {"checkpoint_base": checkpoint_base, "cpu_offload": cpu_offload, "compile": compiles}
    for option, value in flags.items():
        if not isinstance(value, bool):  # any other would be taken for one of the two
            raise TypeError(f"{option}: expected True or False, got {value!r}.")
    if on_nonfinite not in (None, "raise", "skip"):
        raise ValueError(
            "on_nonfinite: expected 'raise' (an error that says where it began), 'skip' (no step) "
            f"or None, got {on_nonfinite!r}."
        )
    if not isinstance(weigh_by, str | None):
        raise TypeError(
            "weigh_by: expected the key of training_step's dictionary or of the batch that holds "
            f"the number of tokens, got {weigh_by!r}."
        )
    if not isinstance(timeout, timedelta | None):
        raise TypeError(
            "timeout: expected a datetime.timedelta, such as timedelta(minutes=10), got "
            f"{timeout!r}."
        )
