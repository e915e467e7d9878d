"""Micro-batches that take different paths through a model, on some ranks or on all."""

import copy

import pytest
import torch
from torch import nn

from lightning_fsdp import fully_shard, shard_model
from tests.support.models import (
    mlp,
    mlp_batch,
)
from tests.support.one_exchange import train_on_rank
from tests.support.parity import (
    OPTIMIZERS,
    PLANS,
    assert_same_tensors,
    assert_traces_match,
    make_batches,
    optional_loss,
    train_reference,
    whole,
)
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

# Which ranks use ``bonus``, by step and micro-batch.
USERS = [[{0}, {1}], [{0}, set()], [set(), {1}], [set(), set()], [{0, 1}, set()]]


def _optional_batch(step, micro_batch, rank):
    return {**mlp_batch(step, micro_batch, rank), "use_bonus": rank in USERS[step][micro_batch]}


def _accumulate_with_unused(rank, world_size):
    batches = make_batches(
        _optional_batch, num_steps=len(USERS), num_micro_batches=2, world_size=world_size
    )
    traces = {}
    for accumulation in ("local", "sum"):
        model = shard_model(mlp())
        traces[accumulation] = train_on_rank(
            model,
            batches,
            optional_loss,
            OPTIMIZERS["adamw"](model.parameters()),
            rank,
            accumulation=accumulation,
        )
    expected = train_reference(mlp(), batches, optional_loss, OPTIMIZERS["adamw"], joined=False)
    for accumulation, trace in traces.items():
        assert_traces_match(trace, expected, atol=1e-7, what=accumulation)
    return traces


def test_a_parameter_may_be_used_by_some_micro_batches_of_some_ranks():
    run_on_ranks(_accumulate_with_unused, 2)


class _Detour(nn.Module):
    """A unit that only some micro-batches run, the same ones on every rank."""

    def __init__(self):
        super().__init__()
        self.road, self.detour = nn.Linear(7, 7), nn.Linear(7, 7)
        self.end = nn.Linear(7, 3)

    def forward(self, inputs, takes_detour):
        hidden = self.road(inputs).tanh()
        return self.end(self.detour(hidden).tanh() if takes_detour else hidden)


def _detour():
    torch.manual_seed(1)
    return _Detour()


DETOURS = [[True, False], [False, True], [False, False], [True, True]]


def _detour_batch(step, micro_batch, rank):
    return {**mlp_batch(step, micro_batch, rank), "detour": DETOURS[step][micro_batch]}


def _detour_loss(model, batch):
    outputs = model(batch["inputs"], batch["detour"])
    return 0.25 * torch.nn.functional.mse_loss(outputs, batch["targets"])


def _accumulate_with_detours(rank, world_size):
    batches = make_batches(
        _detour_batch, num_steps=len(DETOURS), num_micro_batches=2, world_size=world_size
    )
    expected = train_reference(_detour(), batches, _detour_loss, OPTIMIZERS["adamw"], joined=False)
    for accumulation in ("local", "sum"):
        model = _detour()
        for module in (model.road, model.detour, model.end, model):
            fully_shard(module)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        trace = train_on_rank(
            model, batches, _detour_loss, optimizer, rank, accumulation=accumulation
        )
        assert_traces_match(trace, expected, atol=1e-7, what=accumulation)


def test_a_unit_may_be_left_out_of_some_micro_batches():
    run_on_ranks(_accumulate_with_detours, 2)


class _TiedBeside(nn.Module):
    """A unit outside of the graph, and a layer with its weight that one rank leaves out."""

    def __init__(self):
        super().__init__()
        self.first, self.aside, self.tied = (nn.Linear(7, 7) for _ in range(3))
        self.tied.weight = self.aside.weight

    def forward(self, inputs, uses_tied):
        hidden = self.first(inputs)
        hidden = hidden + self.aside(hidden).detach()
        return (hidden + self.tied(hidden) if uses_tied else hidden).tanh()


def _use_tied_on_one_rank(rank, world_size):
    torch.manual_seed(1)
    model = _TiedBeside()
    plain = copy.deepcopy(model)
    for module in (model.first, model.aside, model):
        fully_shard(module)
    for step in range(2):
        inputs = [mlp_batch(step, 0, r)["inputs"] for r in range(world_size)]
        model(inputs[rank], rank == 0).sum().backward()
        for r, each in enumerate(inputs):
            (plain(each, r == 0).sum() / world_size).backward()
        ours, theirs = ({n: whole(p.grad) for n, p in m.named_parameters()} for m in (model, plain))
        assert_same_tensors(ours, theirs, atol=1e-6, what=f"step {step}")
        for each in (model, plain):
            each.zero_grad()


def test_a_tied_weight_may_be_used_by_one_rank_while_its_other_unit_has_no_backward():
    run_on_ranks(_use_tied_on_one_rank, 2)


class _DetourOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.detour = nn.Linear(7, 7)

    def forward(self, inputs, takes_detour):
        return (self.detour(inputs) if takes_detour else inputs).tanh()


def _end_without_units(rank, world_size, plan):
    torch.manual_seed(1)
    model = _DetourOnly()
    plain = copy.deepcopy(model)
    shard_model(model, PLANS[plan])
    for step in range(2):
        inputs = [mlp_batch(step, 0, r)["inputs"].requires_grad_() for r in range(world_size)]
        with model.no_sync():
            model(inputs[rank], True).sum().backward()
        model(inputs[rank], False).sum().backward()
        for each in inputs:
            (plain(each, True).sum() / world_size).backward()
        ours, theirs = ({n: whole(p.grad) for n, p in m.named_parameters()} for m in (model, plain))
        assert_same_tensors(ours, theirs, atol=1e-6, what=f"step {step}")
        for each in (model, plain):
            each.zero_grad()


@pytest.mark.parametrize("plan", PLANS)
def test_the_last_micro_batch_may_use_no_unit_at_all(plan):
    """What the others left is reduced, as where it leaves out some."""
    run_on_ranks(_end_without_units, 2, plan)


class _Scale(nn.Module):
    """A unit whose output is in the loss whether or not it uses its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7))

    def forward(self, hidden, uses_weight):
        return hidden * (self.weight if uses_weight else 1.0)


def _partly_used_detour():
    model = _detour()
    model.scale = _Scale()
    return model


def _partly_used_detour_loss(model, batch):
    if batch["detour"]:
        batch = {**batch, "inputs": model.scale(batch["inputs"], batch["uses_weight"])}
    return _detour_loss(model, {**batch, "detour": False})


def _partly_used_detour_batch(step, micro_batch, rank):
    batch = mlp_batch(step, micro_batch, rank)
    batch["inputs"].requires_grad_()  # else, without its weight, the unit is in no graph
    # In step 2 no rank uses the weight, in step 3 every rank.
    return {
        **batch,
        "detour": micro_batch == 0,
        "uses_weight": (rank == 0 and step < 2) or step == 3,
    }


def _accumulate_with_partly_used_detours(rank, world_size):
    batches = make_batches(
        _partly_used_detour_batch, num_steps=4, num_micro_batches=2, world_size=world_size
    )
    loss_of, make_optimizer = _partly_used_detour_loss, OPTIMIZERS["adamw"]
    expected = train_reference(
        _partly_used_detour(), batches, loss_of, make_optimizer, joined=False
    )
    for plan in PLANS.values():
        model = shard_model(_partly_used_detour(), plan, units={"Linear", "_Scale"})
        trace = train_on_rank(model, batches, loss_of, make_optimizer(model.parameters()), rank)
        assert_traces_match(trace, expected, atol=1e-7, what=str(plan))


def test_what_waits_on_some_ranks_is_reduced_by_a_backward_that_takes_another_path():
    run_on_ranks(_accumulate_with_partly_used_detours, 2, group_timeout_s=10)


def _count_questions(rank, world_size):
    """Questions to all ranks in each step: plain, accumulated without the head, and plain."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    communicator = model[0].weight.spec.communicator
    any_rank, asked, counts = communicator.any_rank, [], []
    communicator.any_rank = lambda flags: asked.append(flags) or any_rank(flags)
    try:
        for step in range(4):
            for syncs in (False, True) if step == 1 else (True,):
                model.set_requires_gradient_sync(syncs)
                out = model[0](torch.ones(2, 4))
                (out if step else model[1](out)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(len(asked))
    finally:
        communicator.any_rank = any_rank
    return counts


def test_what_no_rank_used_in_an_accumulated_step_is_asked_for_in_that_step_alone():
    for counts in run_on_ranks(_count_questions, 2):
        assert counts == [0, 2, 2, 2]
