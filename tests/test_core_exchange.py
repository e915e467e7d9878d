"""All-to-all of parts of whatever length: by the backend, and from the memory of the ranks."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_fsdp.core.ranks import lines
from lightning_fsdp.core.ranks.exchange import exchange
from lightning_fsdp.core.ranks.groups import communicator_of
from tests.support import ranks
from tests.support.events import wait_for
from tests.support.one_host import AT_ONCE_S, connected, impatient
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.skipif(
    ranks.active_transport == ranks.PAIRS, reason="what is tested is switched off"
)


def _lengths(sender, receiver):
    """Of the parts that one sends to another: some empty, some none at all."""
    return [] if sender == receiver else [7 * sender, 0, 3 + receiver][: 2 * sender + receiver]


def _parts(sender, receiver, dtype, step=0):
    values = 100 * sender + 10 * receiver + step
    return [(torch.arange(n) % 5 + values).to(dtype) for n in _lengths(sender, receiver)]


def _exchange_on_both_ways(rank, world_size):
    direct = connected(dist.group.WORLD)
    in_pairs = communicator_of(dist.group.WORLD, comm="pairs")
    assert direct.lines
    assert not in_pairs.lines
    for communicator in (direct, in_pairs):
        for step, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64)):
            outgoing = [_parts(rank, r, dtype, step) for r in range(world_size)]
            places = [[torch.empty(n, dtype=dtype) for n in _lengths(r, rank)] for r in
                      range(world_size)]  # fmt: skip
            before = getattr(communicator.traffic.get("all_to_all"), "sent_bytes", 0)
            exchange(communicator, outgoing, places, "test")
            for part in (part for parts in outgoing for part in parts):
                part.fill_(-1)  # it may change as soon as the exchange is over
            for peer in range(world_size):
                for found, expected in zip(
                    places[peer], _parts(peer, rank, dtype, step), strict=True
                ):
                    assert torch.equal(found, expected)
            sent = sum(sum(_lengths(rank, r)) for r in range(world_size)) * dtype.itemsize
            assert communicator.traffic["all_to_all"].sent_bytes - before == sent


@pytest.mark.parametrize("world_size", [2, 3])
def test_parts_of_any_length_arrive_where_they_are_to_be(world_size):
    run_on_ranks(_exchange_on_both_ways, world_size)


def _read_late(rank, world_size):
    """A rank that has read all that it needs waits for those that read from it."""
    communicator = connected(dist.group.WORLD)
    take = lines.Lines._take
    if rank == 1:
        lines.Lines._take = lambda *args: (time.sleep(0.5), take(*args))
    mine, theirs = torch.full((1000,), float(rank)), torch.empty(1000)
    outgoing, incoming = ([[], [each]][:: 1 - 2 * rank] for each in (mine, theirs))
    exchange(communicator, outgoing, incoming, "test")
    mine.fill_(-1)
    assert torch.equal(theirs, torch.full((1000,), 1.0 - rank))


def test_what_is_sent_stays_until_it_was_read():
    run_on_ranks(_read_late, 2)


def _no_exchange(rank, world_size):
    communicator = impatient(dist.new_group(), timeout_s=1.0)
    if rank == 1:
        dist.barrier()
        return
    nothing = [[], []]
    with pytest.raises(RuntimeError, match=r"gradients to owners .*expected rank 1 to take part"):
        exchange(communicator, nothing, nothing, "gradients to owners")
    dist.barrier()


def test_who_does_not_take_part_is_named():
    run_on_ranks(_no_exchange, 2)


def _interrupted(rank, world_size, is_changed):
    communicator = connected(dist.new_group(timeout=timedelta(seconds=120)))
    mine, theirs = torch.zeros(10), torch.empty(10)
    outgoing, incoming = ([[], [each]][:: 1 - 2 * rank] for each in (mine, theirs))
    if rank == 0:
        wait = lines.Lines._wait

        def interrupt(*args):
            lines.Lines._wait = wait
            raise KeyboardInterrupt

        lines.Lines._wait = interrupt
        with pytest.raises(KeyboardInterrupt):
            exchange(communicator, outgoing, incoming, "test")
        mine.fill_(-1)
        is_changed.touch()
        return
    take = lines.Lines._take
    lines.Lines._take = lambda *args: (wait_for(is_changed), take(*args))
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"test .*expected rank 0 to take part"):
        exchange(communicator, outgoing, incoming, "test")
    assert time.monotonic() - start < AT_ONCE_S


def test_data_of_a_rank_that_was_interrupted_is_not_taken(tmp_path):
    run_on_ranks(_interrupted, 2, tmp_path / "is changed")
