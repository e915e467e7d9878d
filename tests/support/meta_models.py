"""Models that are built on the meta device."""

import torch
from torch import nn


class Rope(nn.Module):
    """Caches as they are often kept: computed in the initialiser, not saved."""

    def __init__(self, width, length):
        super().__init__()
        self.width, self.length = width, length
        for name, dtype in [("cos", torch.float32), ("mask", torch.bool), ("ids", torch.int64)]:
            shape = {"cos": (length, width), "mask": (length, length), "ids": (length,)}[name]
            self.register_buffer(name, torch.empty(shape, dtype=dtype), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        angles = torch.arange(self.length)[:, None] * torch.arange(self.width)[None, :]
        self.cos = torch.cos(angles / 7)  # assigned anew
        self.mask.copy_(torch.ones(self.length, self.length, dtype=torch.bool).tril())
        self.ids.copy_(torch.arange(self.length))


class Layer(nn.Module):
    """Everything that torch initialises, and a parameter of its own."""

    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2)  # no public initialiser
        self.rope = Rope(width, 5)
        self.norm = nn.BatchNorm1d(width)
        self.bare_norm = nn.BatchNorm1d(width, affine=False)
        self.up = nn.Linear(width, width + 1)
        self.scale = nn.Parameter(torch.empty(width, 3))
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            self.scale.data.normal_(std=0.3)

    def forward(self, x):
        return self.up(self.attention(x, x, x)[0]) @ self.scale


def on_meta(build, *args):
    with torch.device("meta"):
        return build(*args)
