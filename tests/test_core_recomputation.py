"""Activation checkpointing: around a unit, inside one, and by transformers' own switch."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lightning_fsdp import fully_shard, shard_model
from lightning_fsdp.core.sharded_module import units_in
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor
from tests.support.memory import StorageTracker, tensors_of
from tests.support.models import tiny_gpt2
from tests.support.parity import PLANS
from tests.support.ranks import run_on_ranks
from tests.support.recomputed import Block

pytestmark = pytest.mark.usefixtures("kept_ranks")


class BlockWithin(Block):
    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


class Around(nn.Module):
    def __init__(self, block, wraps, end=lambda x: x.square().sum()):
        super().__init__()
        self.end = end
        torch.manual_seed(0)
        self.inlet = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.wraps = wraps

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.wraps else block(x)
        return self.end(x)


KINDS = {"around": (Block, True), "inside": (BlockWithin, False), "both": (BlockWithin, True)}


def gradients_of(rank, world_size, kind, plan):
    block, wraps = KINDS[kind]
    inputs = [torch.randn(2, 6, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    plain = Around(Block, wraps=False)
    (sum(plain(x) for x in inputs[:world_size]) / world_size).backward()
    model = shard_model(Around(block, wraps), PLANS[plan])
    for _ in range(2):  # the second step follows the recorded order
        model.zero_grad()
        model(inputs[rank]).backward()
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, ShardedTensor), name
            expected = plain.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad.full_tensor(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_blocks_have_the_gradients_of_plain_ones(kind, plan):
    run_on_ranks(gradients_of, 2, kind, plan)


def count_gathers(rank, world_size, kind):
    """Gathers of a step whose order is known."""
    block, wraps = KINDS[kind]
    model = shard_model(Around(block, wraps))
    gathers = model.inlet.weight.spec.communicator.traffic["all_gather"]
    for _ in range(3):
        before = gathers.calls
        model(torch.ones(2, 6)).backward()
        count = gathers.calls - before
    return count


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_blocks_are_gathered_as_often_as_plain_ones(kind):
    """Four units, forward and backward; the last block stays whole between the two."""
    assert run_on_ranks(count_gathers, 2, kind) == [7, 7]


class Selectively(Around):
    """A part of the block's outputs is saved; the recomputation starts before it reaches them."""

    def __init__(self):
        super().__init__(Block, wraps=True)
        self.operations = []

    def policy(self, context, operation, *args, **kwargs):
        self.operations.append(operation)
        is_saved = operation in (torch.ops.aten.addmm.default, torch.ops.aten.view.default)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(self, x):
        contexts = partial(create_selective_checkpoint_contexts, self.policy)
        x = self.inlet(x)
        for block in self.blocks:
            part = nn.Sequential(block, nn.Tanh())
            x = checkpoint(part, x, use_reentrant=False, context_fn=contexts)
        return self.end(x)


def selective_gradients(rank, world_size, plan):
    inputs = torch.randn(world_size, 2, 6, generator=torch.Generator().manual_seed(0)).unbind()
    plain, model = Selectively(), shard_model(Selectively(), PLANS[plan])
    for _ in range(3):
        for each in (plain, model):
            each.zero_grad()
            each.operations.clear()
        model(inputs[rank]).backward()
        plain(inputs[rank]).backward()
        assert model.operations == plain.operations, "those of the core are none of the model's"
        plain.zero_grad()
        (sum(plain(x) for x in inputs) / world_size).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("plan", PLANS)
def test_selective_checkpointing_sees_what_it_sees_in_plain_torch(plan):
    run_on_ranks(selective_gradients, 2, plan)


def slope(model, x):
    """Its backward enters the last block in the middle, as the end is linear."""
    (gradient,) = torch.autograd.grad(model(x), x, create_graph=True)
    return gradient.square().sum()


def gradients_of_slope(rank, world_size, plan):
    inputs = torch.randn(world_size, 2, 6, generator=torch.Generator().manual_seed(0))
    inputs = inputs.requires_grad_().unbind()
    plain = Around(Block, wraps=False, end=torch.sum)
    (sum(slope(plain, x) for x in inputs) / world_size).backward()
    for block, wraps in KINDS.values():
        model = shard_model(Around(block, wraps, torch.sum), PLANS[plan])
        for _ in range(2):
            model.zero_grad()
            slope(model, inputs[rank]).backward()
            for name, parameter in model.named_parameters():
                expected, found = plain.get_parameter(name).grad, parameter.grad
                found = found if found is None else found.full_tensor()
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_of_gradients_go_through_recomputed_blocks(plan):
    run_on_ranks(gradients_of_slope, 2, plan)


def count_runs(modules):
    """Grows by one with each forward of one of the modules."""
    runs = []
    for module in modules:
        module.register_forward_pre_hook(lambda *_: runs.append(None))
    return runs


def store_and_run(rank, world_size, kind):
    """Bytes that a forward leaves for its backward, and runs of the blocks' bodies in a step."""
    block, wraps = KINDS[kind]
    steps, inputs = [], torch.randn(BATCH_SIZE, 6)
    for model in (shard_model(Around(Block, wraps=False)), shard_model(Around(block, wraps))):
        runs = count_runs(inner.first for inner in model.blocks)
        with StorageTracker(model) as tracker:
            for _ in range(2):
                model.zero_grad()
                runs.clear()
                loss = model(inputs)
                # Else the last backward's question still travels to a slow rank. No barrier, whose
                # byte older torches keep.
                dist.all_gather_object([None] * world_size, None)
                kept = [s.buffer.flat for u in units_in(model) for s in u.flat_params if u.is_held]
                known = [inputs, loss, *tensors_of(model), *kept]
                stored = tracker.settled_bytes(exclude=known)
                loss.backward()
                del loss
        steps.append((stored, len(runs)))
    return steps


BATCH_SIZE = 64


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_computed_again_and_only_what_goes_into_them_is_stored(kind):
    into = 4 * 4 * BATCH_SIZE * 6  # what goes into three blocks, and what comes out of the last
    hidden = 3 * 4 * BATCH_SIZE * 9  # what ``tanh`` gives in each
    for plain, recomputed in run_on_ranks(store_and_run, 2, kind):
        assert plain == (into + hidden, 3)
        assert recomputed == (into, 6)


def train_gpt2(rank, world_size):
    losses, num_runs = [], []
    for recomputes in (False, True):
        model = tiny_gpt2()
        if recomputes:
            model.gradient_checkpointing_enable()
        model.train()
        shard_model(model)
        runs = count_runs(block.mlp for block in model.transformer.h)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.arange(8).view(1, 8) + rank
        of_model = []
        for _ in range(3):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            of_model.append(loss.item())
        losses.append(of_model)
        num_runs.append(len(runs))
    assert num_runs == [3 * 3, 2 * 3 * 3]  # steps, blocks
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def test_the_switch_of_transformers_computes_again_and_changes_no_loss():
    run_on_ranks(train_gpt2, 2)


class Target(nn.Module):
    """A loss beside a target that the last unit gives itself, without a gradient."""

    def __init__(self, target, recomputes=True):
        super().__init__()
        torch.manual_seed(0)
        self.inlet, self.other, self.last = (nn.Linear(6, 6) for _ in range(3))
        self.target, self.recomputes = target, recomputes

    def body(self, x):
        if self.target == "detached":
            target = self.last(x).detach()
        else:
            with torch.no_grad():
                target = self.last(x)
        return self.other(x) - target * x

    def forward(self, x):
        x = self.inlet(x)
        x = checkpoint(self.body, x, use_reentrant=False) if self.recomputes else self.body(x)
        return self.last(x).square().sum()


def train_beside_target(rank, world_size, target, plan):
    plain = Target(target, recomputes=False)
    model = Target(target)
    for module in (model.inlet, model.other, model.last, model):
        fully_shard(module, reshard_after_forward=plan == "zero3")
    inputs = [torch.randn(2, 6, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    traffic = next(model.parameters()).spec.communicator.traffic["reduce_scatter"]
    for step in range(3):  # the second follows the recorded order
        calls = traffic.calls
        (sum(map(plain, inputs)) / world_size).backward()
        model(inputs[rank]).backward()
        assert traffic.calls - calls == 3, "each unit is reduced once"
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, ShardedTensor), name
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        torch.testing.assert_close(model.clip_grad_norm_(1.0), norm)
        for name, parameter in plain.named_parameters():
            gradient = model.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=1e-6)
        for unit in units_in(model):
            assert not unit.is_held, unit
        if step == 0:  # gradients of two steps are added up
            continue
        plain.zero_grad()
        model.zero_grad()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("target", ["no_grad", "detached"])
def test_a_unit_that_is_recomputed_after_its_backward_is_closed_again(target, plan):
    run_on_ranks(train_beside_target, 2, target, plan)
