"""Weights in several models or units: each gradient is reduced once, in one order on all ranks."""

import pytest
import torch
from torch import nn

from lightning_fsdp import fully_shard
from lightning_fsdp.core.engine.hooks import hooks_of
from tests.support.one_exchange import wholes
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

WIDTH = 8


def _two_models():
    torch.manual_seed(0)
    first, second = (nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))) for _ in range(2))
    second[1].weight = first[1].weight
    return first, second


def _shard(*models):
    for model in models:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)


LOSSES = {
    "first": lambda first, second, x: first(x).square().mean(),
    "second": lambda first, second, x: second(x).square().mean(),
    "side_by_side": lambda first, second, x: (first(x) * second(x)).mean(),
    "one_after_another": lambda first, second, x: second(first(x)).square().mean(),
    "other_way_round": lambda first, second, x: first(second(x)).square().mean(),
}


def _compare_models(rank, world_size):
    batches = torch.randn(3, world_size, 4, WIDTH, generator=torch.Generator().manual_seed(1))
    for name, loss_of in LOSSES.items():
        models, references = _two_models(), _two_models()
        _shard(*models)
        assert models[0][1].weight is models[1][1].weight
        traffic = hooks_of(models[0]).schedule.communicator.traffic["reduce_scatter"]
        for step, batch in enumerate(batches):
            for model in (*models, *references):
                model.zero_grad()
            before = traffic.calls
            loss_of(*models, batch[rank]).backward()
            for each in batch:
                (loss_of(*references, each) / world_size).backward()
            if step:
                # One for each layer; the shared weight is in that of the first model's layer.
                expected = {"first": 2, "second": 3}.get(name, 4)
                assert traffic.calls - before == expected, name
            for model, reference in zip(models, references, strict=True):
                found = wholes([p.grad for p in model.parameters()])
                for ours, theirs in zip(found, reference.parameters(), strict=True):
                    torch.testing.assert_close(ours, theirs.grad, msg=f"{name}, step {step}")


@pytest.mark.parametrize("world_size", [1, 2])
def test_models_that_share_a_weight_add_up_its_gradient_in_one_backward(world_size):
    run_on_ranks(_compare_models, world_size)


class _Ties(nn.Module):
    """Ties one weight with each of two layers, which a backward need not reach."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.both = nn.Module()
        self.both.weights = nn.ParameterList([self.one.weight, self.two.weight])
        self.both.forward = self._use

    def _use(self, x, uses_two):
        first, second = self.both.weights
        x = x @ first
        return x @ second if uses_two else x

    def forward(self, x, uses_two):
        return self.both(x, uses_two).square().mean()


def _compare_ties(rank, world_size):
    model, reference = _Ties(), _Ties()
    for module in (model.one, model.two, model.both, model):
        fully_shard(module)
    batches = torch.randn(3, world_size, 4, WIDTH, generator=torch.Generator().manual_seed(1))
    for batch in batches:
        for each in (model, reference):
            each.zero_grad()
        model(batch[rank], uses_two=rank == 0).backward()
        for other, inputs in enumerate(batch):
            (reference(inputs, uses_two=other == 0) / world_size).backward()
        found = wholes([p.grad for p in model.parameters()])
        for ours, theirs in zip(found, reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.grad)


def test_tied_weights_of_which_a_rank_uses_some_are_reduced_in_one_order():
    run_on_ranks(_compare_ties, 2)


class _Block(nn.Module):
    """Reads the weight of what it calls, too."""

    def __init__(self, gate):
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, WIDTH), gate

    def forward(self, x):
        x = self.gate(self.up(x).tanh())
        return x + x @ self.gate.weight


class _CallsGate(nn.Module):
    """Goes on with the weights of a layer when blocks that have it, too, have ended."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(_Block(self.gate) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(self.gate(x)) @ self.gate.weight
        return self.out(x).square().mean()


SHARDED_AS = {
    "blocks": lambda model: [*model.blocks, model],
    "the_model_alone": lambda model: [model],
    "a_block_alone": lambda model: [model.blocks[1], model],
}


def _compare_gate(rank, world_size, how, frees):
    model, reference = _CallsGate(), _CallsGate()
    for module in SHARDED_AS[how](model):
        fully_shard(module, reshard_after_forward=frees)
    batches = torch.randn(3, world_size, 4, WIDTH, generator=torch.Generator().manual_seed(1))
    for batch in batches:
        for each in (model, reference):
            each.zero_grad()
        model(batch[rank]).backward()
        for inputs in batch:
            (reference(inputs) / world_size).backward()
        found = wholes([p.grad for p in model.parameters()])
        for ours, theirs in zip(found, reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.grad)
        assert not any(unit.has_leaves_installed for unit in hooks_of(model).schedule.units)
        held = [f.holders for unit in hooks_of(model).schedule.units for f in unit.flat_params]
        assert not frees or not any(held)


@pytest.mark.parametrize("frees", [True, False])
@pytest.mark.parametrize("how", SHARDED_AS)
def test_a_layer_of_blocks_that_the_model_around_them_goes_on_with(how, frees):
    run_on_ranks(_compare_gate, 2, how, frees)
