"""Every private name of torch that the benchmarks use, with the reason. Checked against 2.13."""

from __future__ import annotations

import sys

import torch


def spin(cycles: int) -> None:
    """Queue a kernel that does nothing for so many clock cycles. No public name; torch's tests."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def has_compiled() -> bool:
    """Whether this process has compiled a graph. By any way to ask for it: there are three."""
    if "torch._dynamo" not in sys.modules:  # and is not imported for the question
        return False
    return bool(torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0)
