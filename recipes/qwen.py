"""Qwen2.5 of transformers: tiny (a laptop's CPU), 0.5B and 1.5B, new or pretrained.

=====  ======  =====  =====  ========  ============  ==================================
size   layers  width  heads  kv heads  feed-forward  parameters (vocabulary 151936)
=====  ======  =====  =====  ========  ============  ==================================
tiny        4    128      4         2           384  20.2 million (1.3 with 4096)
0.5b       24    896     14         2          4864  494 million
1.5b       28   1536     12         2          8960  1544 million
=====  ======  =====  =====  ========  ============  ==================================

Rotary positions, RMS norms, gated feed-forward, grouped queries; embedding and head are one tied
parameter in these sizes.

Source: the published config.json of Qwen/Qwen2.5-0.5B and Qwen/Qwen2.5-1.5B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformers import Qwen2Config, Qwen2ForCausalLM

from recipes.causal_lm import CausalLM, LossName, require_one_source
from recipes.optimizer import OptimizerConfig
from recipes.pretrained import load_config

QwenSize = Literal["tiny", "0.5b", "1.5b"]


@dataclass(frozen=True, kw_only=True)
class QwenShape:
    """What distinguishes the sizes.

    Attributes:
        num_layers: Transformer blocks.
        width: Elements of a token's hidden state.
        num_heads: Attention heads of the queries; divides ``width``.
        num_kv_heads: Attention heads of keys and values; divides ``num_heads``.
        feed_forward: Elements between the two halves of a feed-forward.
    """

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    feed_forward: int


SHAPES: dict[QwenSize, QwenShape] = {
    "tiny": QwenShape(num_layers=4, width=128, num_heads=4, num_kv_heads=2, feed_forward=384),
    "0.5b": QwenShape(num_layers=24, width=896, num_heads=14, num_kv_heads=2, feed_forward=4864),
    "1.5b": QwenShape(num_layers=28, width=1536, num_heads=12, num_kv_heads=2, feed_forward=8960),
}


class Qwen(CausalLM):
    """Qwen2.5 with the head tied to the embedding.

    Args:
        size: Size of a model with new weights; ``None`` for a pretrained one.
        pretrained: A folder with ``config.json`` and weights, or a name on the Hugging Face hub,
            in place of ``size``.
        vocab_size: Rows of the embedding; at least the tokenizer's. On the command line it follows
            ``--data.vocab_size``. A pretrained model brings its own.
        max_seq_len: Positions, in tokens. A pretrained model brings its own.
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

    model_class = Qwen2ForCausalLM
    blocks_name = "model.layers"

    def __init__(
        self,
        *,
        size: QwenSize | None = None,
        pretrained: str | None = None,
        vocab_size: int = 151936,
        max_seq_len: int = 32768,
        activation_checkpointing: bool = False,
        compile_blocks: bool = False,
        loss: LossName = "chunked",
        meta_init: bool = False,
        optimizer: OptimizerConfig = OptimizerConfig(),
    ) -> None:
        require_one_source("Qwen", size=size, pretrained=pretrained)
        super().__init__(
            new_config(size, vocab_size=vocab_size, max_seq_len=max_seq_len)
            if size is not None
            else load_config(str(pretrained), Qwen2Config),
            pretrained=pretrained,
            activation_checkpointing=activation_checkpointing,
            compile_blocks=compile_blocks,
            loss=loss,
            meta_init=meta_init,
            optimizer=optimizer,
        )


def new_config(size: QwenSize, *, vocab_size: int, max_seq_len: int) -> Qwen2Config:
    """The configuration of a model with new weights."""
    shape = SHAPES[size]
    return Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=max_seq_len,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        use_cache=False,
    )
