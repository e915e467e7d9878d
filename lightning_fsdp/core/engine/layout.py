"""Where each parameter lies in a flat region, and which part of it each rank owns. Integers only.

A flat parameter's parameters are laid end to end in one 1-D region; the region is cut into equal
shards, one per rank. Drawn to scale for two parameters, ``w`` (3, 10) and ``b`` (10,), on two
ranks:

    element   0         10        20  24    30  32        42    48
              |---------|---------|----|----|...|---------|.....|
    slots     [ w: 30 elements              ]...[ b: 10   ].....
    shards    [ rank 0: 0..24          ][ rank 1: 24..48        ]

Dots are padding and always hold zeros. Each parameter starts at a multiple of ``ALIGNMENT``
elements, as it would in an allocation of its own: kernels then take the same vector path (and give
the same bits) as they do on plain tensors. A shard may cut a parameter anywhere.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 32
"""In elements: 64 bytes in 16-bit dtypes, 128 in fp32. torch's CPU allocator aligns to 64."""

SHARD_ALIGNMENT = 8
"""In elements: shards start at multiples of 16 bytes in 16-bit dtypes and in wider ones, as the
vectorized copies of collectives want."""


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in a region.

    Attributes:
        name: Original name, relative to the module that was sharded.
        shape: Original shape.
        offset: First element in the region.
    """

    name: str
    shape: tuple[int, ...]
    offset: int

    @functools.cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FlatSlice:
    """Elements ``[start, stop)`` of a row-major tensor of ``shape``; empty where they are equal."""

    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements of the slice."""
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """A region of ``shard_world_size`` equal shards that holds ``slots`` in order.

    Attributes:
        slots: One per parameter, by offset.
        shard_numel: Elements of a shard, padding included.
        shard_world_size: Number of shards.
        places: By rank, the index of the shard that it owns; if empty, rank r owns shard r.

    Raises:
        ValueError: Slots overlap, are not aligned, not in order or not inside the region, or
            shards are not aligned.
    """

    slots: tuple[Slot, ...]
    shard_numel: int
    shard_world_size: int
    places: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        shards = f"shards of a multiple of {SHARD_ALIGNMENT} elements"
        _expect(self.shard_numel % SHARD_ALIGNMENT == 0, shards, self.shard_numel)
        stop, before = 0, "the region's start"
        for slot in self.slots:
            name, offset, numel = f"slot {slot.name!r}", slot.offset, slot.numel
            _expect(offset % ALIGNMENT == 0, f"{name} at a multiple of {ALIGNMENT}", offset)
            _expect(offset >= stop, f"{name} behind {before}, which ends at {stop}", offset)
            stop, before = offset + numel, f"{slot.name!r}"
        _expect(stop <= self.numel, f"{before} to end in the region of {self.numel} elements", stop)

    @functools.cached_property
    def numel(self) -> int:
        """Number of elements of the whole region, padding included."""
        return self.shard_numel * self.shard_world_size

    def shard_range(self, shard_rank: int) -> tuple[int, int]:
        """First and past-the-last element of a rank's shard in the region."""
        place = self.places[shard_rank] if self.places else shard_rank
        return place * self.shard_numel, (place + 1) * self.shard_numel

    def slice_of(self, slot: Slot, shard_rank: int) -> FlatSlice:
        """The part of a parameter that a rank owns, in elements of that parameter."""
        shard_start, shard_stop = self.shard_range(shard_rank)
        start = min(max(shard_start - slot.offset, 0), slot.numel)
        stop = min(shard_stop - slot.offset, slot.numel)
        return FlatSlice(slot.shape, start, max(start, stop))

    def extent(self, slots: range) -> tuple[int, int]:
        """First and past-the-last element of a run of neighbouring slots."""
        last = self.slots[slots[-1]]
        return self.slots[slots[0]].offset, last.offset + last.numel


def plan_layout(
    named_shapes: Sequence[tuple[str, tuple[int, ...]]],
    shard_world_size: int,
    places: tuple[int, ...] = (),
) -> FlatLayout:
    """Lay parameters end to end and cut the region into equal shards.

    Args:
        named_shapes: Name and original shape of each parameter, in order.
        shard_world_size: Number of shards, at least 1.
        places: See :class:`FlatLayout`.

    Returns:
        The layout; its region holds at most ``ALIGNMENT - 1`` elements of padding per parameter
        and ``SHARD_ALIGNMENT * shard_world_size`` at the end.
    """
    slots, position = list[Slot](), 0
    for name, shape in named_shapes:
        slots.append(Slot(name, shape, _round_up(position, ALIGNMENT)))
        position = slots[-1].offset + slots[-1].numel
    shard_numel = _round_up(-(-position // shard_world_size), SHARD_ALIGNMENT)
    return FlatLayout(tuple(slots), shard_numel, shard_world_size, places)


def _expect(is_so: bool, what: str, found: int) -> None:
    if not is_so:
        raise ValueError(f"layout: expected {what}, got {found}.")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
