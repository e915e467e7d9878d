"""Frozen parameters, and steps that fail: what is reduced, and that training goes on."""

import pytest
import torch
from torch import nn

from lightning_fsdp import gradients, shard_model
from tests.support.cases import each_on_ranks
from tests.support.counting import CollectiveCounter
from tests.support.hard_graphs import batch_of, frozen_biases, loss_of, shard
from tests.support.memory import StorageTracker, bytes_of, tensors_of
from tests.support.models import causal_lm, lm_loss, token_batch
from tests.support.parity import (
    OPTIMIZERS,
    PLANS,
)
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")


class Lora(nn.Module):
    """A frozen layer and two small trainable ones."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(48, 48)
        self.down, self.up = nn.Linear(48, 2, bias=False), nn.Linear(2, 48, bias=False)
        self.base.requires_grad_(False)

    def forward(self, inputs):
        return self.base(inputs) + self.up(self.down(inputs))


def _lora(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(Lora(), nn.Tanh(), Lora())


def _train_lora(rank, world_size):
    """Frozen ones are gathered, never reduced, and have no memory for gradients."""
    model, reference = shard_model(_lora(), units=["Lora"]), _lora()
    frozen = 4 * sum(p.numel() for p in reference.parameters() if not p.requires_grad)
    inputs = [torch.randn(4, 48, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    for _ in range(2):
        with CollectiveCounter() as counter:
            model(inputs[rank]).square().mean().backward()
    with StorageTracker(model) as tracker:
        tracker.track(tensors_of(model))
        held = tracker.settled_bytes() - bytes_of(tensors_of(model))
    for each in inputs:
        (2 * reference(each).square().mean() / world_size).backward()
    for name, parameter in reference.named_parameters():
        ours = model.get_parameter(name)
        if parameter.requires_grad:
            torch.testing.assert_close(ours.grad.full_tensor(), parameter.grad, rtol=0, atol=1e-7)
        else:
            assert ours.grad is None
    return counter.reduced_bytes(world_size), frozen, held


def test_frozen_parameters_cost_no_reduction_and_no_gradient_memory():
    trainable = 4 * sum(p.numel() for p in _lora().parameters() if p.requires_grad)
    for reduced, frozen, held in run_on_ranks(_train_lora, 2):
        assert trainable / 2 <= reduced <= trainable / 2 + 512 < frozen / 8
        assert held <= 256


def _reductions_by_the_first_block(rank, world_size, plan):
    """How many units are being reduced when a backward comes to the first block."""
    model = shard(frozen_biases(), plan)
    model.run = lambda net, x, step: net.end(net.blocks[1](net.blocks[0](x)))
    numbers = []
    for _ in range(2):
        with CollectiveCounter() as counter:
            handle = model.blocks[0].register_forward_hook(
                lambda module, args, output: (
                    output.register_hook(
                        lambda gradient: numbers.append(counter.num_reductions(world_size))
                    )
                    and None
                )
            )
            loss_of(model, batch_of(0, 0, rank)).backward()
            handle.remove()
        numbers.append(counter.num_reductions(world_size))
    return numbers


@pytest.mark.parametrize("plan", PLANS)
def test_units_with_frozen_parameters_are_reduced_within_the_backward(plan):
    # The head belongs to the root under ZeRO-2, whose inputs need no gradient: it comes last.
    at_first_block, at_end = {"zero2": (1, 3), "zero3": (2, 3)}[plan]
    for numbers in run_on_ranks(_reductions_by_the_first_block, 2, plan):
        assert numbers == [at_first_block, at_end] * 2


def _thaw(rank, world_size, plan):
    """Freezing and unfreezing between steps."""
    model, reference = shard_model(causal_lm(), PLANS[plan]), causal_lm()
    optimizers = [OPTIMIZERS["adamw"](m.parameters()) for m in (model, reference)]
    for step, frozen in enumerate(["", "blocks.1", "blocks.0", "", "head"]):
        for each in (model, reference):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(not (frozen and name.startswith(frozen)))
        lm_loss(model, token_batch(step, 0, rank)).backward()
        for r in range(world_size):
            (lm_loss(reference, token_batch(step, 0, r)) / world_size).backward()
        for name, parameter in reference.named_parameters():
            ours = model.get_parameter(name).grad
            assert (ours is None) == (parameter.grad is None), f"step {step}: {name}"
            if ours is not None:
                torch.testing.assert_close(ours.full_tensor(), parameter.grad, rtol=0, atol=5e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("plan", PLANS)
def test_parameters_may_be_frozen_and_unfrozen_between_steps(plan):
    run_on_ranks(_thaw, 2, plan)


def _freeze_before_the_backward(rank, world_size, plan):
    """Also what the backward does not gather."""
    model, reference = shard_model(causal_lm(), PLANS[plan]), causal_lm()
    loss = lm_loss(model, token_batch(0, 0, rank))
    losses = [lm_loss(reference, token_batch(0, 0, other)) for other in range(world_size)]
    for each in (model, reference):
        each.embedding.requires_grad_(False)
        each.blocks[1].requires_grad_(False)
    loss.backward()
    (sum(losses) / world_size).backward()
    for name, parameter in reference.named_parameters():
        ours = model.get_parameter(name).grad
        assert (ours is None) == (parameter.grad is None), name
        if ours is not None:
            torch.testing.assert_close(ours.full_tensor(), parameter.grad, rtol=0, atol=5e-6)


def test_what_is_frozen_between_forward_and_backward_gets_no_gradient():
    each_on_ranks(_freeze_before_the_backward, 2, PLANS)


class Failing:
    """Raises once, where it is put."""

    def __init__(self, kind):
        self.kind = kind
        self.is_armed = True

    def __call__(self, *args):
        if self.is_armed:
            self.is_armed = False
            raise self.kind("on purpose")


def fail_once(rank, world_size, where, plan):
    """The step after an exception is that of a model on which nothing happened."""
    model, reference = shard_model(causal_lm(), PLANS[plan]), shard_model(causal_lm(), PLANS[plan])
    # What is no ``Exception`` ends a call without torch calling its forward hooks.
    kind = KeyboardInterrupt if where == "Ctrl-C in the forward" else ZeroDivisionError
    failing = Failing(kind)
    block = model.blocks[1]
    if where in ("forward", "Ctrl-C in the forward"):
        block.up.register_forward_pre_hook(failing)
    elif where == "hook after the forward":
        block.register_forward_hook(failing)
    elif where == "backward":
        block.up.register_full_backward_hook(failing)
    elif where == "local gradient":
        gradients(block).on_local(failing)
    elif where == "reduced gradient":
        gradients(block).on_reduced(failing)
    else:
        block.register_forward_hook(lambda module, args, out: out.register_hook(failing) and None)
    with StorageTracker(model) as tracker:
        for step in range(2):
            for each in (model, reference):
                each.zero_grad()
            with pytest.raises(kind):
                lm_loss(model, token_batch(9, 0, rank)).backward()
            failing.is_armed = True
            if step == 0:
                continue
            failing.is_armed = False
            model.zero_grad()
            for each in (model, reference):
                lm_loss(each, token_batch(step, 0, rank)).backward()
            for name, parameter in reference.named_parameters():
                ours = model.get_parameter(name).grad
                assert torch.equal(ours.to_local(), parameter.grad.to_local()), name
            whole = [size for size in tracker.whole_sizes() if size]
    if plan == "zero3":
        assert not whole, "something stays whole"


PLACES = (
    *("forward", "Ctrl-C in the forward", "hook after the forward", "backward"),
    *("local gradient", "reduced gradient", "hook of a tensor"),
)


@pytest.mark.parametrize("plan", PLANS)
def test_an_exception_leaves_a_usable_engine(plan):
    each_on_ranks(fail_once, 2, PLACES, plan)
