"""Small models with awkward sizes, and data for them that differs on every rank.

All of them are built from a seed, so every rank and the reference start from the same weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 61  # prime, so no world size divides it


class MLP(nn.Module):
    """7 -> 15 -> 15 -> 3 -> 3, a 0-d scale, and one optional parameter of 3 elements.

    ``bonus`` takes part only where ``use_bonus`` is true: one rank can leave it unused while others
    use it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 15)
        self.second = nn.Linear(15, 15)
        self.last = nn.Linear(15, 3)
        # All below one, where a last bit is below 1e-7.
        self.mix = nn.Parameter(torch.rand(3, 3) - 0.5)
        self.bonus = nn.Parameter(torch.rand(3) - 0.5)
        self.scale = nn.Parameter(torch.tensor(0.75))

    def forward(self, inputs: Tensor, use_bonus: bool = True) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        hidden = torch.tanh(self.second(hidden))
        outputs = self.last(hidden) @ self.mix * self.scale
        return outputs + self.bonus if use_bonus else outputs


@dataclass(frozen=True)
class LMShape:
    """Sizes of ``CausalLM``; nothing divides anything."""

    width: int = 20
    num_heads: int = 4
    num_blocks: int = 3
    length: int = 9
    vocabulary: int = VOCABULARY
    tied: bool = False


class Block(nn.Module):
    """Pre-norm attention and a two-layer MLP."""

    def __init__(self, shape: LMShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.norm_1 = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.projection = nn.Linear(shape.width, shape.width)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 3 * shape.width + 1)
        self.down = nn.Linear(3 * shape.width + 1, shape.width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        projected = self.query_key_value(self.norm_1(hidden)).view(
            batch, length, 3, self.num_heads, -1
        )
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.down(F.gelu(self.up(self.norm_2(hidden))))


class CausalLM(nn.Module):
    """A language model written by hand: two embeddings, blocks, final norm, head (tied to the
    embedding or not).
    """

    def __init__(self, shape: LMShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.1)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def mlp(seed: int = 1) -> MLP:
    torch.manual_seed(seed)
    return MLP()


def causal_lm(shape: LMShape | None = None, seed: int = 1, **sizes: int | bool) -> CausalLM:
    """A ``CausalLM`` from a seed; ``sizes`` overrides fields of ``LMShape``."""
    torch.manual_seed(seed)
    return CausalLM(shape or LMShape(**sizes))


def tiny_gpt2(
    seed: int = 1, *, width: int = 32, num_blocks: int = 3, vocabulary: int = 97
) -> nn.Module:
    """GPT-2 of transformers from a config: tied embedding and head, Conv1D, no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=24,
        n_embd=width,
        n_layer=num_blocks,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).train()


Batch = dict[str, Tensor]


def mlp_batch(step: int, micro_batch: int, rank: int, *, size: int = 4) -> Batch:
    """Inputs ``(size, 7)``, targets ``(size, 3)``: others for every step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(1 + 100 * step + 10 * micro_batch + rank)
    return {
        "inputs": torch.randn(size, 7, generator=generator),
        "targets": 0.3 * torch.randn(size, 3, generator=generator),
    }


def token_batch(
    step: int,
    micro_batch: int,
    rank: int,
    *,
    size: int = 2,
    length: int = 9,
    vocabulary: int = VOCABULARY,
) -> Batch:
    """Tokens ``(size, length + 1)``: inputs and next tokens, another for every step, micro-batch
    and rank.
    """
    generator = torch.Generator().manual_seed(1 + 100 * step + 10 * micro_batch + rank)
    return {"tokens": torch.randint(vocabulary, (size, length + 1), generator=generator)}


def mlp_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Small enough that a gradient's last bit is below 1e-7."""
    return 0.25 * F.mse_loss(model(batch["inputs"]).float(), batch["targets"])


def lm_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy; takes models that return logits and those of transformers."""
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    outputs = model(inputs)
    logits = getattr(outputs, "logits", outputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def tied_lm(seed: int = 1) -> CausalLM:
    return causal_lm(LMShape(tied=True), seed)


@dataclass(frozen=True)
class Task:
    """A model, its data, its loss, and how far training may be from one process on the joined batch
    (fp32).
    """

    build: Callable[[], nn.Module]
    make_batch: Callable[[int, int, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    atol: float


TASKS = {
    "mlp": Task(mlp, mlp_batch, mlp_loss, atol=1e-7),
    "lm": Task(causal_lm, token_batch, lm_loss, atol=5e-6),
    "tied_lm": Task(tied_lm, token_batch, lm_loss, atol=5e-6),
    "gpt2": Task(tiny_gpt2, token_batch, lm_loss, atol=5e-6),
}


def shard_lm_by_hand(
    model: CausalLM, fully_shard: Callable[..., Any], **arguments: Any
) -> CausalLM:
    """Units of a ``CausalLM`` as a script for torch's FSDP2 names them: 7 with the blocks, and the
    root's leftovers.
    """
    for module in [model.embedding, model.positions, *model.blocks, model.norm, model.head]:
        fully_shard(module, **arguments)
    fully_shard(model, **arguments)
    return model
