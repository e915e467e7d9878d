"""Whether a tensor was written to: sums of its bits, compared before and after.

Version counters do not tell: views that torch's engines make, and ``.data``, have counters of their
own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fsdp.core import torch_internals

Fingerprint = tuple[int, int]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW_NUMEL = 2**10
_MOST_REST = 2 * _ROW_NUMEL  # bounds the words of an incomplete row plus elements in no word


def fingerprints(tensors: Sequence[Tensor]) -> list[Fingerprint]:
    """A fingerprint of each tensor, which differs if an element has changed. Synchronises.

    Each is two sums of the bits taken as integers, one of them weighted by position, modulo 2**64.
    They tell whether the same memory has changed; the same values at another address may have
    another fingerprint.

    Args:
        tensors: Each ``(n,)``, all on one device.
    """
    if not tensors or not torch_internals.has_values(tensors[0]):
        return [(0, 0)] * len(tensors)
    sums = torch.stack(list(map(_sums, tensors)))
    return [(plain, weighted) for plain, weighted in sums.tolist()]


def _sums(flat: Tensor) -> Tensor:
    """Both sums, ``(2,)`` of int64, on the device of the tensor."""
    # Several elements at once, as words of 64 bits: torch sums these ten times as fast as integers
    # that it has to widen. Sums of rows and of columns take one vectorized pass each, and suffice
    # to weight by position: that of a word is the start of its row plus its place in the row.
    bits = flat.detach().view(_INTEGERS[flat.itemsize])
    num_in_word = 8 // flat.itemsize
    first = min(-bits.storage_offset() % num_in_word, len(bits))
    stop = len(bits) - (len(bits) - first) % num_in_word
    words = bits[first:stop].view(torch.int64) if first < stop else bits[:0].to(torch.int64)
    start = len(words) // _ROW_NUMEL * _ROW_NUMEL
    rows = words[:start].view(-1, _ROW_NUMEL)
    rest = torch.cat([words[start:], bits[:first].to(torch.int64), bits[stop:].to(torch.int64)])
    of_rows, of_columns = rows.sum(1), rows.sum(0)
    starts = torch.arange(0, start, _ROW_NUMEL, device=flat.device)
    places = torch.arange(1, _MOST_REST + 1, device=flat.device)
    # On CUDA integers have no inner product.
    weighted = (_mixed(of_rows) * starts).sum() + (_mixed(of_columns) * places[:_ROW_NUMEL]).sum()
    weighted += (_mixed(rest) * (places[: len(rest)] + start)).sum()
    return torch.stack([of_rows.sum() + rest.sum(), weighted])


def _mixed(sums: Tensor) -> Tensor:
    """Mix high bits of sums into low ones, as multiplying by a weight may shift high bits out."""
    return sums + (sums >> 32) + (sums >> 16)
