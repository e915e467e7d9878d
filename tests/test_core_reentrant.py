"""Reentrant activation checkpointing: backwards inside of the backward."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_fsdp import fully_shard, gradients, shard_model
from lightning_fsdp.core.sharded_module import units_in
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor
from tests.support.parity import PLANS
from tests.support.ranks import run_on_ranks
from tests.support.recomputed import Block

pytestmark = pytest.mark.usefixtures("kept_ranks")


class Reentrant(nn.Module):
    """Blocks that are recomputed by a backward inside of the backward, and a head behind them."""

    order = 0, 1, 2

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.inlet, self.head = nn.Linear(6, 6), nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.how = how

    def run(self, x):
        for index in self.order:
            x = self.blocks[index](x)
        return x

    def forward(self, x):
        x = self.inlet(x)
        if self.how is None:
            x = self.run(x)
        elif self.how == "several":
            x = checkpoint(self.run, x, use_reentrant=True)
        else:
            for index in self.order:
                x = checkpoint(self.blocks[index], x, use_reentrant=True)
        return self.head(x).square().sum()


class BlockWithinReentrant(Block):
    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=True)


class ReentrantWithin(Reentrant):
    def __init__(self, how):
        super().__init__(None)
        blocks = [BlockWithinReentrant() for _ in self.blocks]
        for block, same in zip(blocks, self.blocks, strict=True):
            block.load_state_dict(same.state_dict())
        self.blocks = nn.ModuleList(blocks)


REENTRANT = {"each": Reentrant, "several": Reentrant, "inside": ReentrantWithin}
UNITS = {"blocks": None, "layers": ["Linear"], "one": 10**9}


def train_reentrant(rank, world_size, how, plan):
    inputs = [torch.randn(2, 6, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    for units in UNITS.values():
        plain, model = Reentrant(None), REENTRANT[how](how)
        plain.order = model.order = 0, 1, 1, 2, 0  # in one region: in a row, and again later
        optimizers = [torch.optim.SGD(plain.parameters(), lr=0.01)]
        shard_model(model, PLANS[plan], units=units)
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.01))
        seen = []
        gradients(model).on_local(lambda name, gradient, index, seen=seen: seen.append(index))
        for _ in range(3):
            with model.no_sync():
                (model(inputs[rank]) / 2).backward()
            (model(inputs[1 - rank]) / 2).backward()
            (sum(map(plain, inputs)) / world_size).backward()
            assert seen == [0] * (len(seen) // 2) + [1] * (len(seen) // 2)
            seen.clear()
            for name, parameter in plain.named_parameters():
                found = model.get_parameter(name)
                assert isinstance(found, ShardedTensor), name
                gradient = found.grad.full_tensor()
                torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=2e-6)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert plan == "zero2" or all(not unit.is_held for unit in units_in(model))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("how", REENTRANT)
def test_reentrant_checkpointing_trains(how, plan):
    run_on_ranks(train_reentrant, 2, how, plan)


def count_whole(rank, world_size):
    """How many blocks are whole when a block's gradients arrive."""
    model = Reentrant("several")
    for module in (model.inlet, *model.blocks, model.head, model):
        fully_shard(module)
    whole, units = [], units_in(model)

    def look(name, gradient, index):
        if name.startswith("blocks"):
            whole.append(sum(u.is_held for u in units))

    gradients(model).on_local(look)
    reductions = model.head.weight.spec.communicator.traffic["reduce_scatter"]
    for _ in range(2):
        whole.clear()
        before = reductions.calls
        model(torch.ones(2, 6)).backward()
        assert reductions.calls - before == len(units)
    return whole


def test_a_backward_inside_of_the_backward_frees_each_unit_that_it_leaves():
    for whole in run_on_ranks(count_whole, 2):
        # The recomputation of all three comes first; then the inlet is gathered beside the last.
        assert whole == [3] * 4 + [2] * 4 + [2] * 4


def count_gathers(rank, world_size, how):
    model = shard_model(Reentrant(how))
    gathers = model.head.weight.spec.communicator.traffic["all_gather"]
    counts = []
    for _ in range(3):
        before = gathers.calls
        model(torch.ones(2, 6)).backward()
        counts.append(gathers.calls - before)
    return counts


@pytest.mark.parametrize("how", [None, "each", "several"])
def test_a_recomputed_block_is_gathered_once_in_the_backward(how):
    """Forward and backward gather five units each; the head stays whole between the two."""
    for first, *later in run_on_ranks(count_gathers, 2, how):
        assert first == 10
        assert later == [9, 9]


def fail(name, gradient, index):
    if name.startswith("blocks.1"):
        raise ValueError("a hook fails")


def fail_and_go_on(rank, world_size):
    """A backward that fails, and the next one at once, of a graph that was there before it."""
    model, plain = shard_model(Reentrant("each")), Reentrant(None)
    failing, going_on = (model(torch.ones(2, 6)) for _ in range(2))
    handle = gradients(model).on_local(fail)
    with pytest.raises(ValueError, match="a hook fails"):
        failing.backward()
    handle.remove()
    model.zero_grad()  # what had been reduced before
    going_on.backward()
    plain(torch.ones(2, 6)).backward()
    for name, parameter in plain.named_parameters():
        gradient = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=2e-6)


def test_a_backward_after_one_that_failed_is_not_taken_for_one_inside_of_it():
    run_on_ranks(fail_and_go_on, 2)


def recompute_in_two_regions(rank, world_size):
    """How many blocks are whole when a block's gradients arrive, each of them used twice."""
    model = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
    for block in model:
        fully_shard(block, reshard_after_forward=True)
    whole, units = [], units_in(model)
    for block in model:
        gradients(block).on_local(lambda *_: whole.append(sum(u.is_held for u in units)))
    for _ in range(2):
        whole.clear()
        loss = 0.0
        for scale in (1.0, 2.0):
            x = torch.full((2, 6), scale, requires_grad=True)
            for block in model:
                x = checkpoint(block, x, use_reentrant=True)
            loss = loss + x.sum()
        loss.backward()
        assert not any(unit.is_held for unit in units)
    return whole


def test_a_unit_that_is_recomputed_in_two_regions_is_freed_after_each():
    for whole in run_on_ranks(recompute_in_two_regions, 2):
        assert max(whole) == 1, whole
