"""Ranks of one host that read each other's memory: what is right whichever thread comes first."""

import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_fsdp.core.engine.communicator import LocalRegion
from lightning_fsdp.core.engine.layout import plan_layout
from lightning_fsdp.core.ranks import lines
from lightning_fsdp.core.ranks.groups import communicator_of
from tests.support import ranks
from tests.support.events import wait_until
from tests.support.one_host import AT_ONCE_S, FP32, connected, empty, gather_on, impatient
from tests.support.ranks import ends_on_ranks, run_on_ranks

pytestmark = pytest.mark.skipif(
    ranks.active_transport == ranks.PAIRS, reason="what is tested is switched off"
)
TIMEOUT_S = 1.0  # for a peer that does not come


def give_up_what_nobody_waits_for(rank, world_size):
    """Rank 0 forgets a reduction, and gives up at another collective."""
    communicator = impatient(dist.new_group(), TIMEOUT_S)
    dist.barrier()
    if rank == 0:
        layout = plan_layout([("a", (40,))], world_size)
        region = LocalRegion({0: torch.ones(40)}, layout, "u", empty, FP32, FP32)
        communicator.reduce(region)
        (exchange,) = map(weakref.ref, communicator.lines._started.values())
        end, kept = lines.Lines._end, []

        def noting_what_is_kept(*args):
            kept.append(exchange() is not None)
            end(*args)

        lines.Lines._end = noting_what_is_kept
        with pytest.raises(RuntimeError, match="expected rank 1 to take part"):
            communicator.gather(torch.zeros(40), "v").wait()
        assert kept[0], "freed before peers were kept from counting what they read"
        assert exchange() is None
    dist.barrier()


def test_what_was_posted_stays_until_a_rank_that_gives_up_has_broken_its_seal():
    run_on_ranks(give_up_what_nobody_waits_for, 2)


def close_within_a_write(rank, world_size, folder):
    """Between the look at a descriptor and the write its lines end, and another file is opened."""
    group = dist.new_group()
    gather_on(group).wait()
    impatient(group, TIMEOUT_S)
    dist.barrier()
    if rank == 0:
        write, thread, opened = os.write, communicator_of(group).lines._thread, []

        def write_late(descriptor, message):
            os.write = write  # once
            communicator_of(group).lines._end("a test says so", rank)
            thread.join(0.5)  # it cannot end where this rank is about to write
            opened.extend(os.open(folder / str(n), os.O_CREAT | os.O_WRONLY) for n in range(20))
            return write(descriptor, message)

        os.write = write_late
        with pytest.raises(RuntimeError, match="expected rank 1 to take part"):
            gather_on(group).wait()
        assert [os.fstat(descriptor).st_size for descriptor in opened] == [0] * 20
        for descriptor in opened:
            os.close(descriptor)
        thread.join(AT_ONCE_S)
        assert not thread.is_alive()
    dist.barrier()


def test_no_message_is_written_to_a_file_that_has_the_number_of_a_closed_pipe(tmp_path):
    run_on_ranks(close_within_a_write, 2, tmp_path)


def wait_for_two(rank, world_size):
    """Ranks 0 and 2 do not come; the others do not hear of each other whom they missed."""
    impatient(group := dist.new_group(), TIMEOUT_S)
    dist.barrier()
    if rank % 2 == 1:
        lines.Lines._end = lambda *args: None
        with pytest.raises(RuntimeError, match="expected rank 0 to take part"):
            gather_on(group).wait()
    dist.barrier()


def test_where_two_ranks_are_late_all_others_name_the_same():
    run_on_ranks(wait_for_two, 4)


def killed_where_a_broken_pipe_kills(rank, world_size):
    """Scripts set this, so that they end without a message where their output is piped."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    group = dist.new_group()
    gather_on(group).wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    of_group = communicator_of(group).lines
    while 1 not in of_group._lost:
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="expected rank 1 to take part"):
        gather_on(group).wait()


def test_a_killed_peer_is_an_error_though_the_script_lets_sigpipe_end_it():
    assert ends_on_ranks(killed_where_a_broken_pipe_kills, 2) == ["done", "died"]


def give_up_before_it_is_said(rank, world_size):
    """Rank 1 gives up for rank 2; rank 0 reads when it has, but has not said it yet."""
    group = dist.new_group(timeout=timedelta(seconds=30))
    connected(group)
    dist.barrier()
    if rank == 0:
        take = lines.Lines._take
        lines.Lines._take = lambda *args: (dist.barrier(), dist.barrier(), take(*args))
        pending = gather_on(group)
    else:
        pending = gather_on(group)
        dist.barrier()
        send = lines.Lines._send

        def send_late(self, to, kind, *words):
            if to % world_size == 0:
                time.sleep(0.5)
            send(self, to, kind, *words)

        if rank == 1:
            lines.Lines._send = send_late
            of_group = communicator_of(group).lines
            ending = threading.Thread(target=of_group.hang_up, args=("a test says so", 2))
            ending.start()
            wait_until(lambda: not any(of_group._seal.raw))
        dist.barrier()
        if rank == 1:
            ending.join()  # what this rank says next must not overtake it
    with pytest.raises(RuntimeError) as failed:
        pending.wait()
    if rank == 0:
        assert "expected rank 2 to take part" in str(failed.value)
        assert "rank 1 waited for rank 2 in vain" in str(failed.value.__cause__)
    dist.barrier()


def test_who_gave_up_is_not_named_in_place_of_whom_it_missed():
    run_on_ranks(give_up_before_it_is_said, 3)


def interrupted_where_it_locks(rank, world_size):
    """Python code that locks can be interrupted when it has, and before anybody is to unlock."""
    communicator = impatient(dist.new_group(), TIMEOUT_S)
    dist.barrier()

    def interrupt(frame, event, arg):
        if frame.f_code.co_name == "__enter__" and frame.f_code.co_filename == threading.__file__:
            if event == "return":
                raise KeyboardInterrupt
            return interrupt
        return None

    if rank == 0:
        sys.settrace(interrupt)
    with contextlib.suppress(KeyboardInterrupt, RuntimeError):
        communicator.gather(torch.zeros(40), "u").wait()
    sys.settrace(None)
    communicator.break_off()
    communicator.lines._thread.join(AT_ONCE_S)
    assert not communicator.lines._thread.is_alive()


def test_an_interrupt_leaves_no_lock_behind_that_the_thread_waits_for():
    run_on_ranks(interrupted_where_it_locks, 2)
