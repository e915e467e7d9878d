"""Gradients that are reduced from where autograd left them: how a region is cut, and the values."""

import itertools

import pytest
import torch

from lightning_fsdp import ZERO2, shard_model
from lightning_fsdp.core import local_gradients
from lightning_fsdp.core.layout import plan_segment
from lightning_fsdp.core.local_gradients import LocalGradients
from lightning_fsdp.core.sharded_module import hooks_of
from tests.support.memory import StorageTracker
from tests.support.models import TASKS, mlp_batch
from tests.support.one_exchange import train_on_rank
from tests.support.parity import (
    OPTIMIZERS,
    assert_ranks_agree,
    assert_traces_match,
    make_batches,
    train_reference,
)
from tests.support.ranks import run_on_ranks

# Every parameter alone; weights alone and the small ones between them together; all together.
CUTS = [1, 40, 10**9]
NUM_MICRO_BATCHES = 3
STEPS = {"num_steps": 2, "num_micro_batches": NUM_MICRO_BATCHES}


def _optional_batch(step, micro_batch, rank):
    """``bonus`` is used by one rank in one micro-batch, and in the second step by nobody."""
    return {
        **mlp_batch(step, micro_batch, rank),
        "use_bonus": step == 0 and (micro_batch, rank) == (1, 0),
    }


def _optional_loss(model, batch):
    outputs = model(batch["inputs"], batch["use_bonus"])
    return 0.25 * torch.nn.functional.mse_loss(outputs, batch["targets"])


def _train_in_every_cut(rank, world_size, task_name):
    task = TASKS[task_name]
    loss = _optional_loss if task_name == "mlp" else task.loss
    batches = make_batches(
        _optional_batch if task_name == "mlp" else task.make_batch, world_size=world_size, **STEPS
    )
    traces = {}
    for cut, accumulation in itertools.product(CUTS, ["local", "sum"]):
        local_gradients._LARGE_NUMEL = cut  # this process is the rank's own
        model = shard_model(task.build())
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        traces[cut, accumulation] = train_on_rank(
            model, batches, loss, optimizer, rank, accumulation=accumulation
        )
    return traces


@pytest.mark.parametrize("task_name", ["mlp", "tied_lm"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_cut_trains_alike(world_size, task_name):
    task = TASKS[task_name]
    by_rank = run_on_ranks(_train_in_every_cut, world_size, task_name)
    make_batch = _optional_batch if task_name == "mlp" else task.make_batch
    loss = _optional_loss if task_name == "mlp" else task.loss
    expected = train_reference(
        task.build(),
        make_batches(make_batch, world_size=world_size, **STEPS),
        loss,
        OPTIMIZERS["adamw"],
        joined=task_name != "mlp",
    )
    for key in itertools.product(CUTS, ["local", "sum"]):
        traces = [each[key] for each in by_rank]
        assert_ranks_agree(traces, str(key))
        assert_traces_match(traces[0], expected, atol=task.atol, what=str(key))


def _keep_gradients(rank, world_size):
    """Memory of large gradients: what autograd made is what is sent, and what is kept unreduced."""
    local_gradients._LARGE_NUMEL = 40
    model = shard_model(TASKS["mlp"].build())
    made = []
    original = local_gradients.LocalGradients.add

    def watch(self, index, gradient):
        made.append((gradient.numel(), gradient.data_ptr()))
        original(self, index, gradient)

    local_gradients.LocalGradients.add = watch
    with model.no_sync():
        TASKS["mlp"].loss(model, mlp_batch(0, 0, rank)).backward()
    memories = [p.grad.memory for p in model.parameters() if p.grad is not None]
    kept = [(memory.numel(), memory.data_ptr()) for memory in memories]
    local_gradients.LocalGradients.add = original
    return made, kept


def test_a_large_gradient_is_kept_where_autograd_made_it():
    for made, kept in run_on_ranks(_keep_gradients, 2):
        large = [each for each in made if each[0] >= 40]
        assert len(large) == 3  # 7 x 15, 15 x 15, 15 x 3
        assert set(large) <= set(kept)


def _transposed(rank, world_size):
    """A gradient that is laid out differently is not taken for one that fills its run."""
    local_gradients._LARGE_NUMEL = 1
    model = shard_model(torch.nn.Linear(6, 4, bias=False))
    (unit,) = hooks_of(model).schedule.units
    (segment,) = unit.segments
    gradient = torch.arange(24.0).view(6, 4).t()
    segment._local_gradients.add(0, gradient)
    (piece,), arrived = segment._local_gradients.take(torch.float32)
    assert arrived == [True]
    assert torch.equal(piece.data.view(4, 6), gradient)


def test_a_gradient_of_another_layout_is_copied():
    run_on_ranks(_transposed, 2)


def _write_between(rank, world_size):
    """ZeRO-2: the head keeps the copy that the embedding finds stale. Both compute with the new."""
    model, reference = shard_model(TASKS["tied_lm"].build(), ZERO2), TASKS["tied_lm"].build()
    for factor in (1.0, 3.0):
        with torch.no_grad():
            model.embedding.weight.mul_(factor)
            reference.embedding.weight.mul_(factor)
        batch = TASKS["tied_lm"].make_batch(0, 0, 0)
        loss, expected = (TASKS["tied_lm"].loss(each, batch) for each in (model, reference))
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
        loss.backward()


def test_a_shared_copy_that_is_stale_is_gathered_anew_while_another_unit_holds_it():
    run_on_ranks(_write_between, 2)


def _collect_one_flat_run(reduce_dtype):
    """Bytes alive as gradients of a flat region arrive, and at its hand-over."""
    layout = plan_segment([("w", (64, 64)), ("v", (64, 32)), ("b", (64,))], shard_world_size=2)
    gradients = LocalGradients(
        layout, [None] * 3, reduce_dtype, torch.device("cpu"), in_pieces=False
    )
    with StorageTracker() as tracker:
        bytes_alive = []
        for index, slot in enumerate(layout.slots):
            gradients.add(index, torch.ones(slot.shape, dtype=torch.bfloat16).mul_(index + 1))
            bytes_alive.append(tracker.live_bytes())
        (piece,), arrived = gradients.take(reduce_dtype)
        bytes_alive.append(tracker.live_bytes())
    return layout, piece.data, arrived, bytes_alive


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_a_flat_run_gets_its_memory_at_the_hand_over_and_gradients_lose_theirs(reduce_dtype):
    layout, region, arrived, bytes_alive = _collect_one_flat_run(reduce_dtype)
    sizes = [2 * slot.numel for slot in layout.slots]
    assert bytes_alive == [*itertools.accumulate(sizes), layout.numel * reduce_dtype.itemsize]
    assert arrived == [True] * 3
    expected = torch.zeros(layout.numel, dtype=reduce_dtype)
    for index, slot in enumerate(layout.slots):
        expected[slot.offset : slot.offset + slot.numel] = index + 1
    assert torch.equal(region, expected)


def test_a_second_gradient_is_added_in_the_reduction_dtype():
    layout = plan_segment([("w", (4, 8)), ("b", (8,))], shard_world_size=2)
    gradients = LocalGradients(
        layout, [None] * 2, torch.float32, torch.device("cpu"), in_pieces=False
    )
    for value in (1.0, 2**-9):  # their sum has no bfloat16
        gradients.add(0, torch.full((4, 8), value, dtype=torch.bfloat16))
    (piece,), arrived = gradients.take(torch.float32)
    assert arrived == [True, False]
    assert torch.equal(piece.data[:32], torch.full((32,), 1 + 2**-9))
    assert not piece.data[32:].any()


def test_gradients_added_up_for_a_narrow_transfer_are_rounded_once():
    layout = plan_segment([("w", (4, 8))], shard_world_size=2)
    gradients = LocalGradients(layout, [None], torch.float32, torch.device("cpu"), in_pieces=False)
    for value in (1.0, 2**-8, 2**-8):  # 1 + 2**-8 has no bfloat16, the sum of all has one
        gradients.add(0, torch.full((4, 8), value, dtype=torch.bfloat16))
    (piece,), _ = gradients.take(torch.bfloat16)
    assert torch.equal(piece.data, torch.full((32,), 1 + 2**-7, dtype=torch.bfloat16))
