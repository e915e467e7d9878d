"""Memory that shows where nobody wrote to it.

Floating-point tensors are filled with NaN; every byte of the others with one value, which no bool
has and no integer of 32 or 64 bits is likely to be.
"""

from __future__ import annotations

import torch
from torch import Tensor

MARK = 0xA5  # of every byte of a tensor that has no NaN
_NUM_SAMPLES = 1024


def marked(meta: Tensor) -> Tensor:
    """A tensor like ``meta`` on the host that shows where it was not written to."""
    if meta.is_floating_point() or meta.is_complex():
        return torch.full(meta.shape, float("nan"), dtype=meta.dtype, device="cpu")
    filled = torch.empty(meta.shape, dtype=meta.dtype, device="cpu")
    filled.view(-1).view(torch.uint8).fill_(MARK)
    return filled


def is_marked(value: Tensor) -> bool:
    """Whether a part of a tensor was not written to."""
    if value.numel() == 0:
        return False
    if value.is_complex():
        value = torch.view_as_real(value)
    if value.is_floating_point():
        if value.element_size() == 1:
            value = value.float()
        return bool(value.max().isnan())  # NaN wins over every number; no mask as large as value
    is_mark = value.contiguous().view(-1).view(torch.uint8) == MARK
    by_element = is_mark.view(-1, value.element_size()).all(dim=1)
    # Of a short integer, the mark is a value like any other; not of a bool.
    is_ambiguous = value.dtype != torch.bool and value.element_size() < 4
    return bool(by_element.all() if is_ambiguous else by_element.any())


def sample(value: Tensor) -> bytes:
    """The first elements of a tensor, for a digest."""
    flat = value.detach().reshape(-1)[:_NUM_SAMPLES].contiguous()
    return bytes(flat.view(torch.uint8).numpy())
