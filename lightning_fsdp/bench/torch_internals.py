"""Every private name of torch that the benchmarks use, with the reason. Checked against 2.13."""

from __future__ import annotations

import sys

import torch


def num_graphs() -> int:
    """Graphs that this process has compiled, by any of the three ways to ask for it.

    Blocks of one class should share theirs.
    """
    if "torch._dynamo" not in sys.modules:  # and is not imported for the question
        return 0
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
