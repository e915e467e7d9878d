"""The order of an epoch: each sample once, mixed, the same again, in little memory."""

import tracemalloc
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fsdp import order
from lightning_fsdp.order import epoch_order


def _computed(total, seed):
    return order._permuted(torch.arange(total), total, seed)


@settings(max_examples=60)
@given(st.integers(1, 3000), st.integers(0, 2**40))
def test_a_computed_order_has_every_sample_once(total, seed):
    assert sorted(_computed(total, seed).tolist()) == list(range(total))


def test_a_computed_order_is_mixed():
    total = 100_000
    found, other = _computed(total, 3).double(), _computed(total, 4).double()
    places = torch.arange(total).double()
    # A standard deviation of each is 0.003.
    assert abs(torch.corrcoef(torch.stack([places, found]))[0, 1]) < 0.015
    assert abs(torch.corrcoef(torch.stack([found[:-1], found[1:]]))[0, 1]) < 0.015
    assert abs(torch.corrcoef(torch.stack([found, other]))[0, 1]) < 0.015
    assert (found[1:] - found[:-1]).abs().mean() / total == pytest.approx(1 / 3, abs=0.01)
    assert (found == other).sum() < 10, "1 expected"


def test_every_sample_comes_to_every_place():
    counts = torch.zeros(20, 20)
    for seed in range(2000):
        counts[torch.arange(20), _computed(20, seed)] += 1
    chi_squared = ((counts - 100) ** 2 / 100).sum() / 19**2
    assert 0.75 < chi_squared < 1.25, "1 expected, with a standard deviation of 0.07"


@pytest.mark.parametrize("seed", [None, 5])
def test_the_order_does_not_depend_on_how_it_is_read(seed, monkeypatch):
    monkeypatch.setattr(order, "_COMPUTED_AT_ONCE", 7)
    for held in (1, 2**22):
        monkeypatch.setattr(order, "_HELD_IN_MEMORY", held)
        whole = list(epoch_order(101, range(101), seed=seed))
        for first in (0, 1, 50):
            assert list(epoch_order(101, range(first, 99, 3), seed=seed)) == whole[first:99:3]


def test_a_billion_samples_take_no_memory():
    tracemalloc.start()
    try:
        found = list(islice(epoch_order(10**9, range(1, 10**9, 2), seed=1), 50_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(set(found)) == 50_000
    assert max(found) > 0.99e9
    assert peak < 10e6
