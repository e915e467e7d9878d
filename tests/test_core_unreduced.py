"""Gradients that wait to be reduced: refused, zeroed, or of a model that is gone."""

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_fsdp import GradientUnavailable, full_state_dict, fully_shard, gradients, shard_model
from lightning_fsdp.core.engine.hooks import hooks_of
from lightning_fsdp.engines.undo import give_back
from tests.support.models import (
    mlp,
    mlp_batch,
    mlp_loss,
)
from tests.support.parity import (
    OPTIMIZERS,
    assert_same_tensors,
    whole,
)
from tests.support.ranks import errors_on_ranks, run_on_ranks
from tests.support.replicas import mesh_of

pytestmark = pytest.mark.usefixtures("kept_ranks")


def _use_unreduced(rank, world_size, how):
    model = shard_model(mlp())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with model.no_sync():
        mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    if how == "step":
        optimizer.step()
    else:
        model.clip_grad_norm_(1.0)


@pytest.mark.parametrize(
    ("how", "what"), [("step", "an optimizer step"), ("clip", "clip_grad_norm_")]
)
def test_unreduced_gradients_are_refused(how, what):
    for error in errors_on_ranks(_use_unreduced, 2, how):
        assert error is not None, f"{how} on unreduced gradients went through"
        assert error.type_name == "RuntimeError"
        assert f"expected a reduced gradient for {what}, got one rank's own" in error.message


def _step_with_means_of_a_replica(rank, world_size):
    model = shard_model(mlp(), mesh=mesh_of((2, 1)))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    model.set_requires_all_reduce(False)
    mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    if rank == 1:
        optimizer.zero_grad()
    optimizer.step()


def test_means_of_a_replica_are_refused_on_all_ranks_though_one_has_dropped_them():
    for error in errors_on_ranks(_step_with_means_of_a_replica, 2):
        assert error is not None, "a rank has stepped alone"
        assert "for an optimizer step, got one replica's" in error.message


def _bonus_backward(model, rank, uses_bonus):
    model(mlp_batch(0, 0, rank)["inputs"], uses_bonus).sum().backward()


def _zero_in_place(rank, world_size, has_reduced, then):
    """Rank 0 alone has a local gradient of ``bonus`` when all gradients are zeroed."""
    model = shard_model(mlp())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    if has_reduced:
        _bonus_backward(model, rank, True)
    with model.no_sync():
        _bonus_backward(model, rank, rank == 0)
    optimizer.zero_grad(set_to_none=False)
    if then == "backward":
        _bonus_backward(model, rank, False)
    elif then == "unsynced backward":
        with model.no_sync():
            _bonus_backward(model, rank, False)
        model.zero_grad(set_to_none=False)
    optimizer.step()
    return {name: whole(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("then", ["step", "backward", "unsynced backward"])
@pytest.mark.parametrize("has_reduced", [False, True])
def test_gradients_zeroed_in_place_are_zeros_on_every_rank(has_reduced, then):
    """As in one process: weight decay is applied with them."""
    model = mlp()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    _bonus_backward(model, 0, True)
    optimizer.zero_grad(set_to_none=False)
    if then == "backward":
        for rank in range(2):
            (model(mlp_batch(0, 0, rank)["inputs"], False).sum() / 2).backward()
    optimizer.step()
    expected = {name: whole(p) for name, p in model.named_parameters()}
    for ours in run_on_ranks(_zero_in_place, 2, has_reduced, then):
        assert_same_tensors(ours, expected, atol=1e-7)


def _step_with_unreduced_on_one_rank(rank, world_size):
    model = shard_model(mlp())
    with model.no_sync():
        _bonus_backward(model, rank, rank == 0)
    OPTIMIZERS["adamw"]([model.bonus]).step()


def test_a_gradient_that_waits_on_one_rank_is_refused_on_every_rank():
    for error in errors_on_ranks(_step_with_unreduced_on_one_rank, 2):
        assert error is not None
        assert error.type_name == "RuntimeError"
        assert "gradient of 'bonus'" in error.message


class _Hiding(nn.Module):
    """Its output is an object that nothing can look into: only arriving gradients tell of it."""

    def __init__(self, shared):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        self.layer.weight = shared

    def forward(self, x):
        return SimpleNamespace(value=self.layer(x))


def _train_what_is_left(rank, world_size):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 4))
    plain = nn.Parameter(weight.detach().clone())
    first, second = fully_shard(_Hiding(weight)), fully_shard(_Hiding(weight))
    del second
    first(torch.ones(2, 4)).value.square().sum().backward()
    torch.nn.functional.linear(torch.ones(2, 4), plain).square().sum().backward()
    torch.testing.assert_close(weight.grad.full_tensor(), plain.grad, rtol=0, atol=1e-4)


def _noting(seen, what, event):
    def note(flat_param):
        seen.append(what)
        event(flat_param)

    return note


def _watched_when_another_is_gone(rank, world_size):
    weight = nn.Parameter(torch.randn(4, 4))
    first, second = fully_shard(_Hiding(weight)), fully_shard(_Hiding(weight))
    watchers, seen = hooks_of(first).schedule.watchers, []
    watchers.before_whole = _noting(seen, "whole", watchers.before_whole)
    watchers.on_freed = _noting(seen, "freed", watchers.on_freed)
    of_second = weakref.ref(hooks_of(second).schedule.watchers)
    del second
    assert of_second() is None  # without the collector
    first(torch.ones(2, 4)).value.sum().backward()
    first.reshard()
    return seen


def test_what_hangs_on_a_model_sees_its_weight_when_another_that_shares_it_is_gone():
    assert run_on_ranks(_watched_when_another_is_gone, 2) == [["whole", "freed"]] * 2


def test_a_model_trains_on_when_another_that_shares_its_weight_is_gone():
    run_on_ranks(_train_what_is_left, 2)


def _give_back_while_they_are_kept(rank, world_size):
    model = shard_model(mlp())
    expected = full_state_dict(model)
    name = next(iter(expected))
    with model.no_sync():
        mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    kept = [parameter.grad for parameter in model.parameters()]
    dropped = weakref.ref(kept[0])
    gc.disable()  # an error that was caught has kept nothing alive
    try:
        with contextlib.suppress(GradientUnavailable):
            gradients(model)[name].full()
    finally:
        model.zero_grad()
        del kept[0]
        is_gone = dropped() is None
        gc.enable()
    give_back(model)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert_same_tensors(dict(model.named_parameters()), expected, atol=0)
    return is_gone and len(kept)


def test_a_model_is_given_back_while_somebody_keeps_them():
    assert all(run_on_ranks(_give_back_while_they_are_kept, 2))
