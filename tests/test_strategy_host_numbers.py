"""What ranks ask each other at every batch: the host waits for other hosts, and for no device."""

from unittest import mock

import pytest
import torch.distributed as dist

from lightning_fsdp.strategies import lightning_internals, signals
from lightning_fsdp.strategies.batches import Lockstep
from lightning_fsdp.strategies.host_numbers import all_reduce_numbers
from tests.support.fake_device import DEVICE, entered
from tests.support.ranks import run_on_ranks


def _combined(rank, world_size, folder):
    place = f"file://{folder}/rendezvous"
    # As NCCL's, it has no backend for tensors of the host.
    dist.init_process_group("cuda:gloo", init_method=place, rank=rank, world_size=world_size)
    results = [
        all_reduce_numbers([rank, 5 - rank], op) for op in (dist.ReduceOp.MIN, dist.ReduceOp.SUM)
    ]
    num_groups = len(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    return results, num_groups


def test_a_group_that_moves_no_memory_of_the_host_gets_one_beside_it_that_does(tmp_path):
    for results, num_groups in run_on_ranks(_combined, 2, tmp_path, backend=None):
        assert results == [[0, 4], [1, 9]]
        assert num_groups == 2


def _asked(rank, world_size):
    trainer, checkpoints = mock.MagicMock(), mock.MagicMock()
    trainer.strategy.root_device = DEVICE
    with (
        entered() as (waits, _),
        mock.patch.object(lightning_internals, "end_by_agreement", lambda _, ask: ask),
        mock.patch.object(lightning_internals, "validate_by_agreement"),
        mock.patch.object(lightning_internals, "answer_requeue_by"),
        mock.patch.object(lightning_internals, "is_inside_step", return_value=False),
    ):
        asks = {
            "next batch": lambda: Lockstep(mock.MagicMock()).count_ready(True),
            "SIGTERM": lambda: signals.end_together(trainer)(False, False),
            "requeue": lambda: signals.RequeueTogether(trainer, checkpoints).on_train_batch_end(
                trainer
            ),
        }
        return {name: waits.during(ask)[0] for name, ask in asks.items()}


@pytest.fixture(scope="module")
def asked():
    (waits,) = run_on_ranks(_asked, 1, backend=None, timeout_s=600)
    return waits


@pytest.mark.parametrize("what", ["next batch", "SIGTERM", "requeue"])
def test_asking_waits_for_no_device(what, asked):
    assert asked[what] == []
