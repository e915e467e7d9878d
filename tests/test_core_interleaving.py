"""Forwards and backwards in an order of the user's own: of some units, of many micro-batches at
once, in pieces, and on ranks that are late. Gradients are those of plain torch.
"""

import gc
import itertools
import random
import time
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_fsdp import fully_shard, gradients, shard_model
from lightning_fsdp.core.engine.communicator import Communicator
from tests.support.models import TASKS, causal_lm, lm_loss, tied_lm, token_batch
from tests.support.one_exchange import train_on_rank
from tests.support.parity import (
    OPTIMIZERS,
    PLANS,
    assert_ranks_agree,
    assert_same_tensors,
    assert_traces_match,
    make_batches,
    train_reference,
    whole,
)
from tests.support.ranks import PLAIN, run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")


def gradients_of(model):
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def assert_gradients_and_clear(model, reference, atol, what):
    assert_same_tensors(gradients_of(model), gradients_of(reference), atol=atol, what=what)
    for each in (model, reference):
        each.zero_grad()


# --- several micro-batches in flight ---

# The first stage of a pipeline of three: forwards ahead, then one of each, then the rest.
ONE_FORWARD_ONE_BACKWARD = "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
# What autograd never does by itself: the graphs end in another order than they began in.
CROSSED = "F0 F1 B1 F2 F3 B3 B0 B2"
ORDERS = {"1F1B": ONE_FORWARD_ONE_BACKWARD, "crossed": CROSSED}


def run_in_order(order, loss_of, before_last=lambda: None):
    *events, last = order.split()
    losses = {}

    def run(event):
        kind, index = event[0], int(event[1])
        if kind == "F":
            losses[index] = loss_of(index)
        else:
            losses.pop(index).backward()

    for event in events:
        run(event)
    before_last()
    run(last)


def _interleave(rank, world_size, plan, order, accumulation):
    model, reference = shard_model(tied_lm(), PLANS[plan]), tied_lm()
    for step in range(2):
        model.set_requires_gradient_sync(accumulation == "sum")
        run_in_order(
            order,
            lambda index: lm_loss(model, token_batch(step, index, rank)),  # noqa: B023
            lambda: model.set_requires_gradient_sync(True),
        )
        for r in range(world_size):
            run_in_order(
                order,
                lambda index: lm_loss(reference, token_batch(step, index, r)) / world_size,  # noqa: B023
            )
        assert_gradients_and_clear(model, reference, 2e-6, f"step {step}")


@pytest.mark.parametrize("accumulation", ["local", "sum"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("plan", PLANS)
def test_micro_batches_in_flight_do_not_mix(plan, order, accumulation):
    run_on_ranks(_interleave, 2, plan, ORDERS[order], accumulation)


# --- some of the units ---


def _body_and_head():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(7, 15), nn.Tanh(), nn.Linear(15, 7), nn.Linear(7, 5))


def _inputs(step, rank):
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(10 * step + rank))


def _backward_in_chunks(model, inputs, before_last=lambda: None):
    """The head's activations are never whole: each part of them has a backward of its own."""
    hidden = model[:3](inputs)
    cut = hidden.detach().requires_grad_()
    chunks = cut.chunk(3)
    for chunk in chunks:
        if chunk is chunks[-1]:
            before_last()
        F.cross_entropy(model[3](chunk), torch.arange(len(chunk)), reduction="sum").backward()
    hidden.backward(cut.grad)


def _chunk_the_loss(rank, world_size, plan, syncs_every_chunk):
    model, reference = _body_and_head(), _body_and_head()
    for child in model:
        if isinstance(child, nn.Linear):
            fully_shard(child, reshard_after_forward=plan == "zero3")
    fully_shard(model)
    for step in range(3):
        model[3].set_requires_gradient_sync(syncs_every_chunk)
        _backward_in_chunks(
            model, _inputs(step, rank), lambda: model[3].set_requires_gradient_sync(True)
        )
        for r in range(world_size):
            _backward_in_chunks(reference, _inputs(step, r))
        for parameter in reference.parameters():
            parameter.grad /= world_size
        assert_gradients_and_clear(model, reference, 1e-6, f"step {step}")


@pytest.mark.parametrize("syncs_every_chunk", [True, False])
@pytest.mark.parametrize("plan", PLANS)
def test_a_loss_may_be_computed_in_chunks_that_have_backwards_of_their_own(plan, syncs_every_chunk):
    run_on_ranks(_chunk_the_loss, 2, plan, syncs_every_chunk)


def _call_inner_units(rank, world_size, plan):
    """Units called by themselves before the model as a whole ever was, between, and after."""
    model, reference = shard_model(causal_lm(), PLANS[plan]), causal_lm()
    hidden = [torch.randn(2, 9, 20, generator=torch.Generator().manual_seed(r)) for r in range(2)]

    def two_blocks(each, r):
        return each.blocks[2](each.blocks[0](hidden[r])).square().mean()

    losses = {
        "two blocks": two_blocks,
        "the model": lambda each, r: lm_loss(each, token_batch(0, 0, r)),
        "one block": lambda each, r: each.blocks[1](hidden[r]).square().mean(),
        "both": lambda each, r: lm_loss(each, token_batch(0, 1, r)) + two_blocks(each, r),
        "the embedding": lambda each, r: each.embedding(torch.arange(5 + r)).square().mean(),
    }
    for _ in range(2):
        for what, loss_of in losses.items():
            loss_of(model, rank).backward()
            for r in range(world_size):
                (loss_of(reference, r) / world_size).backward()
            assert_same_tensors(gradients_of(model), gradients_of(reference), atol=2e-6, what=what)
        for each in (model, reference):
            each.zero_grad()


@pytest.mark.parametrize("plan", PLANS)
def test_inner_units_may_be_called_by_themselves(plan):
    run_on_ranks(_call_inner_units, 2, plan)


class _NoInputs(nn.Module):
    """What it computes with is its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(7, 15), nn.Linear(15, 3)
        self.register_buffer("inputs", _inputs(0, 0))

    def forward(self):
        return self.second(torch.tanh(self.first(self.inputs)))


def _no_inputs():
    torch.manual_seed(4)
    return _NoInputs()


def _train_without_inputs(rank, world_size, plan):
    model, reference = shard_model(_no_inputs(), PLANS[plan]), _no_inputs()
    optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in (model, reference)]
    for step in range(3):
        (model().square().mean() * (rank + 1)).backward()
        (reference().square().mean() * (world_size + 1) / 2).backward()
        assert_same_tensors(gradients_of(model), gradients_of(reference), atol=1e-6, what=str(step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("plan", PLANS)
def test_a_model_whose_forward_takes_nothing(plan):
    run_on_ranks(_train_without_inputs, 2, plan)


# --- sharded one by one, among modules that come and go ---


def _build_and_shard_layer_by_layer(reshard_after_forward):
    """Each layer is sharded as soon as it is built; what is dropped meanwhile leaves its ``id``."""
    torch.manual_seed(6)
    layers = []
    for _ in range(4):
        layers.append(fully_shard(nn.Linear(7, 7), reshard_after_forward=reshard_after_forward))
        state = torch.get_rng_state()
        dropped = fully_shard(nn.Linear(7, 7))
        dropped(torch.ones(1, 7)).sum().backward()
        del dropped
        gc.collect()
        torch.set_rng_state(state)
    return fully_shard(nn.Sequential(*layers))


def _train_layer_by_layer(rank, world_size, plan):
    model = _build_and_shard_layer_by_layer(plan == "zero3")
    torch.manual_seed(6)
    reference = nn.Sequential(*(nn.Linear(7, 7) for _ in range(4)))
    assert len(list(model.parameters())) == 8
    for step in range(2):
        model(_inputs(step, rank)).square().mean().backward()
        for r in range(world_size):
            (reference(_inputs(step, r)).square().mean() / world_size).backward()
        assert_gradients_and_clear(model, reference, 1e-7, f"step {step}")


@pytest.mark.parametrize("plan", PLANS)
def test_layers_may_be_built_and_sharded_among_others_that_are_dropped(plan):
    run_on_ranks(_train_layer_by_layer, 2, plan)


# --- late ranks ---


def _train_with_delays(rank, world_size, plan):
    """Each rank is late by itself: after forwards, around collectives, before the optimizer."""
    clock = random.Random(rank)

    def be_late(*_):
        if clock.random() < 0.4:
            time.sleep(clock.random() * 0.006)

    def delayed(method):
        def wrapped(self, *args, **kwargs):
            be_late()
            pending = method(self, *args, **kwargs)
            be_late()
            return pending

        return wrapped

    late = {name: delayed(getattr(Communicator, name)) for name in ("gather", "reduce")}
    with mock.patch.multiple(Communicator, **late):
        model = shard_model(tied_lm(), PLANS[plan])
        for module in model.modules():
            module.register_forward_hook(be_late)
            module.register_full_backward_hook(be_late)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        optimizer.register_step_pre_hook(be_late)
        return train_on_rank(model, _batches_of_tied_lm(world_size), lm_loss, optimizer, rank)


def _batches_of_tied_lm(world_size):
    return make_batches(
        TASKS["tied_lm"].make_batch, num_steps=3, num_micro_batches=2, world_size=world_size
    )


@pytest.mark.parametrize(("plan", "backend"), [("zero3", "gloo"), ("zero2", PLAIN)])
def test_ranks_that_are_late_change_no_value(plan, backend):
    traces = run_on_ranks(_train_with_delays, 3, plan, backend=backend)
    expected = train_reference(tied_lm(), _batches_of_tied_lm(3), lm_loss, OPTIMIZERS["adamw"])
    assert_ranks_agree(traces)
    assert_traces_match(traces[0], expected, atol=5e-6)


class _Judged(nn.Module):
    """Layers with a parameter beside them, which is in the unit of the whole."""

    def __init__(self, *sizes):
        super().__init__()
        torch.manual_seed(len(sizes))
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))
        self.scale = nn.Parameter(torch.ones(sizes[-1]))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


def _play(maker, judge, batches, divisor):
    """One micro-batch: the judge's loss, and with it frozen, the maker's, whose graph is alive
    while the judge is thawed and has its backward.
    """
    for noise, real in batches:
        judge.requires_grad_(False)
        made = maker(noise)
        loss_of_maker = judge(made).square().mean()
        judge.requires_grad_(True)
        loss_of_judge = judge(real).mean() - judge(made.detach()).square().mean()
        for loss in (loss_of_judge, loss_of_maker):
            (loss / divisor).backward()


def _train_a_pair(rank, world_size, plan, accumulation):
    def batch(step, r):
        values = torch.randn(3, 9, generator=torch.Generator().manual_seed(10 * step + r))
        return values.split([4, 5], dim=1)

    plain, sharded = ([_Judged(4, 6, 5), _Judged(5, 6, 6, 1)] for _ in range(2))
    for model in sharded:
        shard_model(model, PLANS[plan], units=["Linear"])
    for step in range(4):
        for model in sharded:
            model.set_requires_gradient_sync(step % 2 == 1 or accumulation == "sum")
        _play(*sharded, [batch(step, rank)], 1)
        _play(*plain, [batch(step, r) for r in range(world_size)], world_size)
        if step % 2 == 0:
            continue
        for ours, theirs in zip(sharded, plain, strict=True):
            expected = {name: p.grad for name, p in theirs.named_parameters()}
            found = dict(gradients(ours).full())
            assert_same_tensors({name: found[name] for name in expected}, expected, atol=2e-6)
            for each in (ours, theirs):
                torch.optim.SGD(each.parameters(), lr=0.5).step()
                each.zero_grad()


@pytest.mark.parametrize("accumulation", ["local", "sum"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_model_that_is_frozen_in_the_graph_of_another_and_thawed_has_its_own_gradients(
    plan, accumulation
):
    run_on_ranks(_train_a_pair, 2, plan, accumulation)
