"""Optimizer state over all ranks of a 2-D mesh, weights within a row: training equals one process.

2 x 2    ranks 0, 1 and ranks 2, 3 are hosts; each rank has a fourth of the optimizer's state,
         and keeps half of the weights
"""

import pytest
from torch.distributed.device_mesh import init_device_mesh

from lightning_fsdp import shard_model
from tests.support import ranks
from tests.support.models import TASKS
from tests.support.one_exchange import train_on_rank
from tests.support.parity import (
    OPTIMIZERS,
    PLANS,
    assert_losses_match,
    assert_ranks_agree,
    assert_traces_match,
    train_reference,
)
from tests.support.ranks import PLAIN, run_on_ranks
from tests.test_core_parity import batches_for

# Every two of a plan, an optimizer and a way to accumulate.
COMBINATIONS = [
    ("zero2", "sgd", "local"),
    ("zero2", "adamw", "replica"),
    ("zero3", "adamw", "local"),
    ("zero3", "sgd", "replica"),
]


def mesh_of(shape):
    names = ("replicate", "shard")
    return init_device_mesh(ranks.active_device, shape, mesh_dim_names=names)


def _train_all_combinations(rank, world_size, task_name, shape):
    task, traces, mesh = TASKS[task_name], {}, mesh_of(shape)
    for plan, optimizer, accumulation in COMBINATIONS:
        model = shard_model(task.build(), PLANS[plan], mesh=mesh, state_over="all")
        traces[plan, optimizer, accumulation] = train_on_rank(
            model,
            batches_for(task_name, world_size, num_micro_batches=3),
            task.loss,
            OPTIMIZERS[optimizer](model.parameters()),
            rank,
            accumulation=accumulation,
        )
    return traces


@pytest.mark.parametrize(
    ("task_name", "shape", "backend"),
    [("tied_lm", (2, 2), "gloo"), ("tied_lm", (2, 2), PLAIN), ("mlp", (3, 1), "gloo")],
)
def test_training_equals_one_process_on_the_joined_batch(task_name, shape, backend):
    task, world_size = TASKS[task_name], shape[0] * shape[1]
    by_rank = run_on_ranks(_train_all_combinations, world_size, task_name, shape, backend=backend)
    for combination in COMBINATIONS:
        expected = train_reference(
            task.build(),
            batches_for(task_name, world_size, num_micro_batches=3),
            task.loss,
            OPTIMIZERS[combination[1]],
        )
        traces = [traces[combination] for traces in by_rank]
        assert_ranks_agree(traces, str(combination))
        assert_traces_match(traces[0], expected, atol=task.atol, what=str(combination))
        assert_losses_match(traces, expected, atol=task.atol)
