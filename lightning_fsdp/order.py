"""The order of an epoch: a permutation that takes little memory, whatever the number of samples.

Up to four million samples it is ``torch.randperm``, the order of torch's own sampler, which is held
in memory, 8 bytes a sample. Beyond, a place's sample is computed from the place alone::

    place -> (high bits, low bits) -> 8 rounds of  high, low = low, high ^ mixed(low)  -> sample

A round can be undone, whatever ``mixed`` is, so no two places meet: a Feistel network. It permutes
a power of four that is a little too large; what falls outside is put through again until it falls
inside, which it does, as the way from a place leads in a circle back to it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_HELD_IN_MEMORY = 2**22  # samples; 32 MB
_COMPUTED_AT_ONCE = 2**14
_NUM_ROUNDS = 8


def epoch_order(total: int, places: range, *, seed: int | None) -> Iterator[int]:
    """The samples at some places of an epoch, one after another.

    Args:
        total: Samples in the epoch; each stands at one place.
        places: Which of them.
        seed: Of the permutation; ``None``: every sample stands at its own place.
    """
    if seed is None:
        yield from places
    elif total <= _HELD_IN_MEMORY:
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
        for part in _parts(places):
            yield from order[part].tolist()
    else:
        for part in _parts(places):
            yield from _permuted(part, total, seed).tolist()


def _parts(places: range) -> Iterator[Tensor]:
    for begin in range(0, len(places), _COMPUTED_AT_ONCE):
        part = places[begin : begin + _COMPUTED_AT_ONCE]
        yield torch.arange(part.start, part.stop, part.step)


def _permuted(places: Tensor, total: int, seed: int) -> Tensor:
    """The samples at ``places``, ``(n,)``, int64, each below ``total``."""
    half_bits = ((total - 1).bit_length() + 1) // 2
    keys = torch.randint(
        2**31, (_NUM_ROUNDS, 2), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    found = _rounds(places, half_bits, keys)
    while len(outside := (found >= total).nonzero().flatten()):
        found[outside] = _rounds(found[outside], half_bits, keys)
    return found


def _rounds(values: Tensor, half_bits: int, keys: list[list[int]]) -> Tensor:
    mask = (1 << half_bits) - 1
    high, low = values >> half_bits, values & mask
    for added, factor in keys:
        # Below 2**63: 32 bits times 31. The middle bits depend on all bits of `low`.
        mixed = ((low ^ added) * (factor | 1)) >> 15
        high, low = low, high ^ (mixed & mask)
    return (high << half_bits) | low
