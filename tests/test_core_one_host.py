"""Ranks of one host that read each other's memory: the bits of the pairs, whatever each rank waits
for and whenever; every end of a rank is noticed by the others, and leaves nothing behind.
"""

import contextlib
import copy
import random
import time

import pytest
import torch
import torch.distributed as dist

from lightning_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, shard_model
from lightning_fsdp.core.engine.communicator import LocalRegion
from lightning_fsdp.core.engine.layout import plan_layout
from lightning_fsdp.core.ranks import lines, one_host, pairs, process_memory
from lightning_fsdp.core.ranks.groups import communicator_of
from tests.support import ranks
from tests.support.models import TASKS
from tests.support.one_exchange import train_on_rank
from tests.support.one_host import (
    BF16,
    FP16,
    FP32,
    SHARD_NUMEL,
    connected,
    empty,
    new_mesh,
)
from tests.support.parity import OPTIMIZERS, PLANS, assert_traces_match, batches_for
from tests.support.programs.drawing import draw_program
from tests.support.programs.running import NotAProgram, run_program
from tests.support.ranks import run_on_ranks
from tests.support.worst_case import poison

pytestmark = pytest.mark.skipif(
    ranks.active_transport == ranks.PAIRS, reason="what is tested is switched off"
)


@contextlib.contextmanager
def only_in_pairs():
    lines_of = one_host.Lines
    one_host.Lines = refuse
    yield
    one_host.Lines = lines_of


def refuse(group):
    raise lines.Refused("a test says so")


# --- the same bits ---


def train(rank, world_size, shape, task_name, plan, build, options, accumulation):
    mesh, task = new_mesh(*shape), TASKS[task_name]
    torch.manual_seed(0)
    model = shard_model(build(task), PLANS[plan], mesh=mesh, **options)
    if build is copied_later:
        model = copy.deepcopy(model)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    batches = batches_for(task_name, world_size)
    trace = train_on_rank(model, batches, task.loss, optimizer, rank, accumulation=accumulation)
    return communicator_of(mesh).lines is not None, trace


def built(task):
    return task.build()


def copied_later(task):
    return task.build()


def on_meta(task):
    with torch.device("meta"):
        return task.build()


def dtypes(param_dtype, reduce_dtype=None):
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, output_dtype=FP32
    )
    return {"mp_policy": policy}


OFFLOAD = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
CASES = {  # task, plan, how it is built, options, accumulation
    "fp32": ("tied_lm", "zero3", built, {}, "sum"),
    "zero2": ("tied_lm", "zero2", built, {}, "local"),
    "bf16 summed in fp32": ("lm", "zero3", built, dtypes(BF16, FP32), "sum"),
    "bf16 added up": ("lm", "zero3", built, dtypes(BF16, FP32), "local"),
    "bf16": ("mlp", "zero2", built, dtypes(BF16), "sum"),
    "fp16": ("mlp", "zero3", built, dtypes(FP16, FP16), "sum"),
    "from the meta device": ("lm", "zero3", on_meta, {}, "sum"),
    "a deepcopy": ("tied_lm", "zero3", copied_later, {}, "local"),
    "offloaded": ("mlp", "zero3", built, OFFLOAD, "sum"),
}


OF_SHAPE = {
    (2,): list(CASES),
    # The order of sums shows from 3 ranks on: what is rounded.
    (3,): ["bf16 added up", "fp16"],
    (4,): ["bf16 summed in fp32"],
    # Where replicas change what is made of a mean.
    (2, 2): ["zero2", "bf16", "offloaded"],
}


def train_all_on_both_roads(rank, world_size, shape):
    pairs._LARGE_NUMEL, one_host._BLOCK_NUMEL = 40, 100  # several pieces and blocks per shard
    for name in OF_SHAPE[shape]:
        case = CASES[name]
        reads_memory, trace = train(rank, world_size, shape, *case)
        assert reads_memory
        with only_in_pairs():
            reads_memory, expected = train(rank, world_size, shape, *case)
        assert not reads_memory
        assert_traces_match(trace, expected, atol=0, what=name)


@pytest.mark.parametrize("shape", OF_SHAPE)
def test_training_gives_the_bits_of_the_pairs(shape):
    run_on_ranks(train_all_on_both_roads, torch.Size(shape).numel(), shape, timeout_s=200.0)


# --- what was posted stays until it was read ---


def sleep_at_random(rank, longest_s=0.004):
    """Put a pause of its own before every step of the exchange on this rank."""
    drawn = random.Random(rank)

    def paused(function):
        def after_a_pause(*args, **kwargs):
            time.sleep(drawn.choice((0.0, 0.0, drawn.random() * longest_s)))
            return function(*args, **kwargs)

        return after_a_pause

    for name in ("start", "_wait", "_send", "_receive", "_take", "_lose"):
        setattr(lines.Lines, name, paused(getattr(lines.Lines, name)))
    lines._listed_in = paused(lines._listed_in)
    process_memory.Stretch.read = paused(process_memory.Stretch.read)


def overwrite_as_soon_as_permitted(rank, world_size):
    """Memory that was waited for is poisoned at once, as a core that frees it would."""
    sleep_at_random(rank)
    one_host._BLOCK_NUMEL = 300
    communicator = connected(dist.group.WORLD)
    layout = plan_layout([("a", (7, 90)), ("b", (SHARD_NUMEL * world_size - 720,))], world_size)
    whole, before = torch.empty(layout.numel), None
    for number in range(30):
        poison(whole)
        start, stop = layout.shard_range(rank)
        whole[start:stop] = 10 * number + rank
        gather = communicator.gather(whole, "u")
        gradients = {
            index: torch.full(slot.shape, float(10 * number + rank))
            for index, slot in enumerate(layout.slots)
        }
        sent = list(gradients.values())
        reduction = communicator.reduce(LocalRegion(gradients, layout, "u", empty, FP32, FP32))
        if before is not None:  # of the last round: it lands when the next one is under way
            _check_mean(before, number - 1, layout, rank)
        gathered = gather.wait().view(world_size, -1)
        assert [set(row.tolist()) for row in gathered] == [
            {10.0 * number + peer} for peer in range(world_size)
        ]
        poison(whole)
        before = reduction, sent
    _check_mean(before, number, layout, rank)


def _check_mean(started, number, layout, rank):
    reduction, sent = started
    mean = reduction.wait()
    for gradient in sent:
        poison(gradient)
    expected = torch.zeros(layout.numel)
    for slot in layout.slots:
        expected[slot.offset : slot.offset + slot.numel] = (
            10 * number + (dist.get_world_size() - 1) / 2
        )
    assert torch.equal(mean, expected[slice(*layout.shard_range(rank))])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_what_was_posted_stays_until_every_peer_has_read_it(world_size):
    run_on_ranks(overwrite_as_soon_as_permitted, world_size)


def drop_a_reduction(rank, world_size):
    """As an interrupt does: rank 0 forgets it, and other values get what is freed."""
    communicator = connected(dist.new_group())
    take = lines.Lines._take
    if rank == 1:
        lines.Lines._take = lambda *args: (time.sleep(0.5), take(*args))
    numel = 20 * SHARD_NUMEL
    layout = plan_layout([("a", (numel,)), ("b", (numel,))], world_size)  # one in each shard
    gradients = {index: torch.full((numel,), float(rank)) for index in range(2)}
    reduction = communicator.reduce(LocalRegion(gradients, layout, "u", empty, FP32, FP32))
    if rank == 0:
        del reduction
        for _ in range(20):
            poison(torch.empty(numel))
    else:
        assert set(reduction.wait().tolist()) == {0.5}
    dist.barrier()


def test_gradients_stay_until_they_are_read_though_nobody_waits_for_their_reduction():
    run_on_ranks(drop_a_reduction, 2)


def run_programs_with_pauses(rank, world_size, first):
    sleep_at_random(rank, longest_s=0.001)
    for seed in range(first, first + 3):
        with contextlib.suppress(NotAProgram):
            run_program(rank, world_size, draw_program(seed))


@pytest.mark.parametrize(("world_size", "first"), [(2, 0), (3, 5), (4, 10)])
def test_programs_train_as_in_plain_torch_wherever_ranks_pause(world_size, first):
    run_on_ranks(run_programs_with_pauses, world_size, first, timeout_s=200.0)
