"""NCCL's own collectives, as the core calls them. On one rank the core itself calls none."""

import pytest
import torch
import torch.distributed as dist

from lightning_fsdp.core.engine import torch_internals
from tests.support.ranks import run_on_ranks


def _exchange(rank, world_size):
    """Each asynchronous, in place where the core's is, and waited for on the current stream."""
    group, values = dist.group.WORLD, torch.arange(1000.0)
    whole, shard, received = values.clone(), torch.zeros(1000), torch.zeros(1000)
    works = [
        torch_internals.all_gather_in(group)(whole, whole),
        torch_internals.reduce_scatter_in(group)(shard, values),
        dist.all_to_all_single(received, values, group=group, async_op=True),
    ]
    mean = values.clone()
    works.append(dist.all_reduce(mean, group=group, async_op=True))
    for work in works:
        work.wait()
    return [tensor.cpu() for tensor in (whole, shard, received, mean)]


@pytest.mark.gpu
def test_collectives_are_called_as_nccl_wants_them():
    (results,) = run_on_ranks(_exchange, 1)
    for result in results:
        assert torch.equal(result, torch.arange(1000.0, device="cpu"))
