"""Norms in parts: what each rank has of one, and the norm from all of these."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_ROW_NUMEL = 1024


@torch.no_grad()
def partial_norm(tensors: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The sum of ``|x|**p`` (or the extreme of ``|x|``) over this rank's elements, 0-d fp64.

    Args:
        tensors: Of any shape and floating dtype.
        norm_type: Any p, ``inf`` included.
        device: Of the result.

    Raises:
        ValueError: ``norm_type`` is not a number.
    """
    norm_type = float(norm_type)
    if math.isnan(norm_type):
        raise ValueError("norm_type: expected a number or inf, got nan.")
    present = [tensor for tensor in tensors if tensor.numel()]
    if not present:
        neutral = math.inf if norm_type == -math.inf else 0.0
        # Filled there: torch.tensor would make it on the host, and wait until it is copied.
        return torch.full((), neutral, dtype=torch.float64, device=device)
    home = present[0].device  # one number leaves it, not one of each row
    norms = torch.cat([_row_norms(tensor, norm_type).to(home) for tensor in present]).double()
    if math.isinf(norm_type):
        part = norms.max() if norm_type > 0 else norms.min()
    else:
        part = norms.sum() if norm_type == 0 else (norms**norm_type).sum()
    return part.to(device)


def _row_norms(tensor: Tensor, norm_type: float) -> Tensor:
    """The norms of rows of ``_ROW_NUMEL`` elements and of the rest: 1-d, fp32 or wider.

    Added up in fp64 they are right to 3e-7. In one go, at the same speed, torch's norm on CPU is
    wrong by 1e-5 for half a million elements and by 4e-4 for seven million.
    """
    wide = torch.promote_types(tensor.dtype, torch.float32)
    num_rows, rest = divmod(tensor.numel(), _ROW_NUMEL)
    if num_rows == 0:
        norm: Tensor = torch.linalg.vector_norm(tensor, norm_type, dtype=wide)
        return norm.view(1)
    flat = tensor.reshape(-1)
    rows = flat[: num_rows * _ROW_NUMEL].view(num_rows, _ROW_NUMEL)
    norms: Tensor = torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=wide)
    if rest == 0:
        return norms
    last = torch.linalg.vector_norm(flat[-rest:], norm_type, dtype=wide)
    return torch.cat([norms, last.view(1)])


def total_norm(parts: Tensor, norm_type: float) -> Tensor:
    """The norm, 0-d fp64, from ``(n,)`` of :func:`partial_norm`."""
    norm_type = float(norm_type)
    if math.isinf(norm_type):
        return parts.max() if norm_type > 0 else parts.min()
    total = parts.sum()
    return total if norm_type == 0 else total ** (1.0 / norm_type)
