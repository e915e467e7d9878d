"""The models that are sharded, their data, and their loss. All from seeds, so every rank agrees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

_VOCABULARY = 29  # prime, as the other sizes: no world size divides them
_LENGTH = 7
_WIDTH = 12
_NUM_HEADS = 2


@dataclass(frozen=True)
class Sizes:
    """Of the MLP.

    Attributes:
        width: Of every layer.
        depth: Number of blocks between inlet and head.
    """

    width: int = 13
    depth: int = 2


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.linear(hidden))


class MLP(nn.Module):
    """``5 -> width -> ... -> width -> 3``."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, sizes.width)
        self.blocks = nn.ModuleList(_Layer(sizes.width) for _ in range(sizes.depth))
        self.head = nn.Linear(sizes.width, 3)

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.inlet(inputs))
        for block in self.blocks:
            hidden = block(hidden)
        outputs: Tensor = self.head(hidden)
        return outputs


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(_WIDTH)
        self.query_key_value = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.projection = nn.Linear(_WIDTH, _WIDTH)
        self.norm_2 = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH + 1)
        self.down = nn.Linear(2 * _WIDTH + 1, _WIDTH)

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        projected = self.query_key_value(self.norm_1(hidden))
        projected = projected.view(batch, length, 3, _NUM_HEADS, -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = hidden + self.down(F.gelu(self.up(self.norm_2(hidden))))
        return result


class Transformer(nn.Module):
    """Two blocks between an embedding and a head that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.positions = nn.Embedding(_LENGTH, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.head.weight = self.embedding.weight

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        outputs: Tensor = self.head(self.norm(hidden))
        return outputs


MODELS = ("mlp", "transformer")


def build(model: str, sizes: Sizes) -> nn.Module:
    """A model by name, fp32, the same at every call."""
    torch.manual_seed(7)
    return MLP(sizes) if model == "mlp" else Transformer()


def batch_of(model: str, rank: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one rank's micro-batch; no two are alike."""
    generator = torch.Generator().manual_seed(1000 * rank + micro_batch)
    if model == "mlp":
        return torch.randn(3, 5, generator=generator), torch.randn(3, 3, generator=generator)
    tokens = torch.randint(_VOCABULARY, (2, _LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """In fp32, whatever the model computes in."""
    if targets.is_floating_point():
        return F.mse_loss(outputs.float(), targets)
    return F.cross_entropy(outputs.float().flatten(0, 1), targets.flatten())
