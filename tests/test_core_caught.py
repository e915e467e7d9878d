"""Errors of a user's hook, or of a backward, that a forward catches and goes on after."""

import copy
import sys
import threading
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_fsdp import fully_shard, gradients, shard_model
from lightning_fsdp.core.engine import flat_parameter, unit
from lightning_fsdp.core.safety import recovery
from tests.support.parity import PLANS, assert_same_tensors
from tests.support.ranks import run_on_ranks
from tests.test_core_endings import fail_and_keep, sharded_and_plain

pytestmark = pytest.mark.usefixtures("kept_ranks")


class _Caught(Exception):  # noqa: N818 (it is none of this package)
    pass


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise _Caught


class _Catching(nn.Module):
    """Tries something that fails in every other call, in the middle of its forward."""

    def __init__(self, fails_in):
        super().__init__()
        torch.manual_seed(0)
        self.fails_in, self.num_calls = fails_in, 0
        self.layers = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        self.extra = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.full((5,), 0.5))

    def forward(self, x):
        self.num_calls += 1
        before, after = self.layers
        x = before(x) + self.scale
        try:
            if self.fails_in == "hook":
                x = x + self.extra(x)
            elif self.num_calls % 2 == 0:
                (after(_Failing.apply(self.extra(x))) * self.scale).sum().backward()
        except _Caught:
            pass
        return after(x * self.scale)

    def raise_before_the_call(self, *_):
        if self.num_calls % 2 == 0:
            raise _Caught


def _catch(rank, world_size, plan, fails_in):
    plain = _Catching(fails_in)
    model = shard_model(_Catching(fails_in), PLANS[plan], units=["Linear"])
    for each in (plain, model):
        # In front of the unit's own hook, which then does not run; torch calls what is to follow.
        hook = each.raise_before_the_call if fails_in == "hook" else lambda *_: None
        each.extra.register_forward_pre_hook(hook, prepend=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(4):
        outputs = [model(torch.full((2, 5), 1.0 + step + rank))]
        found = outputs[0].square().sum()
        found.backward()
        losses = []
        for r in range(world_size):
            plain.num_calls = step
            output = plain(torch.full((2, 5), 1.0 + step + r))
            plain.zero_grad()  # of the backward that failed; those of the other ranks are kept
            losses.append(output.square().sum())
        (sum(losses) / world_size).backward()
        torch.testing.assert_close(found, losses[rank])
        expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        actual = dict(gradients(model).full())
        assert_same_tensors({n: actual.pop(n) for n in expected}, expected, atol=1e-5)
        assert not actual
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("fails_in", ["hook", "backward"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_forward_goes_on_after_an_error_that_it_catches(plan, fails_in):
    run_on_ranks(_catch, 2, plan, fails_in)


def _clear_gradients_during_the_recovery(rank, world_size):
    """A thread of autograd's for CUDA reads ``.grad`` meanwhile; two at once may crash torch."""
    model, _ = sharded_and_plain()
    kept, has_ended, is_cleared = fail_and_keep(model, torch.ones(2, 6)), *_events(2)
    was_cleared, abandon = [], recovery.abandon_unit

    def abandon_late(*args, **kwargs):
        has_ended.set()
        was_cleared.append(is_cleared.wait(0.2))
        abandon(*args, **kwargs)

    thread = threading.Thread(target=kept.clear)
    with mock.patch.object(recovery, "abandon_unit", abandon_late):
        thread.start()
        has_ended.wait()
        model.zero_grad()
        is_cleared.set()
        thread.join()
    assert not any(was_cleared)


def _events(num):
    return (threading.Event() for _ in range(num))


def test_gradients_are_cleared_before_or_after_a_recovery_in_another_thread():
    run_on_ranks(_clear_gradients_during_the_recovery, 2)


def interrupt(rank, world_size, where):
    """Ctrl-C is noticed at a line of Python; training goes on as if there had been no such step."""
    code = {
        "a gradient is taken over": flat_parameter._take_over.__code__,
        "the last unit is closed": unit._replace.__code__,
    }[where]

    def interrupt_there(frame, event, argument):
        if event == "call" and frame.f_code is code and has_ended:
            sys.setprofile(None)
            raise KeyboardInterrupt

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.ones(2, 3)
    plain, has_ended = copy.deepcopy(model), []
    fully_shard(model[0])
    fully_shard(model)
    model(x).square().sum().backward()
    model[1].register_forward_hook(lambda *_: has_ended.append(True))
    sys.setprofile(interrupt_there)
    with pytest.raises(KeyboardInterrupt):
        model(x).square().sum().backward()
    model.zero_grad()
    for each in (model, plain):
        each(x).square().sum().backward()
    for name, parameter in plain.named_parameters():
        found = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(found, parameter.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("where", ["a gradient is taken over", "the last unit is closed"])
def test_gradients_after_ctrl_c_are_those_of_the_next_step(where):
    run_on_ranks(interrupt, 2, where)
