"""Blocks that are recomputed in the backward."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 6)

    def body(self, x):
        return x + self.second(torch.tanh(self.first(x)))

    def forward(self, x):
        return self.body(x)
