"""Optimizer state over all ranks of a 2-D mesh, weights within a row: training equals one process.

2 x 2    ranks 0, 1 and ranks 2, 3 are hosts; each rank has a fourth of the optimizer's state,
         and keeps half of the weights
"""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from lightning_fsdp import (
    full_optimizer_state_dict,
    full_state_dict,
    fully_shard,
    gradients,
    load_full_optimizer_state_dict,
    shard_model,
)
from lightning_fsdp.core.sharded_module import units_in
from tests.support import parity
from tests.support.counting import CollectiveCounter
from tests.support.memory import StorageTracker, bytes_of, optimizer_tensors
from tests.support.models import TASKS, causal_lm, lm_loss, mlp, tied_lm, token_batch
from tests.support.one_exchange import train_on_rank
from tests.support.optimizers import Normed
from tests.support.parity import (
    PLANS,
    assert_losses_match,
    assert_ranks_agree,
    assert_same_tensors,
    assert_traces_match,
    batches_for,
    make_batches,
    optional_batch,
    optional_loss,
    train_reference,
)
from tests.support.ranks import PLAIN, run_on_ranks
from tests.support.replicas import flat_params_of, mesh_of
from tests.test_core_checkpoint import Oddities
from tests.test_core_narrow_reduction import (
    POLICIES,
    full_gradients,
    local_gradients_by_hand,
    mean_by_hand,
)

pytestmark = pytest.mark.usefixtures("kept_ranks")

# Every two of a plan, an optimizer and a way to accumulate.
COMBINATIONS = [
    ("zero2", "sgd", "local"),
    ("zero2", "adamw", "replica"),
    ("zero3", "adamw", "local"),
    ("zero3", "whole tensors", "replica"),
]
OPTIMIZERS = {**parity.OPTIMIZERS, "whole tensors": Normed}
CLIP = (0.1, 2.0)


def over_hosts(model, plan="zero3", shape=(2, 2), **options):
    return shard_model(model, PLANS[plan], mesh=mesh_of(shape), state_over="all", **options)


# --- parity ---


def _batches(task_name, world_size):
    return batches_for(task_name, world_size, num_steps=2, num_micro_batches=3)


def _train_all_combinations(rank, world_size, task_name, shape):
    task, traces = TASKS[task_name], {}
    for plan, optimizer, accumulation in COMBINATIONS:
        model = over_hosts(task.build(), plan, shape)
        traces[plan, optimizer, accumulation] = train_on_rank(
            model,
            _batches(task_name, world_size),
            task.loss,
            OPTIMIZERS[optimizer](model.parameters()),
            rank,
            accumulation=accumulation,
            clip=CLIP,
        )
    return traces


@pytest.mark.parametrize(
    ("task_name", "shape", "backend"),
    [("tied_lm", (2, 2), "gloo"), ("mlp", (3, 1), PLAIN)],
)
def test_training_equals_one_process_on_the_joined_batch(task_name, shape, backend):
    task, world_size = TASKS[task_name], shape[0] * shape[1]
    by_rank = run_on_ranks(_train_all_combinations, world_size, task_name, shape, backend=backend)
    for combination in COMBINATIONS:
        expected = train_reference(
            task.build(),
            _batches(task_name, world_size),
            task.loss,
            OPTIMIZERS[combination[1]],
            clip=CLIP,
        )
        traces = [traces[combination] for traces in by_rank]
        assert_ranks_agree(traces, str(combination))
        assert_traces_match(traces[0], expected, atol=task.atol, what=str(combination))
        assert_losses_match(traces, expected, atol=task.atol)


# By step: the ranks that use ``bonus``; in one host, in the other, in none, in both.
USERS = [{1}, {2}, set(), {0, 1, 2, 3}]


def _optional_batches():
    return make_batches(optional_batch(USERS), num_steps=4, num_micro_batches=1, world_size=4)


def _train_with_optional_parameter(rank, world_size):
    model = over_hosts(mlp())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    return train_on_rank(model, _optional_batches(), optional_loss, optimizer, rank)


def test_a_parameter_may_be_unused_in_a_host_or_by_all():
    traces = run_on_ranks(_train_with_optional_parameter, 4)
    expected = train_reference(
        mlp(), _optional_batches(), optional_loss, OPTIMIZERS["adamw"], joined=False
    )
    assert [g["bonus"] is None for g in expected.gradients] == [False, False, True, False]
    assert_ranks_agree(traces)
    assert_traces_match(traces[0], expected, atol=1e-7)


def _in_bf16(rank, world_size, plan):
    """Gradients of a backward, of three that add up in both ways, and the weights of gathers."""
    model, found = over_hosts(causal_lm(), plan, mp_policy=POLICIES["fp32"]), []
    for num, within_host in ((1, False), (3, True), (3, False)):
        for micro_batch in range(num):
            is_last = micro_batch == num - 1
            model.set_requires_all_reduce(is_last or not within_host)
            model.set_requires_gradient_sync(is_last or within_host)
            lm_loss(model, token_batch(0, micro_batch, rank)).backward()
        found.append(full_gradients(model))
        model.zero_grad()
    access = gradients(model)
    lm_loss(model, token_batch(0, 0, rank)).backward()
    pieces = [(name, access[name].shard, model.get_parameter(name).spec.slice) for name in access]
    return found, pieces


@pytest.mark.parametrize("plan", PLANS)
def test_bf16_gradients_are_summed_in_fp32(plan):
    by_hand = [[local_gradients_by_hand(rank, m) for rank in range(4)] for m in range(3)]
    names = list(by_hand[0][0])
    means = [{n: mean_by_hand([each[n] for each in of_m]) for n in names} for of_m in by_hand]
    sums = {n: sum(mean[n] for mean in means) for n in names}
    for found, pieces in run_on_ranks(_in_bf16, 4, plan):
        # Means of means of two are rounded elsewhere, by bits of fp32.
        for ours, theirs in zip(found, (means[0], sums, sums), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
        for name, shard, piece in pieces:
            expected = means[0][name].view(-1)[piece.start : piece.stop]
            torch.testing.assert_close(shard, expected, rtol=1e-5, atol=1e-7)


# --- what moves, what is held ---


def _count(rank, world_size, plan, policy):
    """Per step and micro-batch: gathers and reductions of the row, and those of the column."""
    mesh, task, counts = mesh_of((2, 2)), TASKS["lm"], []
    model = shard_model(task.build(), PLANS[plan], mesh=mesh, state_over="all", mp_policy=policy)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for step in range(3):
        for micro_batch in range(2):
            model.set_requires_all_reduce(micro_batch == 1)
            with (
                CollectiveCounter(mesh.get_group(1)) as row,
                CollectiveCounter(mesh.get_group(0)) as column,
            ):
                task.loss(model, task.make_batch(step, micro_batch, rank)).backward()
            calls = [(of.num_gathers(2), of.num_reductions(2)) for of in (row, column)]
            counts.append((*calls, (column.gathered_bytes(2), column.reduced_bytes(2))))
        optimizer.step()
        optimizer.zero_grad()
    return counts, len(units_in(model)), sum(f.layout.numel for f in flat_params_of(model))


@pytest.mark.parametrize(
    ("plan", "backend", "policy", "itemsize"),
    [
        ("zero3", "gloo", None, 4),
        ("zero2", PLAIN, None, 4),
        ("zero3", PLAIN, POLICIES["fp32"], 2),  # bf16 weights, fp32 sums
    ],
)
def test_hosts_exchange_each_shard_twice_per_step_and_nothing_else(plan, backend, policy, itemsize):
    for counts, num_units, numel in run_on_ranks(_count, 4, plan, policy, backend=backend):
        for index, (row, column, moved) in enumerate(counts):
            # The embedding's backward reads no weight, and the head is kept after a first step.
            again = num_units - 1 - (index > 0) if plan == "zero3" else 0
            first = num_units if plan == "zero3" or index % 2 == 0 else 0
            assert row == (first + again, num_units)
            is_first, is_last = index % 2 == 0, index % 2 == 1
            assert column == (num_units * is_first, num_units * is_last)
            part = numel / 2 / 2  # of what a rank keeps, the other host has a half
            assert moved == (itemsize * part * is_first, 4 * part * is_last)


def _count_frozen(rank, world_size):
    model, mesh = mlp().requires_grad_(False), mesh_of((2, 2))
    model.first.requires_grad_(True)
    model = fully_shard(model, mesh=mesh, state_over="all")  # one unit, of which a part trains
    optimizer, counts = torch.optim.SGD(model.first.parameters(), lr=0.1), []
    for step in range(3):
        with CollectiveCounter(mesh.get_group(0)) as column:
            TASKS["mlp"].loss(model, TASKS["mlp"].make_batch(step, 0, rank)).backward()
        optimizer.step()
        counts.append(column.num_gathers(2))
    return counts


def test_frozen_weights_cross_between_hosts_once():
    for counts in run_on_ranks(_count_frozen, 4):
        assert counts == [2, 1, 1]


def _held(rank, world_size):
    """Bytes at rest of everything, of parameters, of gradients, and of the optimizer's state."""
    model = over_hosts(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6))))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with StorageTracker(model) as tracker:
        model(torch.randn(2, 64)).sum().backward()
        optimizer.step()
        held = bytes_of(model.parameters()), bytes_of([p.grad for p in model.parameters()])
        of_state = bytes_of(t for t in optimizer_tensors(optimizer) if t.dim())
        return tracker.settled_bytes(), *held, of_state


def test_a_rank_holds_a_fourth_of_everything_and_keeps_half_of_the_weights():
    num_bytes = 6 * 64 * 64 * 4
    for everything, *parts in run_on_ranks(_held, 4):
        assert parts == [num_bytes / 4, num_bytes / 4, 2 * num_bytes / 4]
        assert num_bytes * 1.5 <= everything <= num_bytes * 1.6


# --- state ---


def _save_both(rank, world_size, folder):
    for name, model in (
        ("hosts", over_hosts(Oddities(seed=1))),
        ("flat", shard_model(Oddities(seed=1))),
    ):
        dcp.save({"m": model.state_dict()}, checkpoint_id=folder / name)
    _load_each(folder, over_hosts)


def _load_both(rank, world_size, folder):
    _load_each(folder, shard_model)


def _load_each(folder, shard):
    for name in ("hosts", "flat"):
        model = shard(Oddities(seed=2))
        state = {"m": model.state_dict()}
        dcp.load(state, checkpoint_id=folder / name)
        assert_same_tensors(full_state_dict(model), Oddities(seed=1).state_dict(), atol=0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # by no_dist, as was asked
def test_checkpoints_are_read_by_a_flat_mesh_and_the_other_way_round(tmp_path):
    run_on_ranks(_save_both, 4, tmp_path)
    run_on_ranks(_load_both, 3, tmp_path)
    state = {"m": Oddities(seed=2).state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "hosts", no_dist=True)
    assert_same_tensors(state["m"], Oddities(seed=1).state_dict(), atol=0)


def _go_on(rank, world_size):
    """The second of two steps, by a copy, from whole states, and by the first itself."""
    task, batches = TASKS["tied_lm"], _batches("tied_lm", world_size)
    model = over_hosts(task.build(), "zero2")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train_on_rank(model, batches[:1], task.loss, optimizer, rank)
    copied, other = copy.deepcopy(model), over_hosts(tied_lm(seed=2))
    other.load_state_dict(full_state_dict(model))
    optimizers = [optimizer, *(OPTIMIZERS["adamw"](m.parameters()) for m in (copied, other))]
    state = full_optimizer_state_dict(optimizer)
    for each in optimizers[1:]:
        load_full_optimizer_state_dict(each, state)
    return [
        train_on_rank(each, batches[1:], task.loss, its_own, rank)
        for each, its_own in zip((model, copied, other), optimizers, strict=True)
    ]


def test_copies_and_whole_states_go_on():
    for whole, copied, loaded in run_on_ranks(_go_on, 4):
        assert_traces_match(copied, whole, atol=0)
        assert_traces_match(loaded, whole, atol=1e-7)


def _write_behind_the_version(rank, world_size):
    """What an optimizer's own kernel does, of which torch knows nothing."""

    class OwnKernel(torch.optim.SGD):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.to_local().data.mul_(0.5)

    model, plain = over_hosts(mlp()), mlp()
    batch = TASKS["mlp"].make_batch(0, 0, 0)
    for _ in range(2):
        loss = TASKS["mlp"].loss(model, batch)
        loss.backward()
        torch.testing.assert_close(loss, TASKS["mlp"].loss(plain, batch))
        OwnKernel(model.parameters(), lr=0.1).step()
        with torch.no_grad():
            torch._foreach_mul_([*plain.parameters()], 0.5)


def test_what_a_step_writes_is_gathered_whatever_versions_say():
    run_on_ranks(_write_behind_the_version, 4)


def _interrupted(rank, world_size):
    """A gather between hosts that ends, on all ranks, by an exception before its part is kept."""
    model, batch = over_hosts(mlp()), TASKS["mlp"].make_batch(0, 0, 0)
    column = flat_params_of(model)[0].communicator.column
    gather = column.gather

    def raise_interrupt():
        raise KeyboardInterrupt

    def interrupted(*args):
        column.gather, pending = gather, gather(*args)
        pending.join = lambda join=pending.join: (join(), raise_interrupt())
        return pending

    column.gather = interrupted
    with pytest.raises(KeyboardInterrupt):
        model(batch["inputs"])
    torch.testing.assert_close(model(batch["inputs"]), mlp()(batch["inputs"]))


def test_an_interrupted_gather_is_made_anew():
    run_on_ranks(_interrupted, 4, backend=PLAIN)
