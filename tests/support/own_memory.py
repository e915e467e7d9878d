"""A module whose tensors are large beside what a process takes for itself."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.trainer import Regressor

MIB = 2**20

NOISE = 6 * MIB  # what a process takes for itself beside tensors of 8 MiB

needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells")


def own_bytes():
    """Memory of this process that no file stands behind."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", text)[1])


class Wide(Regressor):
    """Eight blocks of 8 MiB in fp32 each; Adam."""

    def __init__(self, num_blocks=8, width=1024):
        super().__init__(width=8)
        self.blocks = nn.ModuleList(
            nn.Linear(width, 2 * width, bias=False) for _ in range(num_blocks)
        )
        self.widths = (width, 2 * width)

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = x + block(x.repeat(1, self.widths[0] // 8))[:, :8]
        return self.head(x)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.001)
