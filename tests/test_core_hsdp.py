"""Sharded over one dimension of a mesh, replicated over the other: training equals one process, and
so do norms and whole state. What replicas cost is in ``test_core_hsdp_cost.py``.

    2 x 2    ranks 0, 1 and ranks 2, 3 hold one copy of the model each; 0 and 2 hold the same shard
    1 x 2    the same as a 1-D mesh
    2 x 1    whole parameters on every rank, as in plain data parallelism
"""

import math

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_fsdp import (
    MixedPrecisionPolicy,
    full_optimizer_state_dict,
    full_state_dict,
    fully_shard,
    shard_model,
)
from tests.support.counting import CollectiveCounter
from tests.support.models import TASKS, causal_lm, mlp, shard_lm_by_hand, tied_lm
from tests.support.one_exchange import train_on_rank
from tests.support.parity import (
    OPTIMIZERS,
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
from tests.support.ranks import PLAIN, assert_errors, errors_on_ranks, run_on_ranks
from tests.support.replicas import mesh_of, mesh_with_timeout
from tests.test_core_clip import MAX_NORM, NORMS
from tests.test_core_divergence import TIMEOUT_S, Skipping, error_of

pytestmark = pytest.mark.usefixtures("kept_ranks")

# Every two of a plan, an optimizer and a way to accumulate.
COMBINATIONS = [
    ("zero2", "sgd", "local"),
    ("zero2", "adamw", "sum"),
    ("zero3", "adamw", "local"),
    ("zero3", "sgd", "sum"),
]
EACH_ONCE = [("zero2", "adamw"), ("zero3", "sgd")]


# --- parity ---


def _train_all_combinations(rank, world_size, task_name, shape):
    task, traces, mesh = TASKS[task_name], {}, mesh_of(shape)
    for plan, optimizer, accumulation in COMBINATIONS:
        model = shard_model(task.build(), PLANS[plan], mesh=mesh)
        traces[plan, optimizer, accumulation] = train_on_rank(
            model,
            batches_for(task_name, world_size),
            task.loss,
            OPTIMIZERS[optimizer](model.parameters()),
            rank,
            accumulation=accumulation,
        )
    return traces


@pytest.mark.parametrize(
    ("task_name", "shape", "backend"),
    # The MLP trains on 2 x 2 and 2 x 1 where a parameter of it may be unused.
    [
        *(("mlp", shape, "gloo") for shape in ((1, 2), (3, 1))),
        *(("tied_lm", (2, 2), backend) for backend in ("gloo", PLAIN)),
    ],
)
def test_training_equals_one_process_on_the_joined_batch(task_name, shape, backend):
    task, world_size = TASKS[task_name], math.prod(shape)
    by_rank = run_on_ranks(_train_all_combinations, world_size, task_name, shape, backend=backend)
    for combination in COMBINATIONS:
        expected = train_reference(
            task.build(),
            batches_for(task_name, world_size),
            task.loss,
            OPTIMIZERS[combination[1]],
        )
        traces = [traces[combination] for traces in by_rank]
        assert_ranks_agree(traces, str(combination))
        assert_traces_match(traces[0], expected, atol=task.atol, what=str(combination))
        assert_losses_match(traces, expected, atol=task.atol)


# Used in one replica by one rank, in the other by one, by none, by all, and by none again.
USERS = [{1}, {2}, set(), {0, 1, 2, 3}, set()]


def _train_with_optional_parameter(rank, world_size, shape):
    traces, mesh = {}, mesh_of(shape)
    batches = make_batches(
        optional_batch(USERS), num_steps=5, num_micro_batches=1, world_size=world_size
    )
    for plan, optimizer in EACH_ONCE:
        model = shard_model(mlp(), PLANS[plan], mesh=mesh)
        traces[plan, optimizer] = train_on_rank(
            model, batches, optional_loss, OPTIMIZERS[optimizer](model.parameters()), rank
        )
    return traces


@pytest.mark.parametrize("shape", [(2, 2), (2, 1)])
def test_a_parameter_may_be_unused_in_a_replica_or_by_all(shape):
    world_size = math.prod(shape)
    by_rank = run_on_ranks(_train_with_optional_parameter, world_size, shape)
    batches = make_batches(
        optional_batch(USERS), num_steps=5, num_micro_batches=1, world_size=world_size
    )
    for combination in EACH_ONCE:
        expected = train_reference(
            mlp(), batches, optional_loss, OPTIMIZERS[combination[1]], joined=False
        )
        assert expected.gradients[2]["bonus"] is None
        traces = [traces[combination] for traces in by_rank]
        assert_ranks_agree(traces)
        assert_traces_match(traces[0], expected, atol=1e-7, what=str(combination))


def _train_beside_torch_fsdp2(rank, world_size, reshard_after_forward, num_micro_batches):
    task, mesh = TASKS["lm"], mesh_of((2, 2))
    batches = batches_for("lm", world_size, num_micro_batches=num_micro_batches)
    traces = []
    for engine in (fully_shard, torch_fsdp.fully_shard):
        model = shard_lm_by_hand(
            causal_lm(), engine, mesh=mesh, reshard_after_forward=reshard_after_forward
        )
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        traces.append(train_on_rank(model, batches, task.loss, optimizer, rank, accumulation="sum"))
    assert_traces_match(*traces, atol=0, what="against torch's FSDP2")


# What None stands for does not depend on replicas: tests/test_core_parity.py trains with it.
@pytest.mark.parametrize(("reshard_after_forward", "num_micro_batches"), [(True, 2), (False, 1)])
def test_a_script_for_fsdp2_gives_the_same_bits(reshard_after_forward, num_micro_batches):
    run_on_ranks(_train_beside_torch_fsdp2, 4, reshard_after_forward, num_micro_batches)


def _train_in_low_precision(rank, world_size):
    """Replicas must stay equal to the bit whatever the dtypes; returns the reduction's dtypes."""
    mesh = mesh_of((2, 2))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard_model(tied_lm(), mesh=mesh, mp_policy=policy)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with CollectiveCounter(mesh.get_group(0), mesh.get_group(1)) as counter:
        trace = train_on_rank(
            model, batches_for("tied_lm", world_size), TASKS["tied_lm"].loss, optimizer, rank
        )
    return trace, {call.dtype for call in counter.of("all_reduce")}


def test_replicas_are_averaged_in_the_reduce_dtype_and_stay_equal():
    traces, dtypes = zip(*run_on_ranks(_train_in_low_precision, 4), strict=True)
    assert_ranks_agree(traces)
    assert list(dtypes) == [{torch.float32}] * 4


# --- norms, state ---


def _norms_and_clipped(rank, world_size):
    task, results, mesh = TASKS["tied_lm"], {}, mesh_of((2, 2))
    for p in NORMS:
        model = shard_model(task.build(), mesh=mesh)
        task.loss(model, task.make_batch(0, 0, rank)).backward()
        norm = model.clip_grad_norm_(MAX_NORM, norm_type=p)
        clipped = {name: each.grad.full_tensor() for name, each in model.named_parameters()}
        results[p] = norm, clipped
    return results


def test_norms_count_every_shard_once():
    task, by_rank = TASKS["tied_lm"], run_on_ranks(_norms_and_clipped, 4)
    for p in NORMS:
        model = task.build()
        losses = [task.loss(model, task.make_batch(0, 0, rank)) for rank in range(4)]
        (sum(losses) / 4).backward()
        expected = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type=p)
        for results in by_rank:
            norm, clipped = results[p]
            assert torch.equal(norm, by_rank[0][p][0]), f"p={p}: ranks have different norms"
            torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
            for name, each in model.named_parameters():
                torch.testing.assert_close(clipped[name], each.grad, rtol=1e-5, atol=1e-7)


def _whole_state(rank, world_size):
    task, mesh = TASKS["mlp"], mesh_of((2, 2))
    model = shard_model(task.build(), mesh=mesh)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with CollectiveCounter(mesh.get_group(0)) as between_replicas:
        before = full_state_dict(model)
    assert between_replicas.data() == []
    assert_same_tensors(before, dict(task.build().state_dict()), atol=0)
    train_on_rank(model, batches_for("mlp", world_size), task.loss, optimizer, rank)
    return (
        full_state_dict(model, rank0_only=True),
        full_optimizer_state_dict(optimizer, rank0_only=True)["state"],
    )


def test_whole_state_is_gathered_in_one_replica_and_given_to_one_rank():
    (state, optimizer_state), *others = run_on_ranks(_whole_state, 4)
    assert list(state) == list(mlp().state_dict())
    assert len(optimizer_state) == len(state)
    assert others == [({}, {})] * 3


# --- wrong use ---


def _refused(rank, world_size, what):
    model = mlp()
    if what == "3-D":
        names = ("pipe", "replicate", "shard")
        fully_shard(model, mesh=init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=names))
    elif what == "device":
        mesh = DeviceMesh("xla", torch.arange(4).view(2, 2), _init_backend=False)
        shard_model(model, mesh=mesh)
    elif what == "one mesh":
        fully_shard(model.first)
        fully_shard(model, mesh=mesh_of((2, 2)))
    elif what == "one mesh, tied":
        lm, mesh = tied_lm(), mesh_of((2, 2))
        fully_shard(lm.embedding, mesh=mesh)
        fully_shard(lm.head, mesh=mesh["shard"])
    elif what == "other meshes":
        meshes = [mesh_of((2, 2)), mesh_of((1, 4))]
        fully_shard(model, mesh=meshes[rank == 3])
    elif what == "other models":
        fully_shard(model if rank < 2 else causal_lm(), mesh=mesh_of((2, 2)))


@pytest.mark.parametrize(
    ("what", "type_name", "words"),
    [
        ("3-D", "NotImplementedError", ["3 dimensions", "mesh['replicate', 'shard']"]),
        ("device", "NotImplementedError", ["cpu or cuda", "'xla'"]),
        ("one mesh", "ValueError", ["one mesh", "4 shards", "2 replicas of 2 shards"]),
        ("one mesh, tied", "ValueError", ["one mesh", "2 replicas of 2 shards"]),
        ("other meshes", "RuntimeError", ["ranks disagree", "2 replicas of 2 shards", "rank 3:"]),
        ("other models", "RuntimeError", ["ranks disagree", "ranks 0, 1:", "ranks 2, 3:"]),
    ],
)
def test_wrong_use_is_named_on_every_rank(what, type_name, words):
    assert_errors(errors_on_ranks(_refused, 4, what), type_name, *words)


def _leave_the_order(rank, world_size, step):
    mesh = mesh_with_timeout(rank, TIMEOUT_S)
    torch.manual_seed(0)
    model = shard_model(Skipping(), mesh=mesh)
    for _ in range(step):
        model(torch.ones(2, 6)).backward()
    order = (0, 1, 2) if rank < 2 else (0, 2)
    return error_of(lambda: model(torch.ones(2, 6), order).backward())


@pytest.mark.parametrize("step", [0, 2])
def test_a_replica_that_leaves_the_order_is_named_on_every_rank(step):
    for message, seconds in run_on_ranks(_leave_the_order, 4, step):
        assert message is not None
        assert "order of units" in message or "to take part" in message
        assert seconds < 3 * TIMEOUT_S
        if step == 0:
            assert "ranks disagree" in message
            assert "of 4" in message
