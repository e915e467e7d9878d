"""Models by name, or by the folder of their config; built from shapes alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_fsdp.units import find_units

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout")


def _gpt2(num_layers: int, width: int, num_heads: int) -> PretrainedConfig:
    from transformers import GPT2Config

    return GPT2Config(n_layer=num_layers, n_embd=width, n_head=num_heads)


def _qwen2(num_layers: int, width: int, mlp_width: int, num_heads: int) -> PretrainedConfig:
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=151936,
        num_hidden_layers=num_layers,
        hidden_size=width,
        intermediate_size=mlp_width,
        num_attention_heads=num_heads,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )


MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "gpt2-nano": lambda: _gpt2(4, 128, 4),
    "gpt2-small": lambda: _gpt2(12, 768, 12),
    "gpt2-medium": lambda: _gpt2(24, 1024, 16),
    "gpt2-large": lambda: _gpt2(36, 1280, 20),
    "gpt2-xl": lambda: _gpt2(48, 1600, 25),
    "qwen2.5-0.5b": lambda: _qwen2(24, 896, 4864, 14),
    "qwen2.5-1.5b": lambda: _qwen2(28, 1536, 8960, 12),
}


def config_of(model: str) -> PretrainedConfig:
    """The config of a model, set as the recipes train it: without cache and dropout.

    Args:
        model: A name of :data:`MODELS`, or a folder with a ``config.json`` of transformers.

    Raises:
        ValueError: Neither.
    """
    config = MODELS[model]() if model in MODELS else _config_in(Path(model))
    config.use_cache = False
    for name in _DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    return config


def build(config: PretrainedConfig) -> nn.Module:
    """The causal language model of a config, in training mode, on torch's default device."""
    from transformers import AutoModelForCausalLM

    # A config may name the dtype of its checkpoint; training chooses its own.
    dtype = torch.get_default_dtype()
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    except ValueError as error:  # of sizes that do not fit
        raise ValueError(
            f"--model: expected a config that makes a model, got: {error} Correct its config.json."
        ) from error
    assert isinstance(model, nn.Module), type(model)
    return model.train()


def outline_with_adapters(config: PretrainedConfig, folder: str) -> nn.Module:
    """The model of a config with adapters of peft, on the meta device.

    Args:
        config: Of the base, which is frozen and in bf16.
        folder: With peft's ``adapter_config.json``.

    Raises:
        ValueError: There is no such file.
    """
    from peft import PeftConfig, get_peft_model

    if not (Path(folder) / "adapter_config.json").is_file():
        raise ValueError(
            f"adapters: expected a folder with an adapter_config.json of peft, got {folder!r}. "
            "LoraConfig(...).save_pretrained(FOLDER) writes one."
        )
    adapters = PeftConfig.from_pretrained(folder)
    adapters.inference_mode = False  # files say True
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            adapted: nn.Module = get_peft_model(build(config), adapters)
    finally:
        torch.set_default_dtype(dtype)
    return adapted.train()


def materialize(outline: nn.Module) -> nn.Module:
    """Give the tensors of an outline memory, in place; ``to_empty`` would swap fake tensors."""
    made: dict[Tensor, Tensor] = {}  # by identity, for those that are tied
    for module in outline.modules():
        own = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, tensor in own:
            if tensor not in made:
                memory = torch.empty(tensor.shape, dtype=tensor.dtype)
                is_trained = isinstance(tensor, nn.Parameter)
                made[tensor] = nn.Parameter(memory, tensor.requires_grad) if is_trained else memory
            setattr(module, name, made[tensor])
    return outline


def block_classes(model: nn.Module) -> list[str]:
    """Names of the classes of the repeated blocks."""
    units = find_units(model, None)
    return sorted({type(m[0]).__name__ for name, m in units if name.split(".")[-1].isdigit()})


def units_to_try(config: PretrainedConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of classes to cut a model by: its blocks' parts (may be none), and the whole model."""
    with torch.device("meta"):
        model = build(config)
    parts = {
        type(part).__name__
        for block in _blocks(model)
        for part in block.children()
        if any(True for _ in part.parameters()) and any(True for _ in part.children())
        # These have no forward that could be hooked.
        if not isinstance(part, nn.ModuleList | nn.ModuleDict)
    }
    return tuple(sorted(parts)), (type(model).__name__,)


def matrices_of_blocks(model: nn.Module) -> list[nn.Parameter]:
    """Weights of the repeated blocks that train, without biases, norms, embeddings and the head."""
    parameters = (p for block in _blocks(model) for p in block.parameters())
    return [p for p in parameters if p.ndim == 2 and p.requires_grad]


def _blocks(model: nn.Module) -> list[nn.Module]:
    classes = set(block_classes(model))
    return [module for module in model.modules() if type(module).__name__ in classes]


def _config_in(folder: Path) -> PretrainedConfig:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    expected = f"expected one of {', '.join(MODELS)}, or a folder with config.json"
    if not os.path.isfile(folder / "config.json"):  # noqa: PTH113 (false for a name too long)
        raise ValueError(f"--model: {expected}, got {str(folder)!r}. Correct it.")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder)
    # A field of a wrong type is an error of many kinds, some of them plain `Exception`s.
    except Exception as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"--model: {expected}, got {str(folder)!r} ({why}). Correct its config.json."
        ) from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(
            f"--model: expected a config of a causal language model, got {str(folder)!r} of type "
            f"{config.model_type!r}. Choose another folder."
        )
    return config
