"""A module whose tensors are large beside what a process takes for itself; files in memory."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_fsdp.engines.on_host import FILE_NAME
from tests.support.trainer import Regressor

MIB = 2**20

NOISE = 6 * MIB  # what a process takes for itself beside tensors of 8 MiB

needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells")


def own_bytes():
    """Memory of this process that no file stands behind."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", text)[1])


def in_files(tensors):
    """Whether each lies in a file that ranks of a host share."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [re.match(r"(\w+)-(\w+) ", line).groups() for line in lines if FILE_NAME in line]
    spans = [(int(start, 16), int(stop, 16)) for start, stop in spans]
    return [any(a <= tensor.data_ptr() < b for a, b in spans) for tensor in tensors]


def bytes_in_files(kind):
    """Of this process, in such files: ``Pss`` (a page's share), or ``Anonymous`` (its own copies).

    Pages that were not read are not counted.
    """
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"\w+-\w+ ", line):
            is_ours = FILE_NAME in line
        elif is_ours and line.startswith(f"{kind}:"):
            total += 1024 * int(line.split()[1])
    return total


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
