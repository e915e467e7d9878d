"""GPT-2 of transformers, from nano (a laptop's CPU) to XL, new or pretrained.

======  ======  =====  =====  ==========================================
size    layers  width  heads  parameters (vocabulary 50257, 1024 tokens)
======  ======  =====  =====  ==========================================
nano         4    128      4    7.4 million (1.4 with a vocabulary of 4096)
small       12    768     12    124 million
medium      24   1024     16    355 million
large       36   1280     20    774 million
xl          48   1600     25    1558 million
======  ======  =====  =====  ==========================================

Embedding and head are one tied parameter, as in GPT-2.

Source: Radford et al. 2019, table 2.
"""

from __future__ import annotations

from typing import Any, Literal

from transformers import GPT2Config, GPT2LMHeadModel

from recipes.causal_lm import CausalLM, require_one_source
from recipes.errors import require_in_range
from recipes.pretrained import load_config

GPT2Size = Literal["nano", "small", "medium", "large", "xl"]


SHAPES: dict[GPT2Size, tuple[int, int, int]] = {
    "nano": (4, 128, 4),
    "small": (12, 768, 12),
    "medium": (24, 1024, 16),
    "large": (36, 1280, 20),
    "xl": (48, 1600, 25),
}
"""Layers, width, heads."""


class GPT2(CausalLM):
    """GPT-2 with the head tied to the embedding.

    Args:
        size: Size of a model with new weights; ``None`` for a pretrained one.
        pretrained: A folder with ``config.json`` and weights, or a name on the Hugging Face hub,
            in place of ``size``.
        vocab_size: Rows of the embedding; at least the tokenizer's. On the command line it follows
            ``--data.vocab_size``. A pretrained model brings its own.
        max_seq_len: Positions, in tokens. A pretrained model brings its own.
        dropout: Dropout of embeddings, attention and residuals.
        options: Of :class:`~recipes.causal_lm.CausalLM`.

    Raises:
        RecipeError: Neither or both of ``size`` and ``pretrained``, or nothing loadable there.
    """

    model_class = GPT2LMHeadModel
    blocks_name = "transformer.h"

    def __init__(
        self,
        *,
        size: GPT2Size | None = None,
        pretrained: str | None = None,
        vocab_size: int = 50257,
        max_seq_len: int = 1024,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        require_one_source("GPT2", size=size, pretrained=pretrained)
        config = (
            new_config(size, vocab_size=vocab_size, max_seq_len=max_seq_len)
            if size is not None
            else load_config(str(pretrained), GPT2Config)
        )
        require_in_range("dropout", dropout, "Correct --model.dropout.", 0, 1)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = dropout
        super().__init__(config, pretrained=pretrained, **options)


def new_config(size: GPT2Size, *, vocab_size: int, max_seq_len: int) -> GPT2Config:
    """The configuration of a model with new weights."""
    num_layers, width, num_heads = SHAPES[size]
    return GPT2Config(
        vocab_size=vocab_size,
        n_positions=max_seq_len,
        n_embd=width,
        n_layer=num_layers,
        n_head=num_heads,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
