"""The loader by itself: who gets what, where reading goes on, what is refused."""

import random
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_fsdp import DealtSampler, ResumableLoader, data
from tests.support.ranks import run_on_ranks


class _Numbers(Dataset):
    """Sample i is the number i, and what a worker draws for it."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index, torch.randint(2**31, ()).item()


def _loader(length, *, ranks=1, rank=0, batch_size=1, **options):
    return ResumableLoader(_Numbers(length), batch_size, num_replicas=ranks, rank=rank, **options)


def _batches(loader, epoch=0):
    """The numbers in each batch."""
    loader.sampler.set_epoch(epoch)
    return [batch[0].tolist() for batch in loader]


def _read(loader, num_batches, epoch):
    loader.sampler.set_epoch(epoch)
    iterator = iter(loader)
    for _ in range(num_batches):
        next(iterator)
    return loader.state_dict()


# -- who gets what ---------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4), st.integers(0, 3))
def test_no_sample_is_read_twice_and_ranks_get_equally_many(length, ranks, batch_size, epoch):
    loaders = [
        _loader(length, ranks=ranks, rank=rank, batch_size=batch_size) for rank in range(ranks)
    ]
    shares = [_batches(loader, epoch) for loader in loaders]
    num_batches = length // ranks // batch_size
    assert [len(loader) for loader in loaders] == [num_batches] * ranks
    assert [len(share) for share in shares] == [num_batches] * ranks
    flat = [index for share in shares for batch in share for index in batch]
    assert len(flat) == len(set(flat)) == num_batches * ranks * batch_size


@pytest.mark.parametrize("listed_at_once", [2**14, 7])
def test_the_order_is_that_of_torchs_distributed_sampler(listed_at_once, monkeypatch):
    """So that a run may be compared with one that uses the Trainer's own sampler."""
    monkeypatch.setattr(data, "_LISTED_AT_ONCE", listed_at_once)
    for epoch in (0, 3):
        for rank in range(2):
            theirs = DistributedSampler(
                _Numbers(21), num_replicas=2, rank=rank, seed=5, drop_last=True
            )
            theirs.set_epoch(epoch)
            loader = _loader(21, ranks=2, rank=rank, seed=5)
            assert list(chain(*_batches(loader, epoch))) == list(theirs)


def test_the_shuffle_follows_seed_and_epoch():
    first = _batches(_loader(30))
    assert first == _batches(_loader(30))
    assert first != _batches(_loader(30, seed=1))
    assert first != _batches(_loader(30), epoch=1)
    assert first != sorted(first)
    assert _batches(_loader(4, shuffle=False), epoch=1) == [[0], [1], [2], [3]]


@pytest.mark.parametrize(("ranks", "batch_size"), [(2, 3), (3, 2), (6, 1)])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(ranks, batch_size):
    expected = [sorted(batch) for batch in _batches(_loader(24, batch_size=6))]
    shares = [
        _batches(_loader(24, ranks=ranks, rank=rank, batch_size=batch_size))
        for rank in range(ranks)
    ]
    together = [sorted(chain(*batches)) for batches in zip(*shares, strict=True)]
    assert together == expected


def _grouped(rank, world_size, rendezvous):
    early = ResumableLoader(_Numbers(24), 2)
    early.load_state_dict({**early.state_dict(), "num_samples": 8})
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    loader = ResumableLoader(_Numbers(8), 2)
    assert len(loader) == 2
    read = [index for batch in _batches(loader) for index in batch]
    rest = [index for batch in _batches(early, epoch=0) for index in batch]
    dist.destroy_process_group()
    assert loader.state_dict()["num_samples"] == 8, "of all ranks that read"
    return read, rest


def test_ranks_are_those_of_the_process_group_once_there_is_one(tmp_path):
    loader = ResumableLoader(_Numbers(8), 2)
    assert len(loader) == 4
    rendezvous = f"file://{tmp_path}/group"
    shares, rests = zip(*run_on_ranks(_grouped, 2, rendezvous, backend=None), strict=True)
    assert sorted(chain(*shares)) == list(range(8))
    whole = chain(*_batches(_loader(24, batch_size=4), epoch=0)[2:])
    assert sorted(chain(*rests)) == sorted(whole), "a position that was loaded before"


# -- where reading goes on -------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_reading_goes_on_where_the_position_says(num_workers):
    whole = _batches(_loader(24, batch_size=4), epoch=2)
    # Two workers have read four batches ahead by then; they do not count.
    state = _read(_loader(24, batch_size=4, num_workers=num_workers), 2, epoch=2)
    assert (state["epoch"], state["num_samples"]) == (2, 8)
    loader = _loader(24, batch_size=4, num_workers=num_workers)
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    assert _batches(loader, epoch=2) == whole[2:]
    assert len(loader) == 6, "the length stays that of a whole epoch"
    assert len(_batches(loader, epoch=2)) == 6, "the epoch after that is whole"


def test_a_position_can_be_taken_up_by_another_number_of_ranks():
    expected = _batches(_loader(24, batch_size=4), epoch=1)[3:]
    states = [_read(_loader(24, ranks=2, rank=r, batch_size=2), 3, epoch=1) for r in range(2)]
    assert states[0] == states[1]
    shares = []
    for rank in range(4):
        loader = _loader(24, ranks=4, rank=rank, batch_size=1)
        loader.load_state_dict(states[0])
        shares.append(_batches(loader, epoch=1))
    together = [sorted(chain(*batches)) for batches in zip(*shares, strict=True)]
    assert together == [sorted(batch) for batch in expected]


def test_an_epoch_read_to_its_end_is_not_read_again():
    state = _read(_loader(8), 8, epoch=0)
    loader = _loader(8)
    loader.load_state_dict(state)
    assert _batches(loader, epoch=0) == []
    loader.load_state_dict(state)
    assert len(_batches(loader, epoch=1)) == 8


# -- random numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1])
def test_iterating_draws_nothing_from_the_process(num_workers):
    loader = _loader(8, num_workers=num_workers, collate_fn=lambda batch: batch[0][0])
    if num_workers:
        before = torch.get_rng_state()
        list(loader)
        assert torch.equal(torch.get_rng_state(), before)
    else:
        torch.manual_seed(3)
        expected = [torch.randint(2**31, ()).item() for _ in range(8)]
        torch.manual_seed(3)
        drawn = [batch[1].item() for batch in _loader(8)]
        assert drawn == expected, "without workers, samples draw from the process, nothing else"


def test_workers_draw_other_numbers_on_each_rank_and_in_each_epoch_and_the_same_again():
    def drawn(rank, epoch):
        loader = _loader(8, ranks=2, rank=rank, batch_size=4, num_workers=1)
        loader.sampler.set_epoch(epoch)
        torch.manual_seed(random.randrange(2**31))  # no matter where the process is
        return [batch[1].tolist() for batch in loader]

    assert drawn(0, 0) == drawn(0, 0)
    assert drawn(0, 0) != drawn(1, 0)
    assert drawn(0, 0) != drawn(0, 1)


# -- refusals --------------------------------------------------------------------------------------


def test_a_position_in_other_data_is_refused():
    state = _read(_loader(24), 3, epoch=0)
    with pytest.raises(ValueError, match=r"\(seed 0\), got seed 1\. Give it the dataset, seed"):
        _loader(24, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match=r"\(shuffle True\), got shuffle False"):
        _loader(24, shuffle=False).load_state_dict(state)
    with pytest.raises(ValueError, match=r"\(total 24\), got total 20"):
        _loader(20).load_state_dict(state)
    with pytest.raises(ValueError, match=r"divides the 3 samples read, got 4 \(2 ranks x 2\)"):
        _loader(24, ranks=2, rank=0, batch_size=2).load_state_dict(state)


def test_what_the_loader_sets_itself_is_refused():
    with pytest.raises(TypeError, match="expected no sampler, which it sets itself"):
        ResumableLoader(_Numbers(4), sampler=SequentialSampler(_Numbers(4)))
    with pytest.raises(TypeError, match="expected no drop_last"):
        ResumableLoader(_Numbers(4), drop_last=False)
    with pytest.raises(ValueError, match="expected num_replicas and rank together, got 2 and None"):
        DealtSampler(_Numbers(4), num_replicas=2)

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(TypeError, match="expected a map-style dataset, got Stream"):
        ResumableLoader(Stream())
