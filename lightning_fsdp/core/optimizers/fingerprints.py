"""Whether somebody has written to a tensor: sums of its bits before and after.

Version counters do not tell: views that torch's engines make, and ``.data``, have their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fsdp.core import torch_internals

Fingerprint = tuple[int, int]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW_NUMEL = 2**10


def fingerprints(tensors: Sequence[Tensor]) -> list[Fingerprint]:
    """Of each, ``(n,)``, all on one device; what changes one element changes it. Synchronises.

    Two sums of the bits as integers, one of them weighted by their places, both modulo 2**64.
    """
    if not tensors or not torch_internals.has_values(tensors[0]):
        return [(0, 0)] * len(tensors)
    return [(plain, weighted) for plain, weighted in sums_of_bits(tensors).tolist()]


def sums_of_bits(tensors: Sequence[Tensor]) -> Tensor:
    """The same as ``(n, 2)`` of int64, on the device of the tensors; does not synchronise."""
    return torch.stack(list(map(_sums, tensors)))


def _sums(flat: Tensor) -> Tensor:
    # Sums of rows and of columns take one vectorized pass each, and tell the places as well:
    # that of an element is that of its row and that in its row.
    bits = flat.detach().view(_INTEGERS[flat.itemsize])
    num_rows = len(bits) // _ROW_NUMEL
    start = num_rows * _ROW_NUMEL
    rows, rest = bits[:start].view(num_rows, _ROW_NUMEL), bits[start:].to(torch.int64)
    of_rows, of_columns = rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64)
    starts = torch.arange(0, start, _ROW_NUMEL, device=flat.device)
    places = torch.arange(1, _ROW_NUMEL + 1, device=flat.device)
    # On CUDA integers have no inner product.
    weighted = (of_rows * starts).sum() + (of_columns * places).sum()
    weighted += (rest * (places[: len(rest)] + start)).sum()
    return torch.stack([of_rows.sum() + rest.sum(), weighted])
