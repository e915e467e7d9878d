"""Every private name of torch that simulations use, with the reason. Checked against 2.13."""

from __future__ import annotations

import torch


def spin(cycles: int) -> None:
    """Queue a kernel that does nothing for so many clock cycles. No public name; torch's tests."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
