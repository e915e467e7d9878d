"""How transformers names weights in files, where that differs from the names in its modules.

Checked against transformers 5.23. These functions are what ``from_pretrained`` and
``save_pretrained`` call; none has a documented twin.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def is_pretrained_model(module: nn.Module) -> bool:
    """Whether this is a model of transformers; does not import it."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def refuse_adapters(model: nn.Module, root: nn.Module) -> None:
    """Refuse models whose weights have other names than in files.

    Args:
        model: What is saved or loaded.
        root: It, or a module that it is inside of.

    Raises:
        NotImplementedError: Adapters of peft.
    """
    adapter = next(filter(_is_of_peft, _inside_and_around(model, root)), None)
    if adapter is not None:
        raise NotImplementedError(
            f"{type(model).__name__}: expected a whole model, got adapters of peft "
            f"({type(adapter).__name__}): from_pretrained would not know their names, nor those "
            "that peft gave to the weights under them. save_adapters saves a PeftModel's, and "
            "save_pretrained(merge_adapters=True) the model with what they add to its weights; or "
            "save a checkpoint of the Trainer. load_pretrained takes a PeftModel, or a module "
            "around one."
        )


def refuse_quantized(model: Any) -> None:
    """Refuse models whose files hold other tensors than their modules.

    Raises:
        NotImplementedError: Quantized weights.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        raise NotImplementedError(
            f"{type(model).__name__}: expected plain weights, got quantized ones. Save a "
            "checkpoint of the Trainer, or dequantize the model before training."
        )


def _inside_and_around(model: nn.Module, root: nn.Module) -> Iterator[nn.Module]:
    yield from model.modules()
    yield from (outer for outer in root.modules() if any(m is model for m in outer.modules()))


def _is_of_peft(module: nn.Module) -> bool:
    # By the package: its kinds of adapters share no class. A sharded module has it as a base.
    return any(cls.__module__.partition(".")[0] == "peft" for cls in type(module).__mro__)


def names_in_module(model: Any, stored: Collection[str], names: Collection[str]) -> dict[str, str]:
    """Where ``from_pretrained`` would put what is stored under a name.

    Args:
        model: A model of transformers.
        stored: Names in files.
        names: Of the model's state dict.

    Returns:
        The name in the module, also where the module has none such, by the name in the files.

    Raises:
        NotImplementedError: Some weight is made of several, or of a part, of what is stored.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    outlines = dict.fromkeys(names, torch.empty(0, device="meta"))
    prefix = model.base_model_prefix
    found = {}
    for key in stored:
        name, pattern = rename_source_key(key, renamings, converters, prefix, outlines)
        if name not in outlines and key in outlines:
            name, pattern = key, None
        if pattern is not None and name in outlines:
            raise NotImplementedError(
                f"{type(model).__name__}: expected weights that are stored as the module has them, "
                f"but {name!r} is computed from {key!r} and others. Store them so: "
                "AutoModel.from_pretrained(...).save_pretrained(folder, save_original_format=False)"
            )
        found[key] = name
    return found


def names_in_files(model: Any, outlines: Mapping[str, Tensor]) -> dict[str, str]:
    """Under which name ``save_pretrained`` would store each weight.

    Weights that it would also compute with (experts, one by one) keep the module's names, as
    ``save_pretrained(save_original_format=False)`` stores them; ``from_pretrained`` reads both.

    Args:
        model: A model of transformers.
        outlines: Tensors on the meta device by the names of its state dict, each another object.
    """
    from transformers.core_model_loading import revert_weight_conversion

    reverted = revert_weight_conversion(model, dict(outlines))
    stored_as = {id(tensor): key for key, tensor in reverted.items()}
    return {name: stored_as.get(id(outline), name) for name, outline in outlines.items()}


def may_be_missing(model: Any, name: str) -> bool:
    """Whether ``from_pretrained`` does not mind that a weight is not stored."""
    return _matches(getattr(model, "_keys_to_ignore_on_load_missing", None), name)


def may_be_left_over(model: Any, name: str) -> bool:
    """Whether ``from_pretrained`` does not mind a stored tensor that has no place."""
    if _matches(getattr(model, "_keys_to_ignore_on_load_unexpected", None), name):
        return True
    # Buffers that were stored once and are computed today.
    ends = (ending for ending in ("rotary_emb.inv_freq", "position_ids") if name.endswith(ending))
    buffers = [buffer for buffer, _ in model.named_buffers()]
    return any(buffer.endswith(ending) for ending in ends for buffer in buffers)


def is_left_out(model: Any, name: str) -> bool:
    """Whether ``save_pretrained`` does not store a weight."""
    return name in (getattr(model, "_keys_to_ignore_on_save", None) or ())


def copies_of_tied(model: Any, names_of: Mapping[int, Collection[str]]) -> Collection[str]:
    """Names that transformers leaves out of the files, and ties again by the model's config.

    Args:
        model: A model of transformers.
        names_of: All names of each weight, by its identity.

    Raises:
        ValueError: A weight has more names, which ``from_pretrained`` would fill with new values.
    """
    # By the config as it is now, which is saved; ``all_tied_weights_keys`` is from construction.
    copies: dict[str, str] = model.get_expanded_tied_weights_keys(all_submodels=True)
    for names in names_of.values():
        own = [name for name in names if name not in copies]
        if len(own) > 1:
            raise ValueError(
                f"{type(model).__name__}: expected weights of their own but for those that its "
                f"config ties, got one weight for {own[0]!r} and {own[1]!r}: from_pretrained would "
                "fill one of them with new values. Set config.tie_word_embeddings=True if it is "
                "the embedding; otherwise use save_sharded, or full_state_dict(model)."
            )
    return copies


def _matches(patterns: Collection[str] | None, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())
