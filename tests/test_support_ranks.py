"""The rank runner itself: results, errors, hangs, crashes, and nothing left behind."""

import os
import random
import signal
import time
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.processes import run_snippet
from tests.support.ranks import (
    PLAIN,
    RankError,
    RanksFailed,
    errors_on_ranks,
    kept_pids,
    kept_ranks,
    run_on_ranks,
)


def _sum_of_ranks(rank, world_size, start):
    tensor = torch.tensor([float(rank + start)])
    dist.all_reduce(tensor)
    return tensor, torch.get_num_threads()


def _raise_on_one(rank, world_size, bad):
    if rank == bad:
        raise ValueError(f"rank {rank} says no")
    dist.all_reduce(torch.zeros(1))


def _raise_on_all(rank, world_size):
    raise KeyError(f"rank {rank}")


def _hang(rank, world_size):
    if rank == 1:
        time.sleep(600)


def _crash(rank, world_size):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.all_reduce(torch.zeros(1))


def _environment(rank, world_size):
    return os.environ.get("SOME_FLAG"), dist.is_initialized()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_returns_its_value(world_size):
    expected = torch.tensor([float(sum(range(world_size)) + 2 * world_size)])
    results = run_on_ranks(_sum_of_ranks, world_size, 2)
    assert results == [(expected, 1)] * world_size


def test_an_error_on_one_rank_shows_all_ranks():
    start = time.monotonic()
    with pytest.raises(
        RanksFailed, match=r"(?s)rank 0: error.*rank 0 says no.*rank 1: hung.*all_reduce"
    ):
        run_on_ranks(_raise_on_one, 2, 0)
    assert time.monotonic() - start < 30


def test_expected_errors_come_back_by_rank():
    expected = [RankError("KeyError", "'rank 0'"), RankError("KeyError", "'rank 1'")]
    assert errors_on_ranks(_raise_on_all, 2) == expected
    assert errors_on_ranks(_sum_of_ranks, 2, 0) == [None, None]


def test_a_hang_beside_an_expected_error_fails():
    with kept_ranks():
        run_on_ranks(_sum_of_ranks, 2, 0)  # starts them, for which a busy machine takes its time
        with pytest.raises(RanksFailed, match=r"(?s)rank 0: hung.*rank 1: error"):
            errors_on_ranks(_raise_on_one, 2, 1, timeout_s=3.0)


def test_a_rank_that_hangs_shows_its_stack():
    with kept_ranks():
        run_on_ranks(_sum_of_ranks, 2, 0)
        with pytest.raises(RanksFailed, match=r"(?s)rank 0: done.*rank 1: hung.*in _hang"):
            run_on_ranks(_hang, 2, timeout_s=3.0)


def test_a_rank_that_crashes_is_named():
    with pytest.raises(RanksFailed, match=r"(?s)rank 0: died.*SIGSEGV.*in _crash"):
        run_on_ranks(_crash, 2)


def test_a_rank_gets_environment_variables_and_may_go_without_a_group():
    assert run_on_ranks(_environment, 1, backend=None, env={"SOME_FLAG": "x"}) == [("x", False)]


def test_a_snippet_reports_its_exit_and_is_killed_when_late():
    result = run_snippet("print('out'); raise SystemExit(3)")
    assert (result.returncode, result.stdout) == (3, "out\n")
    with pytest.raises(RanksFailed, match="ran past"):
        run_snippet("import time; time.sleep(60)", timeout_s=1.0)


# --- ranks that stay ---


def _look_and_change(rank, world_size):
    """Who runs this and what is found; then changes what a next call must not see."""
    drawn = torch.rand(1).item(), np.random.rand(), random.random()
    found = os.environ.get("SOME_FLAG"), len(warnings.filters), torch.get_default_dtype(), drawn
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    os.environ["SOME_FLAG"] = "left behind"
    total = torch.tensor([1])
    dist.all_reduce(total)
    return os.getpid(), dist.get_backend(), int(total), found


def test_ranks_that_stay_run_each_call_in_a_group_of_its_own_and_find_no_traces():
    first = run_on_ranks(_look_and_change, 2)
    assert first[0][3][3][0] == torch.rand(1, generator=torch.Generator().manual_seed(1)).item()
    with kept_ranks():
        calls = [
            run_on_ranks(_look_and_change, world_size, backend=backend)
            for world_size, backend in ((2, "gloo"), (3, "gloo"), (1, PLAIN), (2, "late"))
        ]
        pids = [[pid for pid, *_ in call] for call in calls]
        assert pids[0] == pids[1][:2] == pids[3]
        assert pids[2] == pids[0][:1]
        assert set(pids[1]) == kept_pids()
        assert [call[0][1:3] for call in calls] == [
            *(("gloo", 2), ("gloo", 3), (PLAIN, 1), ("late", 2)),
        ]
        for call in calls:
            assert [rank[3] for rank in call] == [first[0][3]] * len(call)
    assert kept_pids() == set()


def test_after_a_failure_other_ranks_are_started():
    with kept_ranks():
        ((pid, *_),) = run_on_ranks(_look_and_change, 1)
        with pytest.raises(RanksFailed, match="rank 0 says no"):
            run_on_ranks(_raise_on_one, 1, 0)
        assert kept_pids() == set()
        assert run_on_ranks(_look_and_change, 1)[0][0] != pid
        assert errors_on_ranks(_raise_on_all, 2) == [
            RankError("KeyError", f"'rank {rank}'") for rank in range(2)
        ]


def test_ranks_of_another_environment_do_not_stay():
    with kept_ranks():
        assert run_on_ranks(_environment, 1, env={"SOME_FLAG": "1"}) == [("1", True)]
        assert run_on_ranks(_environment, 1) == [(None, True)]


def test_collectives_nobody_waited_for_fail_on_ranks_that_stay():
    with kept_ranks():
        run_on_ranks(_look_and_change, 1, backend="late")
        with pytest.raises(RanksFailed, match="never waited for"):
            run_on_ranks(_start_only, 1, backend="late")


def _start_only(rank, world_size):
    dist.all_reduce(torch.zeros(1), async_op=True)
