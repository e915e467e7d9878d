"""A pass that ends early, or where nobody announces it, leaves no unit whole and no leaf behind.

After each forward and each backward of ZeRO-3, every unit is sharded, and modules hold the user's
own parameters.
"""

import copy
import itertools
import threading
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_fsdp import (
    full_state_dict,
    fully_shard,
    load_full_state_dict,
    register_forward_method,
    shard_model,
)
from lightning_fsdp.core.engine import torch_internals
from lightning_fsdp.core.engine.home import FlatBuffer
from lightning_fsdp.core.safety import recovery
from lightning_fsdp.core.sharded_module import units_in
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor
from tests.support.ranks import run_on_ranks


def assert_nothing_is_whole(model):
    for unit in units_in(model):
        assert not unit.is_held, unit
        for flat_param in unit.flat_params:
            assert flat_param.buffer.flat.untyped_storage().nbytes() == 0, flat_param
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, ShardedTensor), name


class Layers(nn.Module):
    """Runs layers ``[first, last)``; no gradient goes to those below ``first_trained``."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, last=4, first_trained=0):
        for index in range(last):
            x = self.layers[index](x)
            if index + 1 == first_trained:
                x = x.detach()
        return x.sum()


def end_early(rank, world_size):
    model = Layers()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, reshard_after_forward=True)
    x = torch.ones(2, 6)
    model(x).backward()  # each unit is followed by the next from now on
    for number in (3, 2, 1):
        with torch.no_grad():
            model(x, number)
        assert_nothing_is_whole(model)
        loss = model(x, number)
        assert_nothing_is_whole(model)
        loss.backward()
    for first in (1, 2, 3):
        model(x).backward()
        model(x, first_trained=first).backward()
        assert_nothing_is_whole(model)


def test_what_was_gathered_ahead_for_units_that_do_not_run_is_freed():
    run_on_ranks(end_early, 2)


class Halves(nn.Module):
    """Two modules of one unit: only one of them runs, or is computed again."""

    def __init__(self, how):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.how = how

    def forward(self, x):
        if self.how == "one":
            return self.first(x).sum()
        return checkpoint(self.second, self.first(x), use_reentrant=False).sum()


def run_halves(rank, world_size, how):
    model = Halves(how)
    fully_shard([model.first, model.second], reshard_after_forward=True)
    fully_shard(model)
    for x in (torch.ones(2, 6), torch.ones(2, 6, requires_grad=True)):
        for _ in range(2):
            with torch.no_grad():
                model(x)
            assert_nothing_is_whole(model)
            loss = model(x)
            # From the second step on it stays for the backward, which needs it first.
            assert [unit.name for unit in units_in(model) if unit.is_held] in ([], ["first"])
            loss.backward()
            assert_nothing_is_whole(model)


@pytest.mark.parametrize("how", ["one", "recomputed"])
def test_a_unit_of_several_modules_is_freed_without_all_of_them(how):
    run_on_ranks(run_halves, 2, how)


class Taught(nn.Module):
    """The teacher is computed again with the student, and has no backward."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 6), nn.Linear(6, 6)

    def body(self, x):
        return self.student(x) * self.teacher(x).detach()

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False).sum()


def run_taught(rank, world_size):
    model = Taught()
    for module in (model.student, model.teacher):
        fully_shard(module)
    fully_shard(model, reshard_after_forward=True)
    for _ in range(2):
        loss = model(torch.ones(2, 6))
        assert_nothing_is_whole(model)
        loss.backward()
        assert_nothing_is_whole(model)


def test_a_unit_that_is_computed_again_and_has_no_backward_is_freed():
    run_on_ranks(run_taught, 2)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("in the backward")


def fail_in_backward(rank, world_size):
    model = Layers()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, reshard_after_forward=True)
    x = torch.ones(2, 6)
    model(x).backward()
    handle = model.layers[0].register_forward_hook(lambda *event: Failing.apply(event[2]))
    before = full_state_dict(model)
    with pytest.raises(ValueError, match="in the backward") as caught:
        model(x).backward()
    assert caught.value is not None  # it is alive, and so is what its traceback refers to
    handle.remove()
    assert_nothing_is_whole(model)
    assert all(isinstance(parameter, ShardedTensor) for parameter in model.parameters())
    load_full_state_dict(model, before)  # as one does to go on
    model.double().float()
    with torch.no_grad():
        model(x)
    assert_nothing_is_whole(model)
    for unit in units_in(model):
        for flat_param in unit.flat_params:
            assert flat_param.gradients == "none", flat_param


def test_a_backward_that_failed_leaves_nothing_behind():
    run_on_ranks(fail_in_backward, 2)


def sharded_and_plain():
    """Two models of the same weights, the first of them sharded."""
    torch.manual_seed(0)
    model, plain = Layers(), Layers()
    plain.load_state_dict(model.state_dict())
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, reshard_after_forward=True)
    return model, plain


def fail_and_keep(model, x):
    """Fail in the backward; what the engine keeps of it, as its threads for CUDA may for a moment.

    Returns:
        A list, to be cleared by whoever is the last to refer to it.
    """
    kept, call_at_end = [], torch_internals.call_at_end_of_backward
    torch_internals.call_at_end_of_backward = lambda call: (kept.append(call), call_at_end(call))
    handle = model.layers[0].register_forward_hook(lambda *event: Failing.apply(event[2]))
    with pytest.raises(ValueError, match="in the backward"):
        model(x).backward()
    torch_internals.call_at_end_of_backward = call_at_end
    handle.remove()
    return kept


def fail_while_the_engine_keeps_its_callback(rank, world_size):
    (model, plain), x = sharded_and_plain(), torch.ones(2, 6)
    train_alike(model, plain, x, before_the_look=fail_and_keep(model, x).clear)


def fail_while_a_thread_of_the_engine_cleans_up(rank, world_size):
    model, plain = sharded_and_plain()
    x, has_begun, is_inside = torch.ones(2, 6), threading.Event(), threading.Event()
    kept = fail_and_keep(model, x)

    def abandon_when_the_forward_is_inside(*args, **kwargs):
        has_begun.set()
        is_inside.wait(0.5)
        abandon(*args, **kwargs)

    abandon, thread = recovery.abandon_unit, threading.Thread(target=kept.clear)

    def let_it_go_on(*args):
        is_inside.set()
        thread.join()

    with mock.patch.object(recovery, "abandon_unit", abandon_when_the_forward_is_inside):
        thread.start()
        has_begun.wait()
        model.layers[0].register_forward_pre_hook(let_it_go_on)
        train_alike(model, plain, x)


def train_alike(model, plain, x, before_the_look=lambda: None):
    losses = [module(x) for module in (model, plain)]
    model.zero_grad()
    for loss in losses:
        loss.backward()
    before_the_look()
    assert_nothing_is_whole(model)
    for name, parameter in plain.named_parameters():
        found = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(found, parameter.grad, rtol=0, atol=1e-6)


def test_a_forward_after_a_backward_that_failed_starts_from_nothing():
    run_on_ranks(fail_while_the_engine_keeps_its_callback, 2)
    run_on_ranks(fail_while_a_thread_of_the_engine_cleans_up, 2)


def fail_to_gather(rank, world_size):
    """Once there is no memory for a whole copy; the next call finds everything as it was."""
    model, plain = sharded_and_plain()
    x, allocate = torch.ones(2, 6), FlatBuffer.allocate
    for number in range(5):  # the third whole copy of a pass is prefetched from the second one on
        calls = itertools.count()

        def allocate_or_fail(self, calls=calls, number=number):
            if next(calls) == number:
                raise MemoryError("no memory, once")
            allocate(self)

        FlatBuffer.allocate = allocate_or_fail
        with pytest.raises(MemoryError, match="no memory, once"):
            model(x).backward()
        FlatBuffer.allocate = allocate
        assert_nothing_is_whole(model)
    model(x).backward()
    plain(x).backward()
    assert_nothing_is_whole(model)
    for name, parameter in plain.named_parameters():
        found = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(found, parameter.grad, rtol=0, atol=1e-6)


def fail_to_unshard(rank, world_size):
    """Where there is no memory for the second of a unit's whole copies."""
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 6), torch.ones(2, 6)
    layer.bias.requires_grad_(False)
    expected, allocate, calls = layer(x).detach(), FlatBuffer.allocate, itertools.count()
    fully_shard(layer)

    def allocate_or_fail(self):
        if next(calls) == 1:
            raise MemoryError("no memory, once")
        allocate(self)

    FlatBuffer.allocate = allocate_or_fail
    with pytest.raises(MemoryError, match="no memory, once"):
        layer.unshard()
    FlatBuffer.allocate = allocate
    assert_nothing_is_whole(layer)
    assert torch.equal(layer(x), expected)


def test_an_unshard_that_fails_leaves_everything_as_it_was():
    run_on_ranks(fail_to_unshard, 2)


def test_a_gather_that_fails_leaves_everything_as_it_was():
    run_on_ranks(fail_to_gather, 2)


class StepsByItself(Layers):
    def step(self, x):
        self.layers[0](x).sum().backward()
        self.layers[1](x).sum().backward()


def manual_step(rank, world_size):
    """Gathers of a step that runs one layer forward and backward, and then another one."""
    model = StepsByItself()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, reshard_after_forward=True)
    register_forward_method(model, "step")
    gathers = model.layers[0].weight.spec.communicator.traffic["all_gather"]
    numbers = []
    for _ in range(3):
        before = gathers.calls
        model.step(torch.ones(2, 6, requires_grad=True))
        numbers.append(gathers.calls - before)
    return numbers


def test_what_follows_a_backward_inside_of_a_forward_is_not_gathered_ahead():
    for numbers in run_on_ranks(manual_step, 2):
        assert numbers == [4] * 3  # two units, for their forward and for their backward


def take_layers_out(rank, world_size):
    """Units whose modules are gone hinder neither an outer call nor a copy."""
    inner = shard_model(Layers(), units=["Linear"])
    inner.layers = inner.layers[:2]
    model = fully_shard(nn.Sequential(inner, nn.Linear(1, 1)))
    copied = copy.deepcopy(model)
    for each in (model, copied):
        each[0](torch.ones(2, 6), last=2).backward()
        assert all(p.grad is not None for p in each[0].parameters())


def test_layers_may_be_taken_out_of_a_model():
    run_on_ranks(take_layers_out, 2)
