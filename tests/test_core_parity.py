"""Training with the core equals training without it: parameters and gradients, after every step, on
every rank.

The reference is plain torch in one process on the joined batch (W=1: bit for bit), and torch's own
FSDP2 with the same units (W=2, fp32: bit for bit). Every rank has data of its own.
"""

import copy

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from lightning_fsdp import fully_shard, shard_model
from tests.support.models import (
    TASKS,
    causal_lm,
    mlp,
    mlp_batch,
    mlp_loss,
    shard_lm_by_hand,
    tied_lm,
)
from tests.support.one_exchange import train_on_rank
from tests.support.parity import (
    COMBINATIONS,
    OPTIMIZERS,
    PLANS,
    assert_losses_match,
    assert_ranks_agree,
    assert_traces_match,
    batches_for,
    train_reference,
)
from tests.support.ranks import PLAIN, run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

EACH_ONCE = [("zero2", "sgd"), ("zero3", "adamw")]


def _train_combinations(rank, world_size, task_name, num_micro_batches, combinations):
    task, traces = TASKS[task_name], {}
    batches = batches_for(task_name, world_size, num_micro_batches=num_micro_batches)
    for plan, optimizer in combinations:
        model = shard_model(task.build(), PLANS[plan])
        traces[plan, optimizer] = train_on_rank(
            model, batches, task.loss, OPTIMIZERS[optimizer](model.parameters()), rank
        )
    return traces


@pytest.mark.parametrize(
    ("world_size", "num_micro_batches", "task_name"),
    [
        *((1, 1, name) for name in TASKS),
        *((1, 2, name) for name in ("mlp", "tied_lm")),
        *((2, 2, name) for name in TASKS),
        *((3, 2, name) for name in ("lm", "gpt2")),
        *((4, 1, name) for name in ("mlp", "tied_lm")),
    ],
)
def test_training_equals_one_process_on_the_joined_batch(task_name, world_size, num_micro_batches):
    """On one rank bit for bit, but for a tied weight over several micro-batches: autograd adds use
    after use within each micro-batch, the core adds up each use over the micro-batches.
    """
    task = TASKS[task_name]
    combinations = COMBINATIONS if (world_size, task_name) == (2, "mlp") else EACH_ONCE
    by_rank = run_on_ranks(
        _train_combinations, world_size, task_name, num_micro_batches, combinations
    )
    batches = batches_for(task_name, world_size, num_micro_batches=num_micro_batches)
    is_exact = world_size == 1 and (num_micro_batches == 1 or task_name in ("mlp", "lm"))
    for combination in combinations:
        traces = [traces[combination] for traces in by_rank]
        expected = train_reference(task.build(), batches, task.loss, OPTIMIZERS[combination[1]])
        atol = 0 if is_exact else task.atol
        assert_ranks_agree(traces, str(combination))
        assert_traces_match(traces[0], expected, atol=atol, what=str(combination))
        assert_losses_match(traces, expected, atol=atol)


@pytest.mark.parametrize("world_size", [2, 3])
def test_training_over_plain_collectives_equals_one_process(world_size):
    """Backends that are not gloo gather and reduce with one collective each."""
    by_rank = run_on_ranks(_train_combinations, world_size, "tied_lm", 2, EACH_ONCE, backend=PLAIN)
    for combination in EACH_ONCE:
        expected = train_reference(
            tied_lm(),
            batches_for("tied_lm", world_size),
            TASKS["lm"].loss,
            OPTIMIZERS[combination[1]],
        )
        traces = [traces[combination] for traces in by_rank]
        assert_ranks_agree(traces)
        assert_traces_match(traces[0], expected, atol=5e-6, what=str(combination))


def _loss_in_float64(model, batch):
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _train_in_float64(rank, world_size):
    model = shard_model(causal_lm().double())
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    return train_on_rank(model, batches_for("lm", world_size), _loss_in_float64, optimizer, rank)


def test_float64_trains_as_in_one_process():
    traces = run_on_ranks(_train_in_float64, 2)
    model, batches = causal_lm().double(), batches_for("lm", 2)
    expected = train_reference(model, batches, _loss_in_float64, OPTIMIZERS["sgd"])
    assert_traces_match(traces[0], expected, atol=1e-14)


def _lm_with_modules_at_two_places():
    """As peft holds the embedding of a model that it prompts once more."""
    model = causal_lm()
    model.also = nn.ModuleDict({"last": model.head, "word_embeddings": model.embedding})
    model.ends = nn.ModuleList([model.blocks[0], model.blocks[-1]])
    return model


def _train_with_modules_at_two_places(rank, world_size):
    batches, task = batches_for("lm", world_size), TASKS["lm"]
    traces = []
    for plan in PLANS.values():
        model = shard_model(_lm_with_modules_at_two_places(), plan)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        traces.append(train_on_rank(model, batches, task.loss, optimizer, rank))
    return traces


def test_modules_at_two_places_of_the_tree_train_as_in_one_process():
    by_rank = run_on_ranks(_train_with_modules_at_two_places, 2)
    model, task = _lm_with_modules_at_two_places(), TASKS["lm"]
    expected = train_reference(model, batches_for("lm", 2), task.loss, OPTIMIZERS["sgd"])
    for traces in zip(*by_rank, strict=True):
        assert_ranks_agree(traces)
        assert_traces_match(traces[0], expected, atol=task.atol)


def _train_beside_torch_fsdp2(rank, world_size, reshard_after_forward, num_micro_batches):
    task = TASKS["lm"]
    batches = batches_for("lm", world_size, num_steps=3, num_micro_batches=num_micro_batches)
    traces = []
    for engine in (fully_shard, torch_fsdp.fully_shard):
        model = shard_lm_by_hand(causal_lm(), engine, reshard_after_forward=reshard_after_forward)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        traces.append(train_on_rank(model, batches, task.loss, optimizer, rank, accumulation="sum"))
    assert_traces_match(*traces, atol=0, what="against torch's FSDP2")


@pytest.mark.parametrize(
    ("reshard_after_forward", "num_micro_batches"), [(True, 2), (False, 2), (None, 1)]
)
def test_a_script_for_fsdp2_gives_the_same_bits_with_one_import_changed(
    reshard_after_forward, num_micro_batches
):
    run_on_ranks(_train_beside_torch_fsdp2, 2, reshard_after_forward, num_micro_batches)


def _shard_found_units_beside_torch_fsdp2(rank, world_size):
    task, batches = TASKS["lm"], batches_for("lm", world_size, num_steps=5, num_micro_batches=1)
    ours, theirs = shard_model(causal_lm()), shard_lm_by_hand(causal_lm(), torch_fsdp.fully_shard)
    traces = [
        train_on_rank(m, batches, task.loss, OPTIMIZERS["adamw"](m.parameters()), rank)
        for m in (ours, theirs)
    ]
    assert_traces_match(*traces, atol=0, what="shard_model against torch's FSDP2")


def test_units_found_by_shard_model_give_the_same_bits_as_fsdp2():
    run_on_ranks(_shard_found_units_beside_torch_fsdp2, 2)


def _evaluate_between_steps(rank, world_size, plan):
    task, batches = TASKS["lm"], batches_for("lm", world_size, num_micro_batches=1)
    plain_trace = train_on_rank(
        model := shard_model(causal_lm(), PLANS[plan]),
        batches,
        task.loss,
        OPTIMIZERS["sgd"](model.parameters()),
        rank,
    )
    model = shard_model(causal_lm(), PLANS[plan])
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    traces = []
    for step in batches:
        with torch.no_grad():
            before = task.loss(model.eval(), step[0][rank])
            again = task.loss(model, step[0][rank])
        trace = train_on_rank(model.train(), [step], task.loss, optimizer, rank)
        assert before.item() == again.item() == trace.losses[0]
        traces.append(trace)
    assert [t.losses[0] for t in traces] == plain_trace.losses
    final = copy.deepcopy(traces[-1])
    plain_trace.gradients, plain_trace.parameters = (
        plain_trace.gradients[-1:],
        plain_trace.parameters[-1:],
    )
    assert_traces_match(final, plain_trace, atol=0)


@pytest.mark.parametrize("plan", PLANS)
def test_evaluation_between_steps_changes_nothing(plan):
    run_on_ranks(_evaluate_between_steps, 2, plan)


def _edit_parameters_in_place(rank, world_size, plan):
    """Weights changed without an optimizer are what the next forward uses."""
    model, reference = shard_model(mlp(), PLANS[plan]), mlp()
    batch = mlp_batch(0, 0, 0)
    with torch.no_grad():
        model(batch["inputs"])
    for edited in (model, reference):
        with torch.no_grad():
            for parameter in edited.parameters():
                parameter.mul_(0.5)
    with torch.no_grad():
        assert torch.equal(model(batch["inputs"]), reference(batch["inputs"]))
    for edited in (model, reference):
        loss = mlp_loss(edited, batch)
        loss.backward()
        with torch.no_grad():
            for parameter in edited.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
    with torch.no_grad():
        difference = (model(batch["inputs"]) - reference(batch["inputs"])).abs().max()
    assert difference < 1e-6, difference


@pytest.mark.parametrize("plan", PLANS)
def test_parameters_edited_in_place_are_used_by_the_next_forward(plan):
    run_on_ranks(_edit_parameters_in_place, 2, plan)
