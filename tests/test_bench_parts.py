"""The time of a step is split where it really went."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_fsdp.bench.parts import StepProfiler, Trace, split
from lightning_fsdp.core.torch_internals import all_gather_single
from tests.support.ranks import run_on_ranks

DELAY_S = 0.4
TOLERANCE_S = 0.15  # between a look at the clock here and one of the profiler's
NUM_STEPS = 4  # of which one is not disturbed just there, also on a busy machine
CPU = torch.device("cpu")


def total(parts):
    return parts.data_s + parts.compute_s + parts.exposed_s + parts.optimizer_s + parts.other_s


def test_exposed_time_counts_once_and_not_where_it_falls():
    phases = [("data", (0.0, 1.0)), ("compute", (1.0, 5.0)), ("optimizer", (5.0, 7.0))]
    trace = Trace(
        steps=[phases], communicating=[(0.5, 3.0), (4.0, 6.0)], blocked=[(2.0, 3.0), (4.5, 5.5)]
    )
    (parts,) = split(trace)
    assert parts.data_s == 1
    assert parts.compute_s == pytest.approx(4 - 1 - 0.5)
    assert parts.optimizer_s == pytest.approx(1.5)
    assert parts.exposed_s == pytest.approx(2)
    assert parts.overlapped_s == pytest.approx(1.5 + 1)
    assert parts.other_s == 0
    assert total(parts) == pytest.approx(parts.whole_s) == 7


def test_a_device_that_has_nothing_to_do_is_neither_computing_nor_communicating():
    trace = Trace(
        steps=[[("data", (0.0, 1.0)), ("compute", (1.0, 9.0))]],
        communicating=[(2.0, 6.0)], blocked=[(4.0, 6.0)], kernels=[(1.5, 4.0), (7.0, 8.0)],
    )  # fmt: skip
    (parts,) = split(trace)
    assert (parts.compute_s, parts.exposed_s, parts.overlapped_s) == (3.5, 2, 2)
    assert parts.other_s == pytest.approx(8 - 3.5 - 2)
    assert total(parts) == pytest.approx(parts.whole_s)


def test_what_nobody_saw_is_null_and_not_zero():
    steps = [[("data", (0.0, 1.0)), ("compute", (1.0, 9.0))]]
    (parts,) = split(Trace(steps=steps, communicating=None, blocked=[(2.0, 3.0)]))
    assert (parts.exposed_s, parts.overlapped_s) == (1, None)
    (parts,) = split(Trace(steps=steps, communicating=None, blocked=None))
    assert (parts.compute_s, parts.exposed_s, parts.other_s) == (None, None, None)
    assert (parts.data_s, parts.whole_s) == (1, 9)


def test_a_device_of_which_a_profiler_sees_nothing_is_null_and_not_idle():
    profiler = StepProfiler(CPU, world_size=1, waits_unseen=False)
    profiler.start()
    profiler.enter("compute")
    torch.ones(2).sum()
    profiler.end_step()
    profiler.stop()
    assert profiler.parts()[0].compute_s > 0
    profiler._device = torch.device("cuda")  # it has no events of one, as without permission
    (parts,) = profiler.parts()
    assert (parts.compute_s, parts.exposed_s, parts.other_s) == (None, None, None)


def _compute(seconds):
    matrix, start = torch.ones(300, 300), time.perf_counter()
    while time.perf_counter() - start < seconds:
        matrix @ matrix


def _collective(rank, kind):
    """Starts it and gives what to wait for."""
    mine, whole = torch.ones(1000), torch.zeros(2000)
    if kind == "gather":
        return [all_gather_single(whole, mine, async_op=True)]
    return [dist.irecv(whole[:1000], 1 - rank), dist.isend(mine, 1 - rank)]


def _late_partner(rank, world_size, kind, hides):
    """Rank 1 joins late; rank 0 waits for it at once, or computes for as long first.

    Returns the parts of each step, and when it began to communicate, began to wait, and went on.
    """
    moments = []
    dist.barrier()
    profiler = StepProfiler(CPU, world_size=world_size, waits_unseen=False)
    profiler.start()
    for _ in range(NUM_STEPS):
        profiler.enter("compute")
        if rank:
            time.sleep(DELAY_S)
        begins_s = time.monotonic()  # of the machine, so that processes can be compared
        works = _collective(rank, kind)
        if not rank and hides:
            _compute(1.25 * DELAY_S)
        waits_s = time.monotonic()
        for work in works:
            work.wait()
        moments.append((begins_s, waits_s, time.monotonic()))
        profiler.enter("optimizer")
        profiler.end_step()
        dist.barrier()
    profiler.stop()
    return profiler.parts(), moments


@pytest.mark.parametrize("kind", ["gather", "pairs"])
def test_waiting_is_exposed_and_computing_meanwhile_is_overlap(kind):
    for hides in (False, True):
        (steps, early), (_, late) = run_on_ranks(_late_partner, 2, kind, hides)
        assert all(total(parts) == pytest.approx(parts.whole_s) for parts in steps)
        as_it_was = []
        for parts, (begins_s, waits_s, goes_on_s), (joins_s, *_) in zip(
            steps, early, late, strict=True
        ):
            exposed_s, hidden_s = goes_on_s - waits_s, min(joins_s, waits_s) - begins_s
            as_it_was.append(
                (hidden_s if hides else exposed_s) > DELAY_S / 2
                and abs(parts.exposed_s - exposed_s) < TOLERANCE_S
                and abs(parts.overlapped_s - hidden_s) < 2 * TOLERANCE_S
                # Backward's wall time is not communication, nor the other way round.
                and (hides or parts.compute_s < TOLERANCE_S)
            )
        assert any(as_it_was), (steps, early, late)


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, seconds, moments):
        ctx.seconds, ctx.moments = seconds, moments
        return inputs.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        ctx.moments.append(time.monotonic())
        return grad, None, None


def _ddp_step(rank, world_size):
    model = DistributedDataParallel(nn.Linear(100, 100))
    steps = []
    for _ in range(1 + NUM_STEPS):  # the first one is slower in DDP
        moments = []
        dist.barrier()
        profiler = StepProfiler(CPU, world_size=world_size, waits_unseen=True)
        profiler.start()
        profiler.enter("compute")
        moments.append(time.monotonic())
        _Late.apply(model(torch.ones(4, 100)), DELAY_S * rank, moments).sum().backward()
        moments.append(time.monotonic())
        profiler.enter("optimizer")
        profiler.end_step()
        profiler.stop()
        steps.append((*profiler.parts(), moments))
    return steps[1:]


def _is_as_it_was(parts, moments):
    begins_s, computed_s, ends_s = moments
    return (
        abs(parts.exposed_s - (ends_s - computed_s)) < TOLERANCE_S
        and abs(parts.compute_s - (computed_s - begins_s)) < TOLERANCE_S
    )


def test_what_ddp_waits_for_is_exposed_though_it_waits_in_cpp():
    steps = list(zip(*run_on_ranks(_ddp_step, 2), strict=True))
    as_it_was = [
        min(early[0].exposed_s, late[0].compute_s) > DELAY_S / 2
        and _is_as_it_was(*early)
        and _is_as_it_was(*late)
        for early, late in steps
    ]
    assert any(as_it_was), steps


def _alone(rank, world_size):
    wait = dist.Work.wait
    profiler = StepProfiler(CPU, world_size=world_size, waits_unseen=False)
    profiler.start()
    profiler.enter("compute")
    all_gather_single(torch.zeros(1000), torch.ones(1000))
    dist.all_reduce(torch.ones(1000))
    profiler.enter("optimizer")
    profiler.end_step()
    profiler.stop()
    return profiler.parts(), wait is dist.Work.wait


def test_one_rank_communicates_nothing_whatever_it_calls():
    ((parts,), is_torchs) = run_on_ranks(_alone, 1)[0]
    assert (parts.exposed_s, parts.overlapped_s) == (0, 0)
    assert total(parts) == pytest.approx(parts.whole_s)
    assert is_torchs, "torch's own wait is back"
