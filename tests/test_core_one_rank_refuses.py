"""What every rank calls, where one cannot: an error on every rank, at once, that names what it is.

A scenario for each function that is collective. The first rank is in trouble: it has dropped a
gradient that the other one has, passes other arguments, or its own check refuses. Without
agreement the other rank would wait for it, or get other bytes than it expects, which aborts it.
"""

from contextlib import nullcontext

import pytest
import torch

from lightning_fsdp import (
    full_optimizer_state_dict,
    full_state_dict,
    fully_shard,
    gradients,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    shard_model,
)
from tests.support.models import mlp, mlp_batch, mlp_loss
from tests.support.ranks import errors_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

SOON_S = 10.0  # the group's timeout is twice as long


class _Whole(torch.optim.Optimizer):
    """Steps whole tensors, as it takes a norm."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / p.grad.norm())


def _refuse(*_):
    raise ValueError("a hook of one rank")


def _train(model, rank, *, reduces=True):
    with nullcontext() if reduces else model.no_sync():
        mlp_loss(model, mlp_batch(0, 0, rank)).backward()


def _wait(model, rank):
    """Gradients of both ranks wait to be reduced; the first has dropped its own."""
    _train(model, rank, reduces=False)
    if rank == 0:
        model.zero_grad()


def _wait_beside(model, rank):
    """Likewise, of one unit: those of others are reduced."""
    model.second.set_requires_gradient_sync(False)
    _train(model, rank)
    if rank == 0:
        model.second.zero_grad()


def _drop(model, rank):
    """The first rank has dropped one reduced gradient."""
    _train(model, rank)
    if rank == 0:
        model.first.weight.grad = None


def _stepped(model, rank, optimizer):
    _train(model, rank)
    optimizer.step()
    return optimizer


# -- gradients -------------------------------------------------------------------------------------


def clip_grad_norm_(model, rank):
    _wait(model, rank)
    model.clip_grad_norm_(1.0)


def another_max_norm(model, rank):
    _train(model, rank)
    model.clip_grad_norm_(1.0 + rank)


def another_norm_type(model, rank):
    _train(model, rank)
    model.clip_grad_norm_(1.0, 2.0 + rank)


def a_max_norm_that_is_refused(model, rank):
    _train(model, rank)
    model.clip_grad_norm_(1.0 if rank else -1.0)


def another_error_if_nonfinite(model, rank):
    _train(model, rank)
    model.first.weight.grad.to_local().fill_(torch.nan)
    model.clip_grad_norm_(1.0, error_if_nonfinite=rank == 0)


def unscale_(model, rank):
    optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    _wait_beside(model, rank)
    scaler.unscale_(optimizer)


def step(model, rank):
    _wait(model, rank)
    torch.optim.SGD(model.parameters()).step()


def step_of_whole_tensors(model, rank):
    _wait(model, rank)
    _Whole(model.parameters()).step()


def gradients_norm(model, rank):
    _wait(model, rank)
    gradients(model).norm()


def another_norm_type_of_gradients(model, rank):
    _train(model, rank)
    gradients(model).norm(1.0 + rank)


def gradients_dot(model, rank):
    _wait(model, rank)
    gradients(model).dot(None)


def gradients_full(model, rank):
    _drop(model, rank)
    list(gradients(model).full())


def gradients_full_of_another_micro_batch(model, rank):
    with gradients(model).micro_batches("separate"):
        _train(model, rank)
    list(gradients(model).full(micro_batch=rank))


def one_gradient_full(model, rank):
    _drop(model, rank)
    gradients(model)["first.weight"].full()


def micro_batches(model, rank):
    _wait(model, rank)
    with gradients(model).micro_batches("local"):
        _train(model, rank)


# -- state -----------------------------------------------------------------------------------------


def full_state(model, rank):
    if rank == 0:
        model.register_state_dict_post_hook(_refuse)
    full_state_dict(model)


def full_state_on_another_rank(model, rank):
    full_state_dict(model, rank0_only=rank == 0)


def load_full_state(model, rank):
    state = full_state_dict(model)
    if rank == 0:
        del state["mix"]
    load_full_state_dict(model, state)


def full_optimizer_state(model, rank):
    optimizer = _stepped(model, rank, torch.optim.AdamW(model.parameters()))
    if rank == 0:
        del optimizer.state[model.mix]
    full_optimizer_state_dict(optimizer)


def full_optimizer_state_on_another_rank(model, rank):
    optimizer = _stepped(model, rank, torch.optim.AdamW(model.parameters()))
    full_optimizer_state_dict(optimizer, rank0_only=rank == 0)


def full_state_of_whole_tensors(model, rank):
    optimizer = _stepped(model, rank, _Whole(model.parameters()))
    if rank == 0:
        optimizer.register_state_dict_pre_hook(_refuse)
    full_optimizer_state_dict(optimizer)


def load_full_optimizer_state(model, rank):
    optimizer = _stepped(model, rank, torch.optim.AdamW(model.parameters()))
    state = full_optimizer_state_dict(optimizer)
    if rank == 0:
        del state["param_groups"]
    load_full_optimizer_state_dict(optimizer, state)


# -- the module ------------------------------------------------------------------------------------


def to_dtype(model, rank):
    _wait(model, rank)
    model.to(torch.bfloat16)


def another_dtype(model, rank):
    model.to(torch.bfloat16 if rank else torch.float16)


def sharding(model, rank):
    shard_model(mlp(), comm="auto" if rank else "nothing")


def unshard(model, rank):
    if rank == 0:
        model.second.unshard()
    _train(model, rank)


def set_requires_gradient_sync(model, rank):
    model.second.set_requires_gradient_sync(rank == 1)
    _train(model, rank)


def set_requires_gradient_sync_of_what_is_reduced_last(model, rank):
    model.first.set_requires_gradient_sync(rank == 1)
    _train(model, rank)


def set_gradient_divide_factor(model, rank):
    model.set_gradient_divide_factor(1.0 + rank)
    _train(model, rank)


SCENARIOS = {
    clip_grad_norm_: "expected a reduced gradient for clip_grad_norm_",
    another_max_norm: "expected the same arguments on every rank, got max_norm=",
    another_norm_type: "norm_type=",
    a_max_norm_that_is_refused: "max_norm=",
    another_error_if_nonfinite: "error_if_nonfinite=",
    unscale_: "GradScaler.unscale_",
    step: "expected a reduced gradient for an optimizer step",
    step_of_whole_tensors: "expected a reduced gradient for an optimizer step",
    gradients_norm: "norm of gradients: refused, GradientUnavailable: gradient of 'mix'",
    another_norm_type_of_gradients: "norm_type=",
    gradients_dot: "dot of gradients: refused, GradientUnavailable: gradient of 'mix'",
    gradients_full: "whole gradients: ['mix'",
    gradients_full_of_another_micro_batch: "whole gradients: refused, GradientUnavailable",
    one_gradient_full: "gradient of 'first.weight': refused, GradientUnavailable",
    micro_batches: "micro_batches('local'): expected no local gradients to wait",
    full_state: "full_state_dict, rank0_only=False: refused, ValueError: a hook of one rank",
    full_state_on_another_rank: "full_state_dict, rank0_only=True",
    load_full_state: "load_full_state_dict: refused, RuntimeError: Error(s) in loading state_dict",
    full_optimizer_state: "full_optimizer_state_dict",
    full_optimizer_state_on_another_rank: "full_optimizer_state_dict, rank0_only=True",
    full_state_of_whole_tensors: "refused, ValueError: a hook of one rank",
    load_full_optimizer_state: "load_full_optimizer_state_dict: refused, KeyError: 'param_groups'",
    to_dtype: "conversion: refused, RuntimeError: unit 'MLP' (rank 1): expected to change its",
    another_dtype: "conversion: ",
    sharding: "refused, ValueError: fully_shard: expected one of",
    unshard: "gather unit 'second'",
    set_requires_gradient_sync: "gradients of 'second.weight'",
    set_requires_gradient_sync_of_what_is_reduced_last: "gradients of 'first.weight'",
    set_gradient_divide_factor: "set_gradient_divide_factor",
}


def _one_in_trouble(rank, world_size, scenario):
    model = mlp()
    for unit in (model.first, model.second, model):
        fully_shard(unit)
    scenario(model, rank)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_what_one_rank_cannot_do_is_an_error_on_every_rank_at_once(scenario):
    # A rank that waits for the other one is killed when that time is over: another error.
    errors = errors_on_ranks(_one_in_trouble, 2, scenario, timeout_s=SOON_S)
    for rank, error in enumerate(errors):
        assert error is not None, f"rank {rank} went on"
        assert SCENARIOS[scenario] in error.message, f"rank {rank}: {error}"
