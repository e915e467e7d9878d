"""Optimizers that cannot follow their model into shards, named before anything changes."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FullyShardedDataParallel

import lightning_fsdp
from lightning_fsdp import optimizers_follow
from tests.support.built_before import params, shard
from tests.support.models import causal_lm, lm_loss, mlp, shard_lm_by_hand, tiny_gpt2, token_batch
from tests.support.parity import OPTIMIZERS
from tests.support.ranks import run_on_ranks


def test_a_parameter_that_the_model_does_not_have_is_refused_before_anything_changes():
    model, other = mlp(), nn.Linear(3, 2)
    optimizer = torch.optim.SGD(
        [{"params": [model.mix]}, {"params": [model.bonus, other.weight]}], lr=0.1
    )
    with (
        pytest.raises(
            ValueError,
            match=r"SGD: expected parameters of MLP only, got \(2, 3\) \(no name\) at position 1 "
            r"of group 1\. .*nn.ModuleList",
        ),
        optimizers_follow(model, optimizer),
    ):
        pytest.fail("entered")
    assert params(optimizer)[0] is model.mix
    optimizer.step()
    named = torch.optim.SGD([("elsewhere", other.weight)], lr=0.1)
    with pytest.raises(ValueError, match="elsewhere"), optimizers_follow(model, named):
        pytest.fail("entered")
    with optimizers_follow(nn.ModuleList([model, other]), optimizer):
        pass
    assert params(optimizer)[2] is other.weight


def test_something_else_than_an_optimizer_is_refused():
    with pytest.raises(TypeError, match="expected an optimizer, got"), optimizers_follow(mlp(), 3):
        pytest.fail("entered")


def test_a_step_inside_raises_and_nothing_sharded_changes_nothing():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    before = list(model.parameters()), copy.copy(optimizer.state[model.mix])
    with optimizers_follow(model, optimizer):
        with pytest.raises(RuntimeError, match="'mix', 'bonus', 'scale' and 6 more as they were"):
            optimizer.step()
        optimizer.zero_grad()
    assert all(a is b for a, b in zip(params(optimizer), before[0], strict=True))
    assert all(optimizer.state[model.mix][key] is value for key, value in before[1].items())
    optimizer.step()


def _stale(rank, world_size):
    model = causal_lm(tied=True)
    stale = torch.optim.AdamW(model.parameters())
    blocks = torch.optim.SGD(model.blocks[0].parameters(), lr=0.1)
    with optimizers_follow(model, blocks):
        shard(model, "fsdp2")
    lm_loss(model, token_batch(0, 0, rank)).backward()
    with pytest.raises(
        RuntimeError,
        match=r"AdamW: expected parameters that train, got 'embedding.weight', 'positions.weight', "
        r"'blocks.0.norm_1.weight' and \d+ more as they were before sharding.*optimizers_follow",
    ):
        stale.step()
    blocks.step()


def test_an_optimizer_that_was_left_behind_raises_at_its_first_step():
    run_on_ranks(_stale, 2)


def _untied(rank, world_size):
    model = causal_lm(tied=True)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with (
        pytest.raises(
            RuntimeError, match=r"expected 'embedding.weight' and 'head.weight' to be one parameter"
        ),
        optimizers_follow(model, optimizer),
    ):
        shard_lm_by_hand(model, fsdp.fully_shard)
    with pytest.raises(RuntimeError, match="expected parameters that train"):
        optimizer.step()


def test_a_tied_weight_that_sharding_has_cut_in_two_is_named():
    run_on_ranks(_untied, 2)


def _unusual_state(rank, world_size):
    with torch.device("meta"):
        model = causal_lm()
    with (
        pytest.raises(ValueError, match=r"state 'sum' of 'embedding.weight': expected values"),
        optimizers_follow(model, torch.optim.Adagrad(model.parameters())),
    ):
        shard(model, "fsdp2")

    model = causal_lm()
    optimizer = torch.optim.Adafactor(model.parameters())
    lm_loss(model, token_batch(0, 0, rank)).backward()
    optimizer.step()
    with (
        pytest.raises(
            NotImplementedError,
            match=r"state 'row_var' of 'embedding.weight' to be a plain tensor .* got Tensor",
        ),
        optimizers_follow(model, optimizer),
    ):
        shard(model, "fsdp2")

    model = causal_lm()
    optimizer = torch.optim.Adam(model.parameters())
    lm_loss(model, token_batch(0, 0, rank)).backward()
    optimizer.step()
    with (
        pytest.raises(NotImplementedError, match=r"state 'exp_avg' of .* for a Parameter"),
        optimizers_follow(model, optimizer),
    ):
        FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))

    model = causal_lm()
    with (
        pytest.raises(RuntimeError, match=r"expected a parameter where 'embedding.weight' was"),
        optimizers_follow(model, torch.optim.Adam(model.parameters())),
    ):
        FullyShardedDataParallel(model, use_orig_params=False, device_id=torch.device("cpu"))


def test_state_that_cannot_be_sharded_and_parameters_that_went_are_named():
    run_on_ranks(_unusual_state, 2)


def _meta_state_in_the_core(rank, world_size):
    with torch.device("meta"):
        model = causal_lm()
    optimizer = torch.optim.Adagrad(model.parameters())
    lightning_fsdp.shard_model(model)
    lm_loss(model, token_batch(0, 0, rank)).backward()
    with pytest.raises(ValueError, match=r"'sum' of 'embedding.weight': expected values"):
        optimizer.step()


def test_the_core_names_state_that_was_allocated_on_the_meta_device():
    run_on_ranks(_meta_state_in_the_core, 2)


def _shard_half(model):
    fsdp.fully_shard(model.transformer.h[0])
    raise AssertionError("something different")


def _interrupted(rank, world_size):
    """An error while sharding is the one that is seen, and the optimizer holds what there is."""
    model = tiny_gpt2()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with pytest.raises(AssertionError, match="different"), optimizers_follow(model, optimizer):
        _shard_half(model)
    assert [id(p) for p in params(optimizer)] == [id(p) for p in model.parameters()]


def test_an_error_inside_leaves_the_optimizer_with_what_the_model_has():
    run_on_ranks(_interrupted, 2)
