"""GPT-2 of transformers in any size, for commands that measure without a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import GPT2Config, GPT2LMHeadModel


def gpt2_config(
    *, num_layers: int, width: int, num_heads: int, vocabulary: int, num_positions: int
) -> GPT2Config:
    """Without cache and dropout, as the recipes train it."""
    from transformers import GPT2Config

    return GPT2Config(
        n_layer=num_layers, n_embd=width, n_head=num_heads,
        vocab_size=vocabulary, n_positions=num_positions, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip


def build_gpt2(**shape: int) -> GPT2LMHeadModel:
    """In training mode; the same weights on every rank and in every arm.

    Args:
        **shape: Of :func:`gpt2_config`.
    """
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    model: GPT2LMHeadModel = GPT2LMHeadModel(gpt2_config(**shape)).train()
    return model
