"""torch's ``replicate()`` around modules that are sharded here: it takes what they leave."""

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate as replicate_as_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_as_fsdp2
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fully_shard_of_torch

from lightning_fsdp import ShardedTensor, fully_shard
from tests.support.parity import assert_same_tensors, sgd, whole
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

NUM_STEPS = 3


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Linear(3, 2))


def _inputs(rank):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def _train(model, batches):
    optimizer = sgd(model.parameters())
    for _ in range(NUM_STEPS):
        model(batches).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def _train_replicated(rank, world_size, way):
    model = _model()
    fully_shard(model[2])
    if way == "DDP":
        replicate_as_ddp(model)
    else:
        replicate_as_fsdp2(model, mesh=init_device_mesh("cpu", (world_size,)))
    assert [isinstance(p, ShardedTensor) for p in model.parameters()] == [
        *[False] * 2,
        *[True] * 2,
        *[False] * 2,
    ]
    return _train(model, _inputs(rank))


@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_what_is_around_a_sharded_module_can_be_replicated(way):
    reference = _train(_model(), torch.cat([_inputs(rank) for rank in range(2)]))
    for found in run_on_ranks(_train_replicated, 2, way):
        assert_same_tensors(found, reference, atol=1e-6)


def _shard_by_torch(rank, world_size):
    model = fully_shard(_model())
    with pytest.raises(AssertionError, match="fully_shard has already been applied"):
        fully_shard_of_torch(model)


def test_a_sharded_module_is_not_sharded_by_torch_as_well():
    run_on_ranks(_shard_by_torch, 2)
