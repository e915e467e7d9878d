"""What replicas cost: what a rank holds, and one all-reduce of every shard per reduction.

The meshes are those of ``test_core_hsdp.py``.
"""

import math

import pytest
from torch import nn

from lightning_fsdp import ZERO2, full_state_dict, shard_model
from tests.support.counting import CollectiveCounter
from tests.support.memory import StorageTracker, bytes_of
from tests.support.models import TASKS, tied_lm
from tests.support.parity import PLANS
from tests.support.ranks import PLAIN, run_on_ranks
from tests.support.replicas import flat_params_of, mesh_of

pytestmark = pytest.mark.usefixtures("kept_ranks")

# --- what a rank holds ---


def _equal_layers():
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))


def _held_for_rank_0(rank, world_size):
    model = shard_model(_equal_layers(), mesh=mesh_of((2, 2)))
    peaks = [0]
    with StorageTracker(model) as tracker:
        at_rest = tracker.settled_bytes()
        tracker.at_each_operation = lambda: peaks.append(tracker.live_bytes())
        full_state_dict(model, rank0_only=True)
    return max(peaks) - at_rest


def test_whole_state_for_one_rank_is_held_by_no_other():
    held = run_on_ranks(_held_for_rank_0, 4)
    sizes = [bytes_of([parameter]) for parameter in _equal_layers().parameters()]
    assert held[0] >= sum(sizes)
    for each in held[1:]:
        assert each <= max(sizes) + 4096


def _bytes_at_rest(rank, world_size, shape, plan):
    model = shard_model(tied_lm(), PLANS[plan], mesh=mesh_of(shape))
    TASKS["tied_lm"].loss(model, TASKS["tied_lm"].make_batch(0, 0, rank)).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return bytes_of(model.parameters()), bytes_of(gradients), len(flat_params_of(model))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (1, 2)])
def test_a_rank_holds_its_shard_of_parameters_and_of_gradients(shape, plan):
    num_shards = shape[1]
    least = 4 * sum(p.numel() for p in tied_lm().parameters()) / num_shards
    for parameters, gradients, num_flat_params in run_on_ranks(
        _bytes_at_rest, math.prod(shape), shape, plan
    ):
        num_parameters = len(list(tied_lm().parameters()))
        padding = 4 * 32 * (num_parameters / num_shards + num_flat_params)
        assert least <= parameters <= least + padding
        assert least <= gradients <= least + padding


# --- what moves ---


def _count(rank, world_size, shape, plan, backend=None):
    """Per micro-batch: collectives of the row and of the column; the first one is not synced."""
    mesh = mesh_of(shape)
    model = shard_model(tied_lm(), PLANS[plan], mesh=mesh)
    row, column, counts = mesh.get_group(1), mesh.get_group(0), []
    traffic = flat_params_of(model)[0].communicator.traffic["all_reduce"]
    for micro_batch in range(3):
        model.set_requires_gradient_sync(micro_batch > 0)
        with CollectiveCounter(row) as in_row, CollectiveCounter(column) as in_column:
            calls = traffic.calls
            loss = TASKS["tied_lm"].loss(model, TASKS["tied_lm"].make_batch(0, micro_batch, rank))
            loss.backward()
        counts.append(
            {
                "reductions": in_row.num_reductions(shape[1]),
                "averages": len(in_column.of("all_reduce")),
                "averaged": sorted(call.numel for call in in_column.data()),
                "counted by the core": traffic.calls - calls,
            }
        )
    return counts, sorted(flat_param.layout.shard_numel for flat_param in flat_params_of(model))


@pytest.mark.parametrize("backend", ["gloo", PLAIN])
@pytest.mark.parametrize("plan", PLANS)
def test_replicas_share_one_all_reduce_of_each_shard_per_synced_backward(plan, backend):
    for (unsynced, *synced), shards in run_on_ranks(_count, 4, (2, 2), plan, backend=backend):
        assert unsynced == {
            "reductions": 0, "averages": 0, "averaged": [], "counted by the core": 0
        }  # fmt: skip
        for counts in synced:
            assert counts == {
                "reductions": len(shards),
                "averages": len(shards),
                "averaged": shards,
                "counted by the core": len(shards),
            }


def test_one_replica_is_not_averaged():
    for counts, _ in run_on_ranks(_count, 2, (1, 2), "zero3"):
        assert all(each["averages"] == 0 for each in counts)


def test_one_shard_is_averaged_and_nothing_else():
    for (_, *synced), shards in run_on_ranks(_count, 2, (2, 1), "zero3"):
        for counts in synced:
            assert counts["averaged"] == shards


def _states_at_reductions(rank, world_size):
    """How many shards are being averaged when each unit's reduction starts."""
    task = TASKS["lm"]
    model = shard_model(task.build(), ZERO2, mesh=mesh_of((2, 2)))
    flat_params, found = flat_params_of(model), []
    communicator = flat_params[0].communicator
    reduce = communicator.reduce

    def watched(*args, **options):
        in_flight = [s for s in flat_params if s._reduction is not None]
        found.append(sum(not flat_param._stages for flat_param in in_flight))
        return reduce(*args, **options)

    communicator.reduce = watched
    task.loss(model, task.make_batch(0, 0, rank)).backward()
    return found, [flat_param._reduction for flat_param in flat_params]


def test_a_shard_is_averaged_while_the_next_units_reduction_runs():
    for found, reductions in run_on_ranks(_states_at_reductions, 4):
        assert found == [0] + [1] * (len(reductions) - 1)
        assert set(reductions) == {None}
