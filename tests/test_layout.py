import itertools
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_fsdp.core.engine.layout import (
    ALIGNMENT,
    SHARD_ALIGNMENT,
    FlatLayout,
    Slot,
    plan_layout,
)
from lightning_fsdp.core.ranks.pairs import Span, cut_into_runs, zero_padding
from lightning_fsdp.core.tensors.flat_chunks import box_of, boxes

shapes = st.lists(st.lists(st.integers(0, 7), max_size=4).map(tuple), min_size=1, max_size=6)
world_sizes = st.integers(1, 9)


def plan(list_of_shapes, world_size):
    named = [(f"p{i}", shape) for i, shape in enumerate(list_of_shapes)]
    return plan_layout(named, world_size)


@given(shapes, world_sizes)
def test_every_element_is_owned_by_exactly_one_rank(list_of_shapes, world_size):
    layout = plan(list_of_shapes, world_size)
    for slot in layout.slots:
        pieces = [layout.slice_of(slot, rank) for rank in range(world_size)]
        owned = [e for piece in pieces for e in range(piece.start, piece.stop)]
        assert owned == list(range(math.prod(slot.shape)))


@given(shapes, world_sizes)
def test_a_slice_lies_in_the_shard_where_the_region_has_it(list_of_shapes, world_size):
    layout = plan(list_of_shapes, world_size)
    region = [None] * layout.numel
    for slot in layout.slots:
        for element in range(slot.numel):
            assert region[slot.offset + element] is None, "two parameters overlap"
            region[slot.offset + element] = (slot.name, element)
    for rank in range(world_size):
        start, stop = layout.shard_range(rank)
        shard = region[start:stop]
        for slot in layout.slots:
            piece = layout.slice_of(slot, rank)
            expected = [(slot.name, e) for e in range(piece.start, piece.stop)]
            offset = slot.offset + piece.start - start
            assert [e for e in shard if e and e[0] == slot.name] == expected
            assert not expected or shard[offset : offset + piece.numel] == expected


@given(shapes, world_sizes)
def test_parameters_and_shards_start_aligned_and_padding_is_bounded(list_of_shapes, world_size):
    layout = plan(list_of_shapes, world_size)
    assert all(slot.offset % ALIGNMENT == 0 for slot in layout.slots)
    assert layout.shard_numel % SHARD_ALIGNMENT == 0
    elements = sum(slot.numel for slot in layout.slots)
    most = ALIGNMENT * len(layout.slots) + SHARD_ALIGNMENT * world_size
    assert elements <= layout.numel < elements + most


def test_the_drawing_in_the_docstring_is_to_scale():
    layout = plan([(3, 10), (10,)], 2)
    assert [slot.offset for slot in layout.slots] == [0, 32]
    weight, bias = layout.slots
    assert layout.slice_of(weight, 0).numel == 24
    assert layout.shard_range(1) == (24, 48)
    assert layout.slice_of(bias, 1).numel == 10


def test_padding_stays_below_one_percent_at_1024_ranks():
    block = [("qkv", (12288, 4096)), ("out", (4096, 4096)), ("up", (16384, 4096)),
             ("down", (4096, 16384)), ("norm", (4096,)), ("bias", (4096,))]  # fmt: skip
    layout = plan_layout(block, 1024)
    elements = sum(slot.numel for slot in layout.slots)
    assert layout.numel - elements < 0.01 * elements


@example([(2,), (3,)], 1, 3)  # one of exactly the least size
@given(shapes, world_sizes, st.integers(1, 60))
def test_runs_hold_every_slot_once_and_large_ones_alone(list_of_shapes, world_size, min_numel):
    layout = plan(list_of_shapes, world_size)
    runs = cut_into_runs(layout, min_numel)
    assert [index for run in runs for index in run] == list(range(len(layout.slots)))
    for run in runs:
        assert len(run) == 1 or all(layout.slots[i].numel < min_numel for i in run)
    small = [all(layout.slots[i].numel < min_numel for i in run) for run in runs]
    assert (True, True) not in itertools.pairwise(small), "small neighbours stay together"


@given(st.lists(st.integers(0, 40), max_size=8, unique=True), st.integers(0, 9))
def test_zeros_are_written_to_what_the_spans_of_a_shard_leave_free(bounds, rest):
    bounds = sorted(bounds)
    shard = torch.ones(max(bounds, default=0) + rest)
    ranges = list(zip(bounds[::2], bounds[1::2], strict=False))
    spans = [Span(start, stop, shard[start:stop]) for start, stop in ranges]
    zero_padding(shard, spans)
    held = {e for start, stop in ranges for e in range(start, stop)}
    assert [e for e, value in enumerate(shard.tolist()) if value] == sorted(held)


def elements_of(box, shape):
    """Places in the flattened tensor, in the order in which the box has them."""
    assert len(box.offsets) == len(box.sizes) == len(shape)
    for offset, size, dim in zip(box.offsets, box.sizes, shape, strict=True):
        assert 0 <= offset < offset + size <= dim, "a box is not empty and lies in the tensor"
    ranges = [range(o, o + size) for o, size in zip(box.offsets, box.sizes, strict=True)]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for index in itertools.product(*ranges):
        yield sum(i * stride for i, stride in zip(index, strides, strict=True))


@given(st.lists(st.integers(0, 5), max_size=4).map(tuple), st.data())
def test_boxes_tile_a_flat_range(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(0, numel))
    found = list(boxes(shape, start, stop))
    assert [e for box in found for e in elements_of(box, shape)] == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    for box in found:  # and each is contiguous: a view of the flat range
        places = list(elements_of(box, shape))
        assert places == list(range(places[0], places[0] + len(places)))


@given(shapes, world_sizes)
def test_boxes_of_all_ranks_tile_every_parameter(list_of_shapes, world_size):
    layout = plan(list_of_shapes, world_size)
    for slot in layout.slots:
        pieces = [layout.slice_of(slot, rank) for rank in range(world_size)]
        found = [box for piece in pieces for box in boxes(slot.shape, piece.start, piece.stop)]
        owned = [e for box in found for e in elements_of(box, slot.shape)]
        assert owned == list(range(slot.numel))


def test_boxes_of_a_scalar_a_vector_and_the_docstrings_matrix():
    assert list(boxes((), 0, 1)) == [box_of((), ())]
    assert list(boxes((), 0, 0)) == list(boxes((3, 0), 0, 0)) == []
    assert list(boxes((9,), 2, 7)) == [box_of((2,), (5,))]
    assert list(boxes((4, 10), 7, 36)) == [
        box_of((0, 7), (1, 3)),
        box_of((1, 0), (2, 10)),
        box_of((3, 0), (1, 6)),
    ]
    assert len(list(boxes((4, 4, 4), 1, 63))) == 5


@pytest.mark.parametrize(
    ("slots", "shard_numel", "problem"),
    [
        ([("w", (4,), 0), ("b", (4,), 8)], 64, "slot 'b' at a multiple of 32, got 8"),
        ([("w", (40,), 0), ("b", (4,), 32)], 64, "slot 'b' behind 'w', which ends at 40"),
        ([("w", (4,), 32), ("b", (4,), 0)], 64, "slot 'b' behind 'w', which ends at 36"),
        ([("w", (4,), 0), ("b", (97,), 32)], 64, "'b' to end in the region of 128 .* 129"),
        ([("w", (4,), 0)], 12, "shards of a multiple of 8 elements, got 12"),
    ],
)
def test_a_wrong_layout_is_refused_when_it_is_made_and_the_slot_is_named(
    slots, shard_numel, problem
):
    with pytest.raises(ValueError, match=problem):
        FlatLayout(tuple(Slot(*slot) for slot in slots), shard_numel, 2)
