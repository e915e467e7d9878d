"""The mean over replicas at the last micro-batch alone: shards add up within a replica until then.

micro-batch                 0        1        2
reduce-scatter in a row     yes      yes      yes
all-reduce down a column    no       no       yes, of the sum
"""

import itertools

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp

from lightning_fsdp import (
    CPUOffloadPolicy,
    GradientUnavailable,
    fully_shard,
    gradients,
    shard_model,
)
from tests.support.counting import CollectiveCounter
from tests.support.models import TASKS, mlp, shard_lm_by_hand, tied_lm
from tests.support.one_exchange import train_on_rank
from tests.support.parity import (
    OPTIMIZERS,
    PLANS,
    assert_losses_match,
    assert_ranks_agree,
    assert_traces_match,
    batches_for,
    make_batches,
    optional_batch,
    optional_loss,
    train_reference,
)
from tests.support.ranks import PLAIN, run_on_ranks
from tests.support.replicas import flat_params_of, mesh_of

pytestmark = pytest.mark.usefixtures("kept_ranks")

COMBINATIONS = list(itertools.product(["tied_lm", "mlp"], [("zero3", "sgd"), ("zero2", "adamw")]))


def _batches(task_name, world_size):
    return batches_for(task_name, world_size, num_steps=2, num_micro_batches=3)


def _train_all(rank, world_size, shape):
    traces, mesh = {}, mesh_of(shape)
    for task_name, (plan, optimizer) in COMBINATIONS:
        task = TASKS[task_name]
        model = shard_model(task.build(), PLANS[plan], mesh=mesh)
        traces[task_name, plan, optimizer] = train_on_rank(
            model,
            _batches(task_name, world_size),
            task.loss,
            OPTIMIZERS[optimizer](model.parameters()),
            rank,
            accumulation="replica",
        )
    return traces


@pytest.mark.parametrize(
    ("shape", "backend"), [((2, 2), "gloo"), ((2, 1), "gloo"), ((1, 2), "gloo"), ((2, 2), PLAIN)]
)
def test_training_equals_one_process_on_the_joined_batch(shape, backend):
    world_size = shape[0] * shape[1]
    by_rank = run_on_ranks(_train_all, world_size, shape, backend=backend)
    for task_name, (plan, optimizer) in COMBINATIONS:
        task, what = TASKS[task_name], (task_name, plan, optimizer)
        expected = train_reference(
            task.build(), _batches(task_name, world_size), task.loss, OPTIMIZERS[optimizer]
        )
        traces = [traces[what] for traces in by_rank]
        assert_ranks_agree(traces, str(what))
        assert_traces_match(traces[0], expected, atol=task.atol, what=str(what))
        assert_losses_match(traces, expected, atol=task.atol)


# By step and micro-batch: the ranks that use ``bonus``. Used early in one replica, late by one
# rank, by none in a step that follows, and in the first and last micro-batch by different ones.
USERS = [({0}, set(), set()), (set(), set(), {3}), (set(),) * 3, ({1, 2}, set(), {0})]


def _optional_batches():
    def make(step, micro_batch, rank):
        return optional_batch(USERS[step])(micro_batch, micro_batch, rank)

    return make_batches(make, num_steps=len(USERS), num_micro_batches=3, world_size=4)


def _train_with_optional_parameter(rank, world_size):
    mesh, traces = mesh_of((2, 2)), []
    for options in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        model = shard_model(mlp(), mesh=mesh, **options)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        traces.append(
            train_on_rank(
                model, _optional_batches(), optional_loss, optimizer, rank, accumulation="replica"
            )
        )
    return traces


def test_a_parameter_may_be_unused_in_some_micro_batches_or_in_all():
    expected = train_reference(
        mlp(), _optional_batches(), optional_loss, OPTIMIZERS["adamw"], joined=False
    )
    assert [g["bonus"] is None for g in expected.gradients] == [False, False, True, False]
    for traces in zip(*run_on_ranks(_train_with_optional_parameter, 4), strict=True):
        assert_ranks_agree(traces)
        assert_traces_match(traces[0], expected, atol=1e-7)


def _train_beside_torch_fsdp2(rank, world_size):
    task, mesh = TASKS["lm"], mesh_of((2, 2))
    batches = batches_for("lm", world_size, num_steps=3, num_micro_batches=3)
    traces = []
    for engine in (fully_shard, torch_fsdp.fully_shard):
        model = shard_lm_by_hand(task.build(), engine, mesh=mesh, reshard_after_forward=True)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        traces.append(
            train_on_rank(model, batches, task.loss, optimizer, rank, accumulation="replica")
        )
    assert_traces_match(*traces, atol=0, what="against torch's FSDP2")


def test_set_requires_all_reduce_gives_the_bits_of_fsdp2():
    run_on_ranks(_train_beside_torch_fsdp2, 4)


def _count(rank, world_size):
    mesh, task, counts = mesh_of((2, 2)), TASKS["tied_lm"], []
    model = shard_model(tied_lm(), mesh=mesh)
    row, column = mesh.get_group(1), mesh.get_group(0)
    for micro_batch in range(4):
        model.set_requires_all_reduce(micro_batch == 3)
        with CollectiveCounter(row) as in_row, CollectiveCounter(column) as in_column:
            task.loss(model, task.make_batch(0, micro_batch, rank)).backward()
        moved = sorted(call.numel for call in in_column.data())
        counts.append((in_row.num_reductions(2), len(in_column.of("all_reduce")), moved))
    return counts, sorted(f.layout.shard_numel for f in flat_params_of(model))


@pytest.mark.parametrize("backend", ["gloo", PLAIN])
def test_replicas_share_one_all_reduce_of_each_shard_per_step(backend):
    for counts, shards in run_on_ranks(_count, 4, backend=backend):
        assert counts == [(len(shards), 0, [])] * 3 + [(len(shards), len(shards), shards)]


def _message_of(call):
    try:
        call()
    except (RuntimeError, GradientUnavailable) as error:
        return str(error)
    return None


def _backward(model, micro_batch, rank, *, averages=None):
    task = TASKS["mlp"]
    if averages is not None:
        model.set_requires_all_reduce(averages)
    task.loss(model, task.make_batch(0, micro_batch, rank)).backward()


def _waiting(rank, world_size, state_over):
    model = shard_model(mlp(), mesh=mesh_of((2, 2)), state_over=state_over)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    access, name = gradients(model), "first.weight"
    _backward(model, 0, rank, averages=False)
    refused = {
        "one replica's": [
            optimizer.step,
            lambda: model.clip_grad_norm_(1.0),
            lambda: model.first.weight.grad.full_tensor(),
        ],
        "got state 'replica'": [lambda: access[name].shard, lambda: access[name].local()],
        "wait": [lambda: access.micro_batches("local").__enter__(), model.half],
    }
    messages = [(words, _message_of(call)) for words, calls in refused.items() for call in calls]
    states = [{access[n].state for n in access.names()}]
    with model.no_sync():  # this rank's own beside the replica's
        _backward(model, 1, rank, averages=False)
    states.append({access[n].state for n in access.names()})
    _backward(model, 2, rank, averages=True)
    return messages, states, dict(access.full())


@pytest.mark.parametrize("state_over", ["replica", "all"])
def test_what_waits_for_the_mean_is_refused_by_name_and_lost_nowhere(state_over):
    for messages, states, found in run_on_ranks(_waiting, 4, state_over):
        for words, message in messages:
            assert words in message
        assert states == [{"replica"}, {"local"}]
        _assert_close(found, 0, 1, 2)


def _ended_otherwise(rank, world_size, state_over):
    """Steps that do not end as they began, each with what it leaves."""
    model = shard_model(mlp(), units=["Linear"], mesh=mesh_of((2, 2)), state_over=state_over)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    access, found = gradients(model), {}

    def note(what):
        found[what] = dict(access.full())
        optimizer.zero_grad()

    for set_to_none in (True, False):
        _backward(model, 0, rank, averages=False)
        optimizer.zero_grad(set_to_none=set_to_none)
        _backward(model, 1, rank, averages=True)
        note(f"dropped, {set_to_none=}")
    _backward(model, 0, rank, averages=False)
    model.set_requires_all_reduce(True)
    model.first(TASKS["mlp"].make_batch(0, 1, rank)["inputs"]).mul(0.0).sum().backward()
    note("the last micro-batch enters one unit")
    model.set_requires_all_reduce(False)
    with access.micro_batches("separate"):
        _backward(model, 0, rank)
        _backward(model, 1, rank)
    found["first of separate"] = dict(access.full(micro_batch=0))
    note("separate")
    _backward(model, 0, rank, averages=False)
    handle = access.on_local(_raise)
    assert "stop" in _message_of(lambda: _backward(model, 1, rank, averages=False))
    handle.remove()
    _backward(model, 2, rank, averages=True)
    note("after an exception")
    return found


def _raise(*_):
    raise RuntimeError("stop")


@pytest.mark.parametrize("state_over", ["replica", "all"])
def test_what_waits_can_be_dropped_and_need_not_be_entered_again(state_over):
    for found in run_on_ranks(_ended_otherwise, 4, state_over):
        _assert_close(found["dropped, set_to_none=True"], 1)
        _assert_close(found["dropped, set_to_none=False"], 1)
        _assert_close(found["the last micro-batch enters one unit"], 0)
        _assert_close(found["first of separate"], 0)
        _assert_close(found["separate"], 0, 1)
        _assert_close(found["after an exception"], 2)


def _message_of(call):
    try:
        call()
    except (RuntimeError, GradientUnavailable) as error:
        return str(error)
    return None


def _assert_close(found, *micro_batches):
    task, model = TASKS["mlp"], mlp()
    for micro_batch in micro_batches:
        losses = [task.loss(model, task.make_batch(0, micro_batch, rank)) for rank in range(4)]
        (sum(losses) / 4).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
