"""Graphs that are hard for a sharding engine: each trains as the unsharded model does.

Every case has a model, how it is sharded (each child a unit of its own), and a loss; three steps on
different data per rank, against one process that has all ranks' losses.
"""

import contextlib

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from lightning_fsdp import MixedPrecisionPolicy, fully_shard, shard_model
from lightning_fsdp.core.engine.structures import tensors_in
from tests.support.hard_graphs import (
    BUILDERS,
    Dtypes,
    Result,
    Structured,
    Writer,
    batch_of,
    build,
    loss_of,
    shard,
)
from tests.support.models import mlp_batch
from tests.support.one_exchange import train_on_rank
from tests.support.parity import (
    OPTIMIZERS,
    PLANS,
    assert_ranks_agree,
    assert_traces_match,
    make_batches,
    train_reference,
)
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")


def _train_all(rank, world_size, plan):
    traces = {}
    for name in BUILDERS:
        batches = make_batches(batch_of, num_steps=3, num_micro_batches=2, world_size=world_size)
        model = build(name)
        is_one = isinstance(model, Dtypes)
        model = shard_model(model, PLANS[plan], units=["Dtypes"]) if is_one else shard(model, plan)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        traces[name] = train_on_rank(model, batches, loss_of, optimizer, rank, accumulation="sum")
    return traces


@pytest.mark.parametrize(("world_size", "plan"), [(2, "zero2"), (3, "zero3")])
def test_hard_graphs_train_as_unsharded_models_do(world_size, plan):
    by_rank = run_on_ranks(_train_all, world_size, plan)
    batches = make_batches(batch_of, num_steps=3, num_micro_batches=2, world_size=world_size)
    for name in BUILDERS:
        expected = train_reference(build(name), batches, loss_of, OPTIMIZERS["adamw"], joined=False)
        traces = [each[name] for each in by_rank]
        assert_ranks_agree(traces, name)
        # bf16 gradients of several ranks and micro-batches are rounded before they are added.
        atol = 4e-3 if name == "bf16 beside fp32" else 1e-6
        assert_traces_match(traces[0], expected, atol=atol, what=name)


def _passed(rank, world_size):
    block = fully_shard(Writer(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    inputs, seen = torch.rand(2, 7, requires_grad=True), []
    state = {"now": Result(inputs, "a word"), "whole": (inputs,), "kept": inputs}
    for fails in (False, True):
        state["now"].hidden = inputs
        seen = None if fails else seen  # None has no append
        with pytest.raises(AttributeError) if fails else contextlib.nullcontext():
            block(state, seen=seen)
        assert state["kept"] is inputs
        assert state["whole"][0] is inputs
        assert (state["now"].hidden is inputs) == fails
    return [tensor.dtype for tensor in tensors_in(state["now"])]


def test_what_a_caller_passes_in_a_dictionary_it_gets_back():
    assert run_on_ranks(_passed, 2) == [[torch.float32]] * 2


class Nested(nn.Module):
    """Ends in a unit that a step may leave out, and gives that one's output on where it does."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.extra = inner, nn.Parameter(torch.rand(7))

    def forward(self, inputs, uses_extra):
        outputs = self.inner(inputs, uses_extra)
        return outputs * self.extra if uses_extra else outputs


class Innermost(nn.Linear):
    def forward(self, inputs, uses_extra):
        return super().forward(inputs)


class Around(nn.Module):
    """Three units in each other, which end in one node where no extra is used."""

    def __init__(self):
        super().__init__()
        self.first, self.nested = nn.Linear(7, 7), Nested(Nested(Innermost(7, 7)))

    def forward(self, inputs, uses_extra):
        return self.nested(torch.tanh(self.first(inputs)), uses_extra)


def around():
    torch.manual_seed(1)
    return Around()


def loss_around(model, batch):
    return model(batch["inputs"], batch["uses_extra"]).square().mean()


def train_around(rank, world_size):
    def make_batch(step, micro_batch, rank):
        return {**mlp_batch(step, micro_batch, rank), "uses_extra": rank == 0}

    batches = make_batches(make_batch, num_steps=3, num_micro_batches=1, world_size=world_size)
    expected = train_reference(around(), batches, loss_around, OPTIMIZERS["sgd"], joined=False)
    model = around()
    for module in (model.first, model.nested.inner.inner, model.nested.inner, model.nested, model):
        fully_shard(module)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    trace = train_on_rank(model, batches, loss_around, optimizer, rank)
    assert_traces_match(trace, expected, atol=1e-6)


def test_units_that_end_in_one_node_on_some_ranks_are_entered_from_outside_on_all():
    run_on_ranks(train_around, 2, group_timeout_s=10)


def _several_graphs(rank, world_size, plan, how):
    model, reference = shard(build("branches"), plan), build("branches")
    for step in range(2):
        mine = [batch_of(step, micro, rank) for micro in range(2)]
        every = [[batch_of(step, micro, r) for micro in range(2)] for r in range(world_size)]
        _backward(model, mine, how, 1.0)
        for batches in every:
            _backward(reference, batches, how, 1 / world_size)
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(
                model.get_parameter(name).grad.full_tensor(), parameter.grad, rtol=0, atol=2e-7
            )
        model.zero_grad()
        reference.zero_grad()


def _backward(model, batches, how, factor):
    losses = [loss_of(model, batch) * factor for batch in batches]
    if how == "two forwards, one backward":
        sum(losses).backward()
    elif how == "two forwards, backwards in the other order":
        for loss in reversed(losses):
            loss.backward()
    else:
        losses[0].backward(retain_graph=True)
        losses[0].backward()
        del losses


@pytest.mark.parametrize(
    "how",
    [
        "two forwards, one backward",
        "two forwards, backwards in the other order",
        "one graph, two backwards",
    ],
)
@pytest.mark.parametrize("plan", PLANS)
def test_several_graphs_may_be_alive(plan, how):
    run_on_ranks(_several_graphs, 2, plan, how)


def _custom_output(rank, world_size, plan):
    """Nothing can look into the output: right, or an error, and the next forward is right."""
    torch.manual_seed(3)
    model = shard(Structured("custom"), plan)
    model._hidden = lambda out: out.hidden
    reference = copy_plain(Structured, "custom")
    error = None
    try:
        loss_of(model, batch_of(0, 0, 0)).backward()
    except RuntimeError as caught:
        error = str(caught)
    if error is None:
        loss_of(reference, batch_of(0, 0, 0)).backward()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(
                model.get_parameter(name).grad.full_tensor(), parameter.grad, rtol=0, atol=2e-7
            )
    inputs = batch_of(1, 0, 0)["inputs"]
    with torch.no_grad():  # and whatever it was, the next forward is right
        torch.testing.assert_close(model(inputs), reference(inputs), rtol=0, atol=1e-6)
    return error


def copy_plain(cls, *args):
    torch.manual_seed(3)
    model = cls(*args)
    model._hidden = lambda out: out.hidden
    return model


@pytest.mark.parametrize("plan", PLANS)
def test_an_output_that_nothing_can_look_into_is_right_or_an_error(plan):
    errors = run_on_ranks(_custom_output, 2, plan)
    assert errors[0] == errors[1]


def _differentiate_forwards(rank, world_size, plan):
    """The tangent of the outputs, with a graph and without, and the gradient of the outputs."""
    model, reference = shard(build("twice"), plan), build("twice")
    batch, others = batch_of(0, 0, rank), [batch_of(0, 0, other) for other in range(world_size)]
    tangent = torch.full_like(batch["inputs"], 0.5)
    for step in range(2):
        for has_graph in (True, False):
            with torch.set_grad_enabled(has_graph), forward_ad.dual_level():
                inputs = forward_ad.make_dual(batch["inputs"], tangent)
                ours, theirs = (forward_ad.unpack_dual(m(inputs)) for m in (model, reference))
                torch.testing.assert_close(ours.tangent, theirs.tangent, rtol=0, atol=1e-6)
        with forward_ad.dual_level():
            outputs = model(forward_ad.make_dual(batch["inputs"], tangent), step)
            forward_ad.unpack_dual(outputs).primal.square().mean().backward()
        for other in others:
            (reference(other["inputs"], step).square().mean() / world_size).backward()
        for name, parameter in reference.named_parameters():
            ours = model.get_parameter(name).grad
            assert (ours is None) == (parameter.grad is None), name
            if ours is not None:
                torch.testing.assert_close(ours.full_tensor(), parameter.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("plan", PLANS)
def test_tangents_of_inputs_go_through(plan):
    run_on_ranks(_differentiate_forwards, 2, plan)
