"""State over all ranks of a mesh: what is refused, and ranks that part, named on every rank."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_fsdp import fully_shard, shard_model
from lightning_fsdp.engines.rank_grid import GridChoice, open_grid
from tests.support.models import TASKS, mlp
from tests.support.ranks import assert_errors, errors_on_ranks, run_on_ranks
from tests.support.replicas import mesh_of, mesh_with_timeout
from tests.test_core_divergence import TIMEOUT_S, error_of


def _refused(rank, world_size, what):
    model, grid = mlp(), mesh_of((2, 2))
    if what == "flat":
        fully_shard(model, mesh=grid["shard"], state_over="all")
    elif what == "none":
        shard_model(model, state_over="all")
    elif what == "word":
        shard_model(model, mesh=grid, state_over="hosts")
    elif what == "inner":
        fully_shard(model.first, mesh=grid, state_over="all")
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    elif what == "ranks":
        shard_model(model, mesh=grid, state_over="all" if rank == 3 else "replica")
    elif what in ("all", "replica"):  # torch's groups sort: columns would join different shards
        crossed = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("replicate", "shard"))
        shard_model(model, mesh=crossed, state_over=what)
    elif what == "strategy":
        crossed = DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("replicate", "shard"))
        open_grid(GridChoice(device_mesh=crossed), device_type="cpu", host=0)


@pytest.mark.parametrize(
    ("what", "type_name", "words"),
    [
        ("flat", "ValueError", ["2 dimensions (replicate, shard)", "got one of 1 dimension"]),
        ("none", "ValueError", ["2 dimensions (replicate, shard)", "got none"]),
        ("word", "ValueError", ["('replica', 'all') for state_over", "'hosts'"]),
        ("inner", "ValueError", ["one mesh", "4 shards, gathered among 2, on", "4 shards on"]),
        ("ranks", "RuntimeError", ["ranks disagree", "gathered among 2", "rank 3:"]),
        ("all", "ValueError", ["rows in one order", "[[0, 1], [3, 2]]", "ascending order"]),
        ("replica", "ValueError", ["rows in one order", "[[0, 1], [3, 2]]"]),
        ("strategy", "ValueError", ["rows in one order", "[[0, 3], [2, 1]]"]),
    ],
)
def test_wrong_use_is_named_on_every_rank(what, type_name, words):
    assert_errors(errors_on_ranks(_refused, 4, what), type_name, *words)


def _write_alone(rank, world_size, step):
    model = shard_model(mlp(), mesh=mesh_with_timeout(rank, TIMEOUT_S), state_over="all")
    batch = TASKS["mlp"].make_batch(0, 0, rank)
    for _ in range(step):
        TASKS["mlp"].loss(model, batch).backward()
    if rank == 1:
        with torch.no_grad():
            model.first.weight.to_local().mul_(0.5)
    return error_of(lambda: TASKS["mlp"].loss(model, batch).backward())


def test_a_rank_that_writes_alone_moves_no_data_and_is_named():
    for rank, (message, seconds) in enumerate(run_on_ranks(_write_alone, 4, 3)):
        assert message is not None
        assert seconds < 3 * TIMEOUT_S
        if rank == 1:
            assert "order of units" in message
            assert "about to: gather anew unit" in message
