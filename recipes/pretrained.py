"""Models that exist already: in a folder, or under a name on the Hugging Face hub.

load_model         before the strategy shards the model; a rank holds all of it until then
PretrainedSlices   built without memory; after sharding each rank reads what it keeps
                   setup > configure_model > a checkpoint, if there is one > sharding > reading,
                   before any other callback sees the weights
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import lightning as L
import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file, get_checkpoint_shard_files
from typing_extensions import override

from lightning_fsdp import load_pretrained
from lightning_fsdp.checkpoint.contents import LEFT_OUT
from lightning_fsdp.checkpoint.safetensors_folder import INDEX, SINGLE, SafetensorsFolder
from recipes.errors import RecipeError, agreed_mistakes

_Config = TypeVar("_Config", bound=PretrainedConfig)
_Model = TypeVar("_Model", bound=PreTrainedModel)

# A constant that GPT-2 stored once; transformers knows of its neighbour `attn.bias` alone.
_OLD_BUFFERS = re.compile(r"\.(attn|crossattention)\.masked_bias$")
# What transformers raises: for what is not there, does not fit, or was cut off.
_UNLOADABLE = (
    OSError, ValueError, RuntimeError, KeyError, EOFError, SafetensorError, UnpicklingError,
)  # fmt: skip
_AGAIN = "--model.pretrained, or copy or download its files again"
_NAMED_WEIGHTS = 3  # in an error; a layer has a dozen
_OF_ADAPTERS = ".lora_"  # in names of what peft adds to a model


def load_config(name: str, kind: type[_Config]) -> _Config:
    """The configuration of a model that exists.

    Args:
        name: A folder with ``config.json``, or a name on the hub.
        kind: What it has to be.

    Raises:
        RecipeError: There is none, a damaged one, or it is that of another family.
    """
    if Path(name).is_file():  # which transformers reads, and looks for no weights beside it
        raise _not_pretrained(name, "a file")
    try:
        config = AutoConfig.from_pretrained(name)
    # A field of a wrong type is an error of many kinds, some of them plain `Exception`s.
    except Exception as error:
        why, wrong = " ".join(str(error).split()), "its config.json, or --model.pretrained"
        raise _not_pretrained(name, why, correct=wrong) from error
    if not isinstance(config, kind):
        raise _not_pretrained(name, f"a model of type '{config.model_type}'")
    return config


def load_model(name: str, kind: type[_Model], config: PretrainedConfig) -> _Model:
    """A model with its weights, to be trained, in torch's default dtype.

    Args:
        name: A folder with weights, or a name on the hub.
        kind: What it is.
        config: Of the model; may differ from the stored one in what weights do not depend on.

    Raises:
        RecipeError: There are no weights, damaged ones, or not those of the model.
    """
    try:
        # Main weights in the run's dtype, whatever the file's: bf16 ones lose small updates.
        loaded: Any = kind.from_pretrained(
            name, config=config, dtype=torch.get_default_dtype(), output_loading_info=True
        )
    except _UNLOADABLE as error:
        raise _not_pretrained(name, f"{type(error).__name__}: {error}", correct=_AGAIN) from error
    model: _Model
    model, report = loaded
    # transformers draws new values for what a file lacks, drops what the model lacks, and says
    # both in the log alone.
    _refuse_differences(name, report["missing_keys"], report["unexpected_keys"])
    model.train()  # from_pretrained leaves it in eval mode
    return model


def without_weights(name: str, kind: type[_Model], config: PretrainedConfig) -> _Model:
    """The model that :func:`load_model` gives, on the meta device: without memory and values.

    Args:
        name: A folder, or a name on the hub.
        kind: What it is.
        config: Of the model.
    """
    with torch.device("meta"):
        model = kind(config)
    model.config.dtype = torch.get_default_dtype()
    if model.can_generate():
        with contextlib.suppress(OSError):  # it need not be there
            model.generation_config = GenerationConfig.from_pretrained(name)
    return model


def folder_of(name: str) -> Path:
    """Where the files of a model are on this host, which are downloaded if need be.

    Args:
        name: A folder with safetensors, or a name on the hub.

    Raises:
        RecipeError: There are none, or damaged ones.
    """
    try:
        folder = Path(name) if Path(name).is_dir() else _cached_folder_of(name)
        with SafetensorsFolder(folder):
            return folder
    except (OSError, ValueError, KeyError) as error:
        raise RecipeError.at(
            "meta_init",
            f"safetensors in '{name}', of which each rank reads its slices",
            f"none that can be read ({error})",
            "Set --model.meta_init false, which reads other files as well, or correct "
            "--model.pretrained.",
        ) from error


def _cached_folder_of(name: str) -> Path:
    try:
        file = cached_file(name, SINGLE)
    except OSError:  # it is in several files, or not there
        file = cached_file(name, INDEX)
        get_checkpoint_shard_files(name, file)  # type: ignore[no-untyped-call]
    return Path(str(file)).parent


def read_weights(module: nn.Module, name: str, folder: Path) -> None:
    """Read into each rank's slices, and convert to their dtype. Collective.

    Args:
        module: Sharded. Adapters of peft in it stay as they are.
        name: Of the model, for errors.
        folder: With its files.

    Raises:
        RecipeError: Files are damaged, or not those of the model.
    """
    try:
        found = load_pretrained(module, folder, strict=False, cast=True)
    except (OSError, ValueError, NotImplementedError) as error:
        raise _not_pretrained(name, f"{type(error).__name__}: {error}", correct=_AGAIN) from error
    _refuse_differences(name, found.missing, found.unexpected)


class PretrainedSlices:
    """Weights of a folder that a module without memory gets once it is sharded; and no more then.

    Args:
        name: The folder, or a name on the hub.
    """

    _folder: Path | None  # None before the model is built, and once it has its weights

    def __init__(self, name: str) -> None:
        self.name = name
        self._folder = None
        self._is_resumed = False

    def build(self, kind: type[_Model], config: PretrainedConfig) -> _Model:
        """The model without its weights, which wait for :meth:`read`."""
        self._folder = folder_of(self.name)
        return without_weights(self.name, kind, config)

    def begin(self, trainer: L.Trainer) -> None:
        """A run begins, before it has built the model or read a checkpoint."""
        self._is_resumed = False
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(each, _ReadsFirst) for each in callbacks):
            callbacks.insert(0, _ReadsFirst())

    def note(self, module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
        """Leave to a checkpoint what it holds.

        Args:
            module: Not sharded yet, if its weights wait.
            checkpoint: That it is loaded from.

        Raises:
            RecipeError: It holds a part of the weights, and the folder all of them.
        """
        if self._folder is None:
            return
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        base = {name for name in names if _OF_ADAPTERS not in name}
        left_out = base & set(checkpoint.get(LEFT_OUT, ()))
        if left_out and left_out != base:
            raise RecipeError.at(
                "--ckpt_path",
                f"a checkpoint with all weights that '{self.name}' has, or with none of them",
                f"one with '{min(base - left_out)}' and without '{min(left_out)}'",
                "Set --model.meta_init false.",
            )
        self._is_resumed = not left_out

    def read(self, trainer: L.Trainer, module: nn.Module) -> None:
        """Read what waits into the sharded module. Collective."""
        if self._folder is not None and not self._is_resumed:
            with agreed_mistakes(trainer.strategy):
                read_weights(module, self.name, self._folder)
        self._folder = None


class _ReadsFirst(L.Callback):
    """The first of the callbacks: others train, copy or average weights in these hooks."""

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        slices = getattr(pl_module, "slices", None)
        if isinstance(slices, PretrainedSlices):
            slices.read(trainer, pl_module)

    on_validation_start = on_test_start = on_predict_start = on_fit_start


def _refuse_differences(name: str, missing: list[str], left_over: list[str]) -> None:
    """Of files and model; names of weights."""
    if missing:
        raise _not_pretrained(name, f"no weights for {', '.join(sorted(missing))}")
    if keys := sorted(key for key in left_over if not _OLD_BUFFERS.search(key)):
        more = ", ..." if len(keys) > _NAMED_WEIGHTS else ""
        raise RecipeError(
            f"pretrained: expected a place in the model for every stored weight, got {len(keys)} "
            f"without one in '{name}': {', '.join(keys[:_NAMED_WEIGHTS])}{more}. Correct its "
            f"config.json, such as the number of layers, or take them out of the files."
        )


def _not_pretrained(name: str, why: object, *, correct: str = "--model.pretrained") -> RecipeError:
    return RecipeError(
        f"pretrained: expected a folder with config.json and weights, or a name on the hub, got "
        f"'{name}' ({why}). Correct {correct}."
    )
