"""Models that exist already: in a folder, or under a name on the Hugging Face hub.

Both are read before the strategy shards the model, so every engine takes them; a rank holds the
whole model on the host until then.
"""

from __future__ import annotations

import re
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from recipes.errors import RecipeError

_Config = TypeVar("_Config", bound=PretrainedConfig)
_Model = TypeVar("_Model", bound=PreTrainedModel)

# A constant that GPT-2 stored once; transformers knows of its neighbour `attn.bias` alone.
_OLD_BUFFERS = re.compile(r"\.(attn|crossattention)\.masked_bias$")
# What transformers raises: for what is not there, does not fit, or was cut off.
_UNLOADABLE = (
    OSError, ValueError, RuntimeError, KeyError, EOFError, SafetensorError, UnpicklingError,
)  # fmt: skip
_NAMED_WEIGHTS = 3  # in an error; a layer has a dozen


def load_config(name: str, kind: type[_Config]) -> _Config:
    """The configuration of a model that exists.

    Args:
        name: A folder with ``config.json``, or a name on the hub.
        kind: What it has to be.

    Raises:
        RecipeError: There is none, a damaged one, or it is that of another family.
    """
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
        why = f"{type(error).__name__}: {error}"
        wrong = "--model.pretrained, or copy or download its files again"
        raise _not_pretrained(name, why, correct=wrong) from error
    model: _Model
    model, report = loaded
    # transformers draws new values for what a file lacks, drops what the model lacks, and says
    # both in the log alone.
    if report["missing_keys"]:
        raise _not_pretrained(name, f"no weights for {', '.join(sorted(report['missing_keys']))}")
    _refuse_left_over(
        name, sorted(key for key in report["unexpected_keys"] if not _OLD_BUFFERS.search(key))
    )
    model.train()  # from_pretrained leaves it in eval mode
    return model


def _refuse_left_over(name: str, keys: list[str]) -> None:
    if keys:
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
