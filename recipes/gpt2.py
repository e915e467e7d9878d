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

from dataclasses import dataclass
from typing import Literal

from transformers import GPT2Config, GPT2LMHeadModel

from recipes.causal_lm import CausalLM, LossName, require_one_source
from recipes.optimizer import OptimizerConfig
from recipes.pretrained import load_config

GPT2Size = Literal["nano", "small", "medium", "large", "xl"]


@dataclass(frozen=True, kw_only=True)
class GPT2Shape:
    """What distinguishes the sizes.

    Attributes:
        num_layers: Transformer blocks.
        width: Elements of a token's hidden state.
        num_heads: Attention heads; divides ``width``.
    """

    num_layers: int
    width: int
    num_heads: int


SHAPES: dict[GPT2Size, GPT2Shape] = {
    "nano": GPT2Shape(num_layers=4, width=128, num_heads=4),
    "small": GPT2Shape(num_layers=12, width=768, num_heads=12),
    "medium": GPT2Shape(num_layers=24, width=1024, num_heads=16),
    "large": GPT2Shape(num_layers=36, width=1280, num_heads=20),
    "xl": GPT2Shape(num_layers=48, width=1600, num_heads=25),
}


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
        activation_checkpointing: Keep only the blocks' inputs for backward and compute the rest
            again: less memory, a third more compute.
        compile_blocks: ``torch.compile`` each block.
        loss: ``chunked`` computes the logits of a few positions at a time, which takes much less
            memory; ``plain`` all at once.
        meta_init: Build without memory, for the strategies of this package. ``scratch_fsdp``
            computes new weights (other values than without) one unit at a time, and no rank ever
            holds them all; those over torch's FSDP1 and FSDP2 hold them all until they shard. Of
            pretrained weights each rank then reads its slices.
        optimizer: AdamW and its schedule.

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
        activation_checkpointing: bool = False,
        compile_blocks: bool = False,
        loss: LossName = "chunked",
        meta_init: bool = False,
        optimizer: OptimizerConfig = OptimizerConfig(),
    ) -> None:
        require_one_source("GPT2", size=size, pretrained=pretrained)
        config = (
            new_config(size, vocab_size=vocab_size, max_seq_len=max_seq_len)
            if size is not None
            else load_config(str(pretrained), GPT2Config)
        )
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = dropout
        super().__init__(
            config,
            pretrained=pretrained,
            activation_checkpointing=activation_checkpointing,
            compile_blocks=compile_blocks,
            loss=loss,
            meta_init=meta_init,
            optimizer=optimizer,
        )


def new_config(size: GPT2Size, *, vocab_size: int, max_seq_len: int) -> GPT2Config:
    """The configuration of a model with new weights."""
    shape = SHAPES[size]
    return GPT2Config(
        vocab_size=vocab_size,
        n_positions=max_seq_len,
        n_embd=shape.width,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
