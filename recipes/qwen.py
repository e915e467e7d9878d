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

from typing import Any, Literal

from transformers import Qwen2Config, Qwen2ForCausalLM

from recipes.causal_lm import CausalLM, require_one_source
from recipes.pretrained import load_config

QwenSize = Literal["tiny", "0.5b", "1.5b"]


SHAPES: dict[QwenSize, tuple[int, int, int, int, int]] = {
    "tiny": (4, 128, 4, 2, 384),
    "0.5b": (24, 896, 14, 2, 4864),
    "1.5b": (28, 1536, 12, 2, 8960),
}
"""Layers, width, heads, heads of keys and values, elements between the halves of a feed-forward."""


class Qwen(CausalLM):
    """Qwen2.5 with the head tied to the embedding.

    Args:
        size: Size of a model with new weights; ``None`` for a pretrained one.
        pretrained: A folder with ``config.json`` and weights, or a name on the Hugging Face hub,
            in place of ``size``.
        vocab_size: Rows of the embedding; at least the tokenizer's. On the command line it follows
            ``--data.vocab_size``. A pretrained model brings its own.
        max_seq_len: Positions, in tokens. A pretrained model brings its own.
        options: Of :class:`~recipes.causal_lm.CausalLM`.

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
        **options: Any,
    ) -> None:
        require_one_source("Qwen", size=size, pretrained=pretrained)
        config = (
            new_config(size, vocab_size=vocab_size, max_seq_len=max_seq_len)
            if size is not None
            else load_config(str(pretrained), Qwen2Config)
        )
        super().__init__(config, pretrained=pretrained, **options)


def new_config(size: QwenSize, *, vocab_size: int, max_seq_len: int) -> Qwen2Config:
    """The configuration of a model with new weights."""
    num_layers, width, num_heads, num_kv_heads, feed_forward = SHAPES[size]
    return Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_seq_len,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        use_cache=False,
    )
