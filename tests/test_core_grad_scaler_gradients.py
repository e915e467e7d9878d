"""torch's ``GradScaler`` on gradients that wait, are kept apart, or are of a plain parameter."""

import pytest
import torch
from torch import nn

from lightning_fsdp import ZERO2, gradients, shard_model
from tests.support.models import mlp, mlp_batch, mlp_loss
from tests.support.parity import PLANS, sgd
from tests.support.ranks import run_on_ranks
from tests.support.scaled import new_scaler

pytestmark = pytest.mark.usefixtures("kept_ranks")


def _beside_a_plain_parameter(rank, world_size, plain_first):
    model = mlp()
    model.bonus.register_hook(lambda gradient: gradient * 0 + 3.0)  # equal on all ranks
    shard_model(model, ignored_params={model.bonus})
    plain = [model.bonus]
    others = [p for p in model.parameters() if p is not model.bonus]
    optimizer = sgd([*plain, *others] if plain_first else [*others, *plain])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    results = []
    for factor in (1.0, torch.inf if rank == 1 else 1.0):
        before = model.bonus.detach().clone()
        (scaler.scale(mlp_loss(model, mlp_batch(0, 0, rank))) * factor).backward()
        scaler.unscale_(optimizer)
        gradient = model.bonus.grad.clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        results.append((gradient.tolist(), torch.equal(model.bonus, before), scaler.get_scale()))
    return results


@pytest.mark.parametrize("plain_first", [True, False])
def test_a_plain_parameter_of_the_same_optimizer_is_unscaled_and_skipped_too(plain_first):
    for (gradient, stayed, scale), (_, stayed_then, scale_then) in run_on_ranks(
        _beside_a_plain_parameter, 2, plain_first
    ):
        assert (gradient, stayed, scale) == ([0.75] * 3, False, 4.0)
        assert (stayed_then, scale_then) == (True, 2.0)


def _unreduced(rank, world_size, plan):
    model = shard_model(mlp(), PLANS[plan])
    optimizer, scaler = sgd(model.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    with model.no_sync():
        scaler.scale(mlp_loss(model, mlp_batch(0, 0, rank))).backward()
    refusal = rf"gradient of 'mix' \(rank {rank}\): expected a reduced gradient for "
    with pytest.raises(RuntimeError, match=refusal + r"GradScaler\.unscale_, .*no_sync"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=refusal + r"GradScaler\.unscale_"):
        scaler.step(fused)
    scaler.scale(mlp_loss(model, mlp_batch(0, 1, rank))).backward()
    scaler.step(optimizer)  # now it can


@pytest.mark.parametrize("plan", PLANS)
def test_unreduced_gradients_are_refused_on_every_rank(plan):
    run_on_ranks(_unreduced, 2, plan)


class _Optional(nn.Linear):
    def forward(self, inputs, uses_weight):
        return super().forward(inputs) if uses_weight else inputs * 1.0


class _Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(2, 2), _Optional(2, 2)

    def forward(self, inputs, uses_right):
        return self.left(inputs).sum(), self.right(inputs, uses_right).sum()


def _zeroed_in_place(rank, world_size):
    torch.manual_seed(0)
    model = shard_model(_Branches(), ZERO2, units=["Linear", "_Optional"])
    optimizer, scaler = sgd(model.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)
    inputs = torch.ones(1, 2, requires_grad=True)
    scaler.scale(model(inputs, rank == 0)[0]).backward()
    with model.no_sync():
        model(inputs, rank == 0)[1].backward()
    if rank == 0:
        model.right.weight.grad.zero_()
        model.right.bias.grad.zero_()
    before = model.right.weight.full_tensor()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert torch.equal(model.right.weight.full_tensor(), before)
    assert torch.equal(model.right.weight.grad.full_tensor(), torch.zeros(2, 2))
    return model.left.weight.grad.full_tensor()


def test_a_local_gradient_that_one_rank_zeroed_is_zeros_on_every_rank():
    for gradient in run_on_ranks(_zeroed_in_place, 2):
        assert torch.equal(gradient, torch.ones(2, 2))


def _micro_batches(rank, world_size):
    model = shard_model(mlp())
    optimizer, scaler = sgd(model.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)
    g, seen = gradients(model), []
    g.on_local(lambda name, gradient, micro_batch: seen.append(micro_batch))
    with g.micro_batches("separate"):
        for micro_batch in range(2):
            scaler.scale(mlp_loss(model, mlp_batch(0, micro_batch, rank))).backward()
        scaler.unscale_(optimizer)
        for name in g.names():
            torch.testing.assert_close(
                g[name].full(0) + g[name].full(1), g[name].full(), rtol=0, atol=1e-7
            )
    optimizer.zero_grad()
    seen.clear()
    (mlp_loss(model, mlp_batch(1, 0, rank)) * torch.inf).backward()
    first = set(seen)
    scaler.update()
    scaler.step(optimizer)  # skipped
    scaler.update()
    optimizer.zero_grad()
    seen.clear()
    mlp_loss(model, mlp_batch(2, 0, rank)).backward()
    return first, set(seen)


def test_micro_batches_kept_apart_are_unscaled_and_the_count_starts_over():
    assert run_on_ranks(_micro_batches, 2) == [({0}, {0})] * 2


def _resume(rank, world_size):
    model = shard_model(mlp())
    optimizer, scaler = sgd(model.parameters()), new_scaler("mlp")
    scaler.scale(mlp_loss(model, mlp_batch(0, 0, rank)) * 1e-6).backward()
    scaler.step(optimizer)
    scaler.update()
    resumed = torch.amp.GradScaler("cpu")
    resumed.load_state_dict(scaler.state_dict())
    return scaler.state_dict(), resumed.state_dict()


def test_the_scalers_state_is_equal_on_all_ranks():
    states = [state for pair in run_on_ranks(_resume, 2) for state in pair]
    assert states[0]["_growth_tracker"] == 1
    assert all(state == states[0] for state in states)
