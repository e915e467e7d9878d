"""Checks at the door and around the optimizer's step, on two ranks."""

import copy
import inspect

import pytest
import torch
from torch import nn

from lightning_fsdp import fully_shard, register_forward_method, shard_model
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor
from tests.support.ranks import run_on_ranks


def _with_table():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].table = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    return model


def refused_alike(rank, world_size):
    message = r"got torch\.complex64 for 'weight'\..* complex one as two real ones"
    with pytest.raises(ValueError, match=message):
        fully_shard(nn.Linear(4, 4, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"expected a floating-point parameter, got torch\.int64"):
        fully_shard(_with_table())


def test_what_every_rank_finds_is_raised_as_it_is():
    run_on_ranks(refused_alike, 2)


def refused_on_one(rank, world_size):
    model = _with_table() if rank == 1 else nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"rank 1: sharding Sequential: refused, ValueError"):
        fully_shard(model)


def test_what_one_rank_finds_is_raised_on_every_rank():
    run_on_ranks(refused_on_one, 2)


def compare(rank, world_size):
    model = shard_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    weight = model[0].weight
    other = copy.deepcopy(model)[0].weight
    assert torch.equal(weight, other)
    if rank == 0 and other.to_local().numel():
        other.to_local()[0] += 1
    assert not torch.equal(weight, other)


def test_equality_of_slices_is_not_that_of_tensors():
    run_on_ranks(compare, 2)


def step_with_closure(rank, world_size):
    torch.manual_seed(0)
    plain = nn.Linear(3, 3)
    model = nn.Linear(3, 3)
    model.load_state_dict(plain.state_dict())
    batches = [[torch.randn(2, 3) for _ in range(2)] for _ in range(world_size)]
    for of_rank in batches:
        for batch in of_rank:
            (plain(batch).square().sum() / world_size).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()

    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, last = batches[rank]
    with model.no_sync():
        model(first).square().sum().backward()

    def closure():
        loss = model(last).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    found = model.weight.full_tensor()
    torch.testing.assert_close(found, plain.weight.detach(), rtol=0, atol=1e-6)


def test_a_closure_may_bring_the_backward_that_reduces():
    run_on_ranks(step_with_closure, 2)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)

    def double(self, x, times=2):
        """Twice, or more often."""
        return times * self(x)


def keep_signature(rank, world_size):
    model = fully_shard(Named())
    register_forward_method(model, "double")
    assert model.double.__doc__ == "Twice, or more often."
    assert list(inspect.signature(model.double).parameters) == ["x", "times"]
    assert torch.equal(model.double(torch.ones(1, 2)), 2 * model(torch.ones(1, 2)))


def test_a_registered_method_keeps_its_name_and_words():
    run_on_ranks(keep_signature, 2)


class Saving(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.saved = None

    def forward(self, x):
        self.saved = self.state_dict()
        return self.layer(x)


def save_in_forward(rank, world_size):
    model = Saving()
    before = model.layer.weight.detach().clone()
    fully_shard(model)
    model(torch.ones(1, 4)).sum().backward()
    weight = model.saved["layer.weight"]
    assert isinstance(weight, ShardedTensor)
    assert torch.equal(weight.full_tensor(), before)
    assert model.layer.weight.grad is not None


def test_a_state_dict_taken_inside_a_forward_is_sharded():
    run_on_ranks(save_in_forward, 2)
