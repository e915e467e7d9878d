"""Which rank steps which tensor whole. Integers only, and the same on every rank.

Some optimizers need whole tensors, while ranks hold slices. Each tensor gets an owner, which steps
it for all: slices of the gradient are sent to it, and slices of the result are sent back. Owners
get about equal work. Among the ranks that can take more, the one that holds most of a tensor gets
it, so that little has to travel. Drawn for two ranks:

    rank 0 holds   [ a: all ][ b: 3/4 ]          owns a
    rank 1 holds             [ b: 1/4 ][ c: all] owns b, c      3/4 of b travel, there and back
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

_LIMITS = (1.1, 1.05, 1.02, 1.0)
"""Multiples of the mean work, all tried: up to that much, a rank gets what it holds most of."""

_OF_TRAVEL = 0.05
"""Exchange rate: this share of all elements may travel to save the busiest rank a mean's work."""


@dataclass(frozen=True)
class Cut:
    """A tensor, and which of its elements each rank holds.

    Attributes:
        shape: Shape of the whole.
        ranges: Per rank, its first and past-the-last element in row-major order.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        """Number of elements of the whole."""
        return math.prod(self.shape)

    def num_held(self, rank: int) -> int:
        """Number of elements that a rank holds."""
        start, stop = self.ranges[rank]
        return stop - start

    @property
    def work(self) -> int:
        """The work of a step, up to a factor: the products of a Newton-Schulz iteration (Muon)."""
        rows = self.shape[0] if len(self.shape) > 1 else 1
        short = min(rows, self.numel // max(rows, 1))
        return short * (2 * self.numel + short**2)


def assign(cuts: Sequence[Cut], loads: Sequence[int]) -> list[int]:
    """Give each tensor an owner.

    Args:
        cuts: The tensors.
        loads: Per rank, the work that it has already.

    Returns:
        A rank for each.
    """
    mean = (sum(loads) + sum(cut.work for cut in cuts)) / len(loads)
    numel = sum(cut.numel for cut in cuts)
    # Two orders are tried. The largest first, so that small ones fill what is left. Or first those
    # that one rank holds most of, so that the others, which travel anyway, even out the work.
    held = [sorted(map(cut.num_held, range(len(loads)))) for cut in cuts]
    orders = (
        lambda i: -cuts[i].work,
        lambda i: (-(held[i][-1] - sum(held[i][-2:-1])), -cuts[i].work),
    )
    found = (
        _in_order(sorted(range(len(cuts)), key=order), cuts, loads, limit * mean)
        for order, limit in itertools.product(orders, _LIMITS)
    )

    def cost(owners: list[int]) -> tuple[float, float]:
        works, travels = list(loads), 0
        for owner, cut in zip(owners, cuts, strict=True):
            works[owner] += cut.work
            travels += cut.numel - cut.num_held(owner)
        excess = max(max(works) - max(_LIMITS) * mean, 0)
        return excess, travels / max(numel, 1) + _OF_TRAVEL * max(works) / max(mean, 1)

    return min(found, key=cost)


def _in_order(
    order: Sequence[int], cuts: Sequence[Cut], loads: Sequence[int], limit: float
) -> list[int]:
    """Give each tensor to the rank that holds most of it among those below the limit."""
    loads, owners = list(loads), [0] * len(cuts)
    for index in order:
        cut = cuts[index]
        by_share = sorted(range(len(loads)), key=lambda rank: (-cut.num_held(rank), loads[rank]))
        fits = (rank for rank in by_share if loads[rank] + cut.work <= limit)
        owner = next(fits, min(by_share, key=loads.__getitem__))
        owners[index] = owner
        loads[owner] += cut.work
    return owners
