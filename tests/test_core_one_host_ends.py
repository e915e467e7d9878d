"""Ranks of one host that read each other's memory: every end of a rank is noticed by the others."""

import contextlib
import os
import signal
import threading
import time
import traceback
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from lightning_fsdp import shard_model
from lightning_fsdp.core.engine.communicator import LocalRegion, Pending
from lightning_fsdp.core.engine.hooks import hooks_of
from lightning_fsdp.core.engine.layout import plan_layout
from lightning_fsdp.core.ranks import lines, one_host, process_memory
from lightning_fsdp.core.ranks.groups import communicator_of
from tests.support import ranks
from tests.support.events import interrupt_where_it_waits_in, wait_for, wake
from tests.support.models import TASKS
from tests.support.one_host import (
    AT_ONCE_S,
    FP32,
    SHARD_NUMEL,
    connected,
    empty,
    gather_on,
    impatient,
    new_mesh,
)
from tests.support.ranks import ends_on_ranks, errors_on_ranks, run_on_ranks
from tests.support.worst_case import poison

pytestmark = pytest.mark.skipif(
    ranks.active_transport == ranks.PAIRS, reason="what is tested is switched off"
)
TIMEOUT_S = 4.0  # for a peer that does not come


def killed_while_a_peer_waits(rank, world_size):
    group = dist.new_group(timeout=timedelta(seconds=120))
    gather_on(group).wait()
    if rank == 1:
        time.sleep(60)
    pid, killed = communicator_of(group).lines._processes[1].pid, []

    def kill():
        killed.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    threading.Timer(0.3, kill).start()
    with pytest.raises(
        RuntimeError, match=r"gather of unit 'u' .*expected rank 1 to take"
    ) as failed:
        gather_on(group).wait()
    assert time.monotonic() - killed[0] < AT_ONCE_S
    why = str(failed.value.__cause__)
    assert f"line to rank 1 (process {pid}): expected its data, but " in why
    assert "it has ended" in why or (world_size == 3 and "waited for rank 1 in vain" in why)
    with pytest.raises(RuntimeError, match="expected rank 1 to take part"):
        gather_on(group).wait()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_killed_peer_is_noticed_at_once_and_named(world_size):
    ends = ends_on_ranks(killed_while_a_peer_waits, world_size)
    assert ends == ["done", "died", *["done"] * (world_size - 2)]


def killed_with_a_child(rank, world_size, folder):
    """The child has copies of all descriptors, and so keeps the lines open."""
    group = dist.new_group(timeout=timedelta(seconds=120))
    gather_on(group).wait()
    if rank == 1:
        if (child := os.fork()) == 0:
            time.sleep(AT_ONCE_S + 5)
            os._exit(0)
        (folder / "child").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="expected rank 1 to take part"):
        gather_on(group).wait()
    assert time.monotonic() - start < AT_ONCE_S
    # It lived on until now; and the parent of the ranks sees that rank 1 has ended once it is gone.
    os.kill(int((folder / "child").read_text()), signal.SIGKILL)


def test_a_killed_peer_is_noticed_though_its_child_lives_on(tmp_path):
    assert ends_on_ranks(killed_with_a_child, 2, tmp_path) == ["done", "died"]


# Ends that are noticed after the timeout. Each has two ranks; all of them wait at the same time.


def stopped_for_too_long(rank, group):
    if rank == 1:
        lines_of_it = communicator_of(group).lines
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(RuntimeError, match=r"gather .*expected rank 0 to take part"):
            gather_on(group).wait()
        assert "waited for rank 1 in vain" in lines_of_it._lost[0]
        return
    pid, start = communicator_of(group).lines._processes[1].pid, time.monotonic()
    with pytest.raises(RuntimeError, match=r"gather .*expected rank 1 to take part"):
        gather_on(group).wait()
    assert TIMEOUT_S <= time.monotonic() - start < TIMEOUT_S + AT_ONCE_S
    wake(pid)


def stopped_after_it_posted(rank, group):
    """What it posted is read; that it does not read is noticed."""
    if rank == 1:
        lines.Lines._take = lambda self, exchange: os.kill(os.getpid(), signal.SIGSTOP)
        with contextlib.suppress(RuntimeError):
            gather_on(group).wait()
        return
    pid = communicator_of(group).lines._processes[1].pid
    with pytest.raises(RuntimeError, match="expected rank 1 to take part") as failed:
        gather_on(group).wait()
    wake(pid)
    assert "expected it to read what is here" in str(failed.value.__cause__)


def give_up_while_a_peer_is_to_read(who_is_late, folder, rank, group):
    """Rank 0 posts, gives up and changes its data; rank 1 reads late and must not believe it."""
    is_changed, is_read = (folder / f"{who_is_late}: {what}" for what in ("changed", "read"))
    if rank == 1 and who_is_late == "its thread":
        take = lines.Lines._take
        lines.Lines._take = lambda *args: (wait_for(is_changed), take(*args), is_read.touch())
    elif rank == 1:
        wait_for(is_changed)
    whole = torch.full((2 * SHARD_NUMEL,), float(rank))
    gather = communicator_of(group).gather(whole, "u")
    # With the tables: a peer that found those spoilt would not come to the data.
    keeps = list(communicator_of(group).lines._started.values())
    if rank == 1 and who_is_late == "its thread":
        wait_for(is_read)
    with pytest.raises(RuntimeError, match="expected rank"):
        gather.wait()
    poison(whole)
    (is_read if rank == 1 else is_changed).touch()
    wait_for(is_read)
    keeps.clear()


def give_up_while_reading(rank, group):
    read = process_memory.Stretch.read
    if rank == 1:
        process_memory.Stretch.read = lambda *args: (
            time.sleep(TIMEOUT_S / 2 + 1),
            read(*args),
        )
    whole = torch.full((2 * SHARD_NUMEL,), float(rank))
    with pytest.raises(RuntimeError, match="expected rank"):
        communicator_of(group).gather(whole, "u").wait()
    whole.fill_(7.0 + rank)
    time.sleep(TIMEOUT_S)
    assert set(whole.tolist()) == {7.0 + rank}, "written to after the wait"


WHO_IS_LATE = ["the rank", "its thread"]
WAITS = {
    "stopped": stopped_for_too_long,
    "stopped after it posted": stopped_after_it_posted,
    **{who: partial(give_up_while_a_peer_is_to_read, who) for who in WHO_IS_LATE},
    "gave up while it read": give_up_while_reading,
}


def wait_in_pairs(rank, world_size, folder):
    pairs = torch.arange(world_size).view(-1, 2).tolist()
    group = [dist.new_group(pair) for pair in pairs][rank // 2]
    what, wait = list(WAITS.items())[rank // 2]
    given = [folder] if what in WHO_IS_LATE else []
    gather_on(group).wait()
    impatient(group, TIMEOUT_S)
    dist.barrier()
    try:
        wait(*given, rank % 2, group)
    except BaseException:  # noqa: BLE001 (the test that is about it shows it)
        return traceback.format_exc()
    return None


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """Of each two ranks, by what they did."""
    found = run_on_ranks(wait_in_pairs, 2 * len(WAITS), tmp_path_factory.mktemp("late"))
    return {name: found[2 * n : 2 * n + 2] for n, name in enumerate(WAITS)}


def test_a_stopped_peer_is_named_after_the_timeout_and_finds_out_when_it_wakes(failures):
    assert failures["stopped"] == [None, None]


def test_a_peer_that_does_not_read_is_named(failures):
    assert failures["stopped after it posted"] == [None, None]


@pytest.mark.parametrize("who_is_late", WHO_IS_LATE)
def test_data_of_a_rank_that_gave_up_is_not_taken(failures, who_is_late):
    assert failures[who_is_late] == [None, None]


def test_a_rank_that_gave_up_may_use_its_memory_again(failures):
    assert failures["gave up while it read"] == [None, None]


def raise_on_one_rank(rank, world_size):
    group = dist.new_group()
    gather_on(group).wait()
    impatient(group, TIMEOUT_S)
    if rank == 1:
        raise ValueError("of the user")
    gather_on(group).wait()


def test_a_peer_that_raises_is_named_by_those_that_wait():
    first, second, third = errors_on_ranks(raise_on_one_rank, 3)
    assert (second.type_name, second.message) == ("ValueError", "of the user")
    for error in (first, third):
        assert error.type_name == "RuntimeError"
        assert "gather of unit 'u'" in error.message
        assert "expected rank 1 to take part" in error.message


def interrupted(rank, world_size, when, is_changed):
    """Rank 0 posts, is interrupted, frees and changes its data; rank 1 reads after that."""
    model = shard_model(TASKS["mlp"].build(), mesh=new_mesh(2))
    flat_param = next(iter(hooks_of(model).schedule.flat_params))
    flat_param.unshard("a test")
    flat_param.reshard("a test")
    dist.barrier()
    if rank == 1:
        take = lines.Lines._take
        lines.Lines._take = lambda *args: (wait_for(is_changed), take(*args))
        with pytest.raises(RuntimeError, match=r"gather of unit .* expected rank 0 to take part"):
            _unshard(flat_param)
        return
    if when == "in the wait":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupt_where_it_waits_in(lines.Lines._wait)
    else:
        owner, name, before = {
            "after the post": (one_host.OneHostCommunicator, "_exchange", False),
            "before the wait": (Pending, "wait", True),
        }[when]
        setattr(owner, name, _interrupted(owner, name, before=before))
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        _unshard(flat_param)
    flat_param.reshard("a test")
    assert flat_param.buffer.flat.untyped_storage().nbytes() == 0
    is_changed.touch()
    assert time.monotonic() - start < AT_ONCE_S
    with pytest.raises(RuntimeError, match="expected rank 1 to take part") as failed:
        gather_on(hooks_of(model).schedule.communicator.group).wait()
    assert "this rank was interrupted" in str(failed.value.__cause__)


def _unshard(flat_param):
    flat_param.unshard("a test")
    flat_param.wait_for_unshard()


def _interrupted(owner, name, *, before=False):
    function = getattr(owner, name)

    def interrupted(*args):
        setattr(owner, name, function)  # once
        if not before:
            function(*args)
        raise KeyboardInterrupt

    return interrupted


@pytest.mark.parametrize("when", ["after the post", "before the wait", "in the wait"])
def test_data_of_a_rank_that_was_interrupted_is_not_taken(when, tmp_path):
    run_on_ranks(interrupted, 2, when, tmp_path / "is changed")


def interrupted_in_a_post(rank, world_size):
    """What rank 0 starts next is not what rank 1 waits for."""
    communicator = connected(dist.new_group())
    layout = plan_layout([("a", (40,))], world_size)

    def reduce(number):
        gradients = {0: torch.full((40,), number)}
        return communicator.reduce(LocalRegion(gradients, layout, "u", empty, FP32, FP32))

    if rank == 0:
        lines.Lines._send = _interrupted(lines.Lines, "_send", before=True)
        with pytest.raises(KeyboardInterrupt):
            reduce(1.0)
    with pytest.raises(RuntimeError, match=f"reduction of unit 'u' .* expected rank {1 - rank} to"):
        reduce(2.0).wait()


def test_what_was_not_posted_is_not_mixed_up_with_what_comes_next():
    run_on_ranks(interrupted_in_a_post, 2)


def child_that_ends_lines(rank, world_size):
    communicator = connected(dist.group.WORLD)
    gather_on(dist.group.WORLD).wait()
    if (pid := os.fork()) == 0:
        communicator.break_off()
        communicator.lines.close()
        os._exit(0)
    os.waitpid(pid, 0)
    dist.barrier()
    gather_on(dist.group.WORLD).wait()


def test_a_forked_child_does_not_end_the_lines_of_its_parent():
    run_on_ranks(child_that_ends_lines, 2)


def gather_many_at_once(rank, world_size):
    if rank == 1:  # for a while it receives nothing
        pauses, receive = iter([1.0]), lines.Lines._receive
        lines.Lines._receive = lambda *args: (time.sleep(next(pauses, 0)), receive(*args))[1]
    communicator = connected(dist.group.WORLD)
    wholes = [torch.full((2 * n,), 10.0 * n + rank) for n in range(1200)]  # one without elements
    gathers = [communicator.gather(whole, f"u{n}") for n, whole in enumerate(wholes)]
    for n, gather in enumerate(gathers):
        assert gather.wait().view(2, -1).tolist() == [[10.0 * n] * n, [10.0 * n + 1] * n]


def test_more_is_posted_than_a_line_holds():
    run_on_ranks(gather_many_at_once, 2)


def ranks_that_post_different_sizes(rank, world_size):
    impatient(group := dist.new_group(), TIMEOUT_S)
    gather_on(group, numel=8 * (1 + rank)).wait()


def test_sizes_that_differ_are_refused():
    for error in errors_on_ranks(ranks_that_post_different_sizes, 2):
        assert "to take part" in error.message
