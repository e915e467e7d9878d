"""Units that are called several times: what is whole, and what ranks do, by the graph alone."""

import functools

import pytest
import torch
from torch import nn

from lightning_fsdp import call_with, fully_shard, gradients
from lightning_fsdp.core.sharded_module import units_in
from tests.support.cases import each_on_ranks
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

NUM_BLOCKS = 6


def _blocks():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(NUM_BLOCKS)))


def _sharded():
    model = _blocks()
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def _one(model, x):
    yield model(x).square().sum()


def _two_in_one(model, x):
    yield model(x).square().sum() + model(x + 1).square().sum()


def _two_in_a_step(model, x):
    """Both inside of one forward, as of a ``training_step``."""
    yield call_with(model, lambda x: model(x).square().sum() + model(x + 1).square().sum(), x)


def _one_kept(model, x):
    model.kept = [model(x)]
    yield model(x).square().sum()


def _two_backwards(model, x):
    losses = [model(x + i).square().sum() for i in range(2)]
    yield from losses


WAYS = [_one, _two_in_one, _two_in_a_step, _one_kept, _two_backwards]


def _count(rank, world_size, way):
    """The most units that are whole, or have gradients to reduce, when a gradient arrives."""
    model, plain = _sharded(), _blocks()
    units, most = units_in(model), []

    def look(name, gradient, index):
        flat_params = [f for unit in units for f in unit.flat_params]
        most.append(
            (sum(u.is_held for u in units), sum(f.has_local_gradients for f in flat_params))
        )

    gradients(model).on_local(look)
    for step in range(3):
        # Inputs with gradients, so that the backward leaves the first unit as well.
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(step)).requires_grad_()
        model.zero_grad()
        plain.zero_grad()
        for loss, expected in zip(way(model, x), way(plain, x), strict=True):
            loss.backward()
            expected.backward()
        for name, parameter in plain.named_parameters():
            found = model.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(found, parameter.grad, atol=1e-6, rtol=1e-5)
        assert not any(unit.is_held for unit in units)
    return [max(column) for column in zip(*most, strict=True)]


def test_at_most_two_units_are_whole_however_many_graphs_are_alive():
    for way, by_rank in each_on_ranks(_count, 2, WAYS).items():
        for num_whole, num_waiting in by_rank:
            assert num_whole <= 2, way
            assert num_waiting <= 1, way


def _keep_on_one(rank, world_size):
    """One rank holds graphs that others have dropped."""
    model, kept = _sharded(), []
    for step in range(3):
        for _ in range(2):
            output = model(torch.ones(2, 6))
            if rank == 0:
                kept.append(output)
        del output
        model(torch.full((2, 6), 1.0 + step)).square().sum().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def test_a_graph_that_one_rank_keeps_changes_nothing():
    run_on_ranks(_keep_on_one, 2, group_timeout_s=30)


def _in_a_row(rank, world_size):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model.forward = functools.partial(_three_times, model)
    for block in model[:2]:
        fully_shard(block)
    fully_shard(model)
    reductions = model[0].weight.spec.communicator.traffic["reduce_scatter"]
    model(torch.ones(2, 6, requires_grad=True)).sum().backward()
    return reductions.calls


def _three_times(model, x):
    for block in (model[0], model[0], model[0], model[1], model[1]):
        x = block(x).tanh()
    return x


def test_calls_in_a_row_are_reduced_once():
    assert run_on_ranks(_in_a_row, 2) == [2, 2]


def _reductions(rank, world_size, way):
    """Of each backward; gradients are compared with those of an unsharded model."""
    model, plain, counts = _sharded(), _blocks(), []
    traffic = model[0][0].weight.spec.communicator.traffic["reduce_scatter"]
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        for loss, expected in zip(way(model, x), way(plain, x), strict=True):
            before = traffic.calls
            loss.backward()
            expected.backward()
            counts.append(traffic.calls - before)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, atol=1e-6, rtol=1e-5)
    return counts


@pytest.mark.parametrize("way", WAYS)
def test_two_passes_and_one_backward_take_one_reduction_of_each_unit(way):
    """As of a discriminator that is called with real and with generated samples."""
    for counts in run_on_ranks(_reductions, 2, way):
        assert set(counts) == {NUM_BLOCKS}


def _embedded(rank, world_size, how):
    torch.manual_seed(0)
    plain, model = (nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)) for _ in range(2))
    if how == "weight_norm":
        for each in (plain, model):
            nn.utils.parametrizations.weight_norm(each[0])
    model.load_state_dict(plain.state_dict())
    for block in model:
        fully_shard(block)
    fully_shard(model)
    for each in (plain, model):
        loss = each(torch.arange(8)).square().mean()
        if how == "function":
            loss = loss + call_with(each[0], lambda m=each[0]: m.weight.square().mean())
        loss.backward()
    for name, parameter in plain.named_parameters():
        found = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(found, parameter.grad, msg=lambda text, n=name: f"{n}: {text}")


def test_an_embedding_whose_weight_is_computed_with_is_gathered_for_the_backward():
    each_on_ranks(_embedded, 2, ["plain", "function", "weight_norm"])
