"""Gradients that are reduced from where autograd left them: how a region is cut, and the values."""

import itertools
from unittest import mock

import pytest
import torch

from lightning_fsdp import ZERO2, MixedPrecisionPolicy, shard_model
from lightning_fsdp.core.engine.communicator import LocalRegion
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.hooks import hooks_of
from lightning_fsdp.core.engine.layout import plan_layout
from lightning_fsdp.core.engine.watcher import Runner
from lightning_fsdp.core.ranks import pairs
from tests.support.memory import StorageTracker
from tests.support.models import TASKS, mlp_batch
from tests.support.one_exchange import train_on_rank
from tests.support.parity import (
    OPTIMIZERS,
    assert_ranks_agree,
    assert_traces_match,
    make_batches,
    optional_loss,
    train_reference,
)
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

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


def _train_in_every_cut(rank, world_size, task_name):
    task = TASKS[task_name]
    loss = optional_loss if task_name == "mlp" else task.loss
    batches = make_batches(
        _optional_batch if task_name == "mlp" else task.make_batch, world_size=world_size, **STEPS
    )
    traces = {}
    for cut, accumulation in itertools.product(CUTS, ["local", "sum"]):
        with mock.patch.object(pairs, "_LARGE_NUMEL", cut):
            model = shard_model(task.build())
            optimizer = OPTIMIZERS["adamw"](model.parameters())
            traces[cut, accumulation] = train_on_rank(
                model, batches, loss, optimizer, rank, accumulation=accumulation
            )
    return traces


@pytest.mark.parametrize(("world_size", "task_name"), [(2, "mlp"), (3, "tied_lm"), (4, "mlp")])
def test_every_cut_trains_alike(world_size, task_name):
    task = TASKS[task_name]
    by_rank = run_on_ranks(_train_in_every_cut, world_size, task_name)
    make_batch = _optional_batch if task_name == "mlp" else task.make_batch
    loss = optional_loss if task_name == "mlp" else task.loss
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


@mock.patch.object(pairs, "_LARGE_NUMEL", 40)
def _see_memory(rank, world_size):
    """Which gradients are kept unreduced, and which are sent, from where autograd made them."""
    model = shard_model(TASKS["mlp"].build())
    receive, cut = FlatParameter.receive, pairs.PairCommunicator._cut
    made, sent = {}, set()

    def watch(self, slot, gradient):
        made[self.parameters[slot]] = gradient
        receive(self, slot, gradient)

    def watch_sends(self, *args):
        keeps, mine, to = cut(self, *args)
        sent.update(part.untyped_storage().data_ptr() for part in to[1 - self.rank])
        return keeps, mine, to

    with (
        mock.patch.object(FlatParameter, "receive", watch),
        mock.patch.object(pairs.PairCommunicator, "_cut", watch_sends),
    ):
        with model.no_sync():
            TASKS["mlp"].loss(model, mlp_batch(0, 0, rank)).backward()
        kept = [p.grad.own.data_ptr() == gradient.data_ptr() for p, gradient in made.items()]
        model.zero_grad()
        TASKS["mlp"].loss(model, mlp_batch(0, 0, rank)).backward()
    return kept, {g.numel() for g in made.values() if g.untyped_storage().data_ptr() in sent}


def test_gradients_are_kept_and_large_ones_sent_from_where_autograd_made_them():
    by_rank = run_on_ranks(_see_memory, 2)
    for kept, _ in by_rank:
        assert kept == [True] * len(kept)
    sent = set.union(*(sent for _, sent in by_rank))
    assert {7 * 15, 15 * 15, 15 * 3} <= sent


def _pack(layout, gradients, dtype):
    region = LocalRegion(
        gradients, layout, "u", lambda numel, dtype: torch.empty(numel, dtype=dtype), dtype, dtype
    )
    return region.pack()


def test_a_gradient_of_another_layout_is_copied():
    layout = plan_layout([("w", (4, 6))], shard_world_size=1)
    gradient = torch.arange(24.0).view(6, 4).t()
    packed = _pack(layout, {0: gradient}, torch.float32)
    assert torch.equal(packed.view(4, 6), gradient)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_lose_their_memory_when_they_are_packed(dtype):
    layout = plan_layout([("w", (64, 64)), ("v", (64, 32)), ("b", (64,))], shard_world_size=2)
    expected = torch.zeros(layout.numel, dtype=dtype)
    for index, slot in enumerate(layout.slots):
        expected[slot.offset : slot.offset + slot.numel] = index + 1
    bytes_alive = []
    with StorageTracker() as tracker:
        gradients = {
            index: torch.full(slot.shape, index + 1, dtype=torch.bfloat16)
            for index, slot in enumerate(layout.slots)
        }
        tracker.at_each_operation = lambda: bytes_alive.append(tracker.live_bytes())
        region = _pack(layout, gradients, dtype)
        assert tracker.live_bytes() == region.nbytes
    assert torch.equal(region, expected)
    padding = (layout.numel - sum(slot.numel for slot in layout.slots)) * dtype.itemsize
    made = sum(2 * slot.numel for slot in layout.slots)
    assert max(bytes_alive) == region.nbytes + made + padding


def _add_up(rank, world_size, values):
    """The sum of gradients in bfloat16 of one parameter, which arrive in one backward."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard_model(torch.nn.Linear(8, 4, bias=False), mp_policy=policy)
    (unit,) = hooks_of(model).schedule.units
    (flat_param,) = unit.flat_params
    flat_param.runners.latest = Runner  # no backward runs
    for value in values:
        flat_param.receive(0, torch.full((4, 8), value, dtype=torch.bfloat16))
    assert flat_param.gradients == "local"
    return flat_param._take_local()[0]


def test_a_second_gradient_is_added_in_the_reduction_dtype():
    (total,) = run_on_ranks(_add_up, 1, (1.0, 2**-9))  # their sum has no bfloat16
    assert torch.equal(total, torch.full((4, 8), 1 + 2**-9))


def test_gradients_added_up_for_a_narrow_transfer_are_rounded_once():
    (total,) = run_on_ranks(_add_up, 1, (1.0, 2**-8, 2**-8))  # 1 + 2**-8 has none, the sum has one
    layout = plan_layout([("w", (4, 8))], shard_world_size=1)
    packed = _pack(layout, {0: total}, torch.bfloat16)
    assert torch.equal(packed, torch.full((32,), 1 + 2**-7, dtype=torch.bfloat16))
