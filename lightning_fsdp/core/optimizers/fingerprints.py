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
_CHUNK_NUMEL = 2**18


def fingerprints(tensors: Sequence[Tensor]) -> list[Fingerprint]:
    """Of each, ``(n,)``, all on one device; what changes one element changes it. Synchronises.

    Two sums of the bits as integers, one of them weighted by their places, both modulo 2**64.
    """
    if not tensors or not torch_internals.has_values(tensors[0]):
        return [(0, 0)] * len(tensors)
    return [
        (plain, weighted) for plain, weighted in torch.stack(list(map(_sums, tensors))).tolist()
    ]


def _sums(flat: Tensor) -> Tensor:
    bits = flat.detach().view(_INTEGERS[flat.itemsize])
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, len(bits), _CHUNK_NUMEL):
        chunk = bits[start : start + _CHUNK_NUMEL].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + len(chunk), device=flat.device)
        sums += torch.stack([chunk.sum(), chunk.mul_(places).sum()])
    return sums
