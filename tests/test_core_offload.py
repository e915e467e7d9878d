"""Shards, reduced gradients and optimizer state on the host: the same bits as without, and between
host and device nothing moves but one shard in per gather and one out per reduction.

Machines without an accelerator have one memory; ``TwoPlaces`` tells two in it.
"""

import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lightning_fsdp import (
    shard_model,
)
from tests.support.late_copies import LateCopies
from tests.support.models import TASKS, mlp
from tests.support.offloaded import CLIP, OFFLOAD, POLICIES
from tests.support.parity import (
    PLANS,
    adamw,
    assert_ranks_agree,
    assert_traces_match,
    batches_for,
    make_batches,
    optional_batch,
    optional_loss,
    train_on_rank,
    train_reference,
)
from tests.support.places import TwoPlaces
from tests.support.ranks import PLAIN, run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

# Every two of a plan, a precision and a way to accumulate.
COMBINATIONS = [
    ("zero2", "fp32", "local"),
    ("zero2", "bf16", "sum"),
    ("zero2", "bf16 reduce", "local"),
    ("zero3", "fp32", "sum"),
    ("zero3", "bf16", "local"),
    ("zero3", "bf16 reduce", "sum"),
]


def train_each_way(
    rank, world_size, task_name, offload, mesh_shape, clip, combinations=COMBINATIONS
):
    """A trace for each combination."""
    task, traces = TASKS[task_name], {}
    mesh = None
    if mesh_shape is not None:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    for plan, precision, accumulation in combinations:
        model = shard_model(
            task.build(),
            PLANS[plan],
            mesh=mesh,
            mp_policy=POLICIES[precision],
            offload_policy=offload,
        )
        traces[plan, precision, accumulation] = train_on_rank(
            model,
            batches_for(task_name, world_size, num_steps=2),
            task.loss,
            adamw(model.parameters()),
            rank,
            accumulation=accumulation,
            clip=clip,
        )
    return traces


def _train_offloaded(*args):
    with TwoPlaces() as places:
        traces = train_each_way(*args)
    assert places.mixtures == []
    return traces


def _train(rank, world_size, task_name, *how):
    """Offloaded, and resident."""
    offloaded = _train_offloaded(rank, world_size, task_name, OFFLOAD, *how)
    return offloaded, train_each_way(rank, world_size, task_name, None, *how)


SEPARATE, SUMMED = COMBINATIONS[::2], COMBINATIONS[1::2]


@pytest.mark.parametrize(
    ("task_name", "world_size", "backend", "mesh_shape", "clip", "combinations"),
    [
        ("mlp", 1, "gloo", None, CLIP, SUMMED),
        ("mlp", 2, "gloo", None, CLIP, COMBINATIONS),
        ("mlp", 2, PLAIN, None, None, SUMMED),
        ("tied_lm", 2, "gloo", None, CLIP, SEPARATE),
        ("tied_lm", 4, "gloo", (2, 2), CLIP, [*SEPARATE[:1], *SUMMED[:2]]),
    ],
)
def test_training_offloaded_gives_the_same_bits(
    task_name, world_size, backend, mesh_shape, clip, combinations
):
    how = (mesh_shape, clip, combinations)
    offloaded, resident = zip(
        *run_on_ranks(_train, world_size, task_name, *how, backend=backend), strict=True
    )
    task = TASKS[task_name]
    for combination in combinations:
        traces = [traces[combination] for traces in offloaded]
        assert_ranks_agree(traces, str(combination))
        assert_traces_match(traces[0], resident[0][combination], atol=0, what=str(combination))
        if combination[1] == "fp32":
            batches = batches_for(task_name, world_size, num_steps=2)
            expected = train_reference(task.build(), batches, task.loss, adamw, clip=clip)
            assert_traces_match(traces[0], expected, atol=task.atol, what=str(combination))


def _train_with_late_copies(rank, world_size, mesh_shape):
    with LateCopies() as copies:
        traces = _train_offloaded(rank, world_size, "mlp", OFFLOAD, mesh_shape, CLIP)
        assert copies.num_queued
    return traces


@pytest.mark.parametrize(
    ("backend", "mesh_shape"), [(PLAIN, None), ("late", None), ("early", (2, 1))]
)
def test_copies_that_run_late_change_no_bit(backend, mesh_shape):
    late = run_on_ranks(_train_with_late_copies, 2, mesh_shape, backend=backend)
    resident = _trained_resident(mesh_shape)
    for combination in COMBINATIONS:
        assert_traces_match(late[0][combination], resident[combination], atol=0)


@functools.cache
def _trained_resident(mesh_shape):
    return run_on_ranks(train_each_way, 2, "mlp", None, mesh_shape, CLIP)[0]


def _write_after_forward(rank, world_size, plan):
    """Nothing between a gather and a write to the shard waits for the device."""
    with LateCopies():
        model = shard_model(mlp(), PLANS[plan], offload_policy=OFFLOAD)
        with torch.no_grad():
            before = model(torch.ones(1, 7))
            for parameter in model.parameters():
                parameter.zero_()
            after = model(torch.ones(1, 7))
    assert before.any()
    assert not after.any()


@pytest.mark.parametrize("plan", PLANS)
def test_a_write_to_weights_leaves_a_copy_on_its_way_alone(plan):
    run_on_ranks(_write_after_forward, 2, plan)


def _train_with_optional_parameter(rank, world_size, offload):
    batches = make_batches(
        optional_batch(USERS), num_steps=len(USERS), num_micro_batches=1, world_size=world_size
    )
    model = shard_model(mlp(), offload_policy=offload)
    return train_on_rank(model, batches, optional_loss, adamw(model.parameters()), rank)


USERS = [{1}, set(), {0, 1}]


def test_a_parameter_that_no_rank_used_has_no_gradient():
    offloaded, resident = (
        run_on_ranks(_train_with_optional_parameter, 2, offload)[0] for offload in (OFFLOAD, None)
    )
    assert resident.gradients[1]["bonus"] is None
    assert_traces_match(offloaded, resident, atol=0)
