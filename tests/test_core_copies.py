"""A deepcopy of a sharded module is a second sharded module: it trains as the first would have, and
neither sees the other. Against copies of plain modules, by value.
"""

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_fsdp import (
    ZERO2,
    fully_shard,
    gradients,
    shard_model,
)
from lightning_fsdp.core.engine.hooks import hooks_of
from lightning_fsdp.core.sharded_module import units_in
from tests.support.copied import parameters_of, values_of
from tests.support.counting import CollectiveCounter
from tests.support.memory import StorageTracker, storages_of
from tests.support.models import (
    TASKS,
    causal_lm,
    lm_loss,
    shard_lm_by_hand,
    tied_lm,
    token_batch,
)
from tests.support.one_exchange import train_on_rank
from tests.support.parity import (
    OPTIMIZERS,
    PLANS,
    assert_ranks_agree,
    assert_same_tensors,
    assert_traces_match,
    make_batches,
    train_reference,
)
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")


def _batches(task, world_size, first_step=0):
    """Two steps of two micro-batches, others from each first step."""
    return make_batches(
        lambda step, micro, rank: task.make_batch(step + first_step, micro, rank),
        num_steps=2,
        num_micro_batches=2,
        world_size=world_size,
    )


# --- training ---


def _train_copies(rank, world_size, task_name, plan, moment):
    """A model, its copy, and the copy's copy, each trained while the others must stay as they are;
    the copy is made when the model is new, or with all that a step leaves behind.
    """
    task = TASKS[task_name]
    first = shard_model(task.build(), PLANS[plan])
    make_optimizer = OPTIMIZERS["sgd"]
    optimizer = make_optimizer(first.parameters())
    if moment != "new":
        train_on_rank(first, _batches(task, world_size), task.loss, optimizer, rank)
    if moment == "gradients":
        task.loss(first, task.make_batch(7, 0, rank)).backward()
    elif moment == "local gradients":
        with first.no_sync():
            task.loss(first, task.make_batch(7, 0, rank)).backward()
    before = [
        None if p.grad is None else gradients(first)[n].state for n, p in parameters_of(first)
    ]
    with CollectiveCounter() as counter:
        second = copy.deepcopy(first)
        third = copy.deepcopy(second)
    assert not counter.calls
    after = [None if p.grad is None else gradients(first)[n].state for n, p in parameters_of(first)]
    assert before == after
    traces, models = [], [first, second, third]
    for index, model in enumerate(models):
        others = [values_of(other) for other in models if other is not model]
        if model is first:
            model.zero_grad()
        else:
            assert all(p.grad is None for p in model.parameters())
            optimizer = make_optimizer(model.parameters())
        batches = _batches(task, world_size, first_step=20 + index)
        traces.append(train_on_rank(model, batches, task.loss, optimizer, rank))
        for other, values in zip([m for m in models if m is not model], others, strict=True):
            assert_same_tensors(values_of(other), values, atol=0, what="a copy that did not train")
    return traces


# Each moment under each plan, which decides what is whole then.
@pytest.mark.parametrize(
    ("task_name", "plan", "moment"),
    [
        *(("mlp", "zero2", "new"), ("tied_lm", "zero3", "new")),
        *(("mlp", "zero2", "trained"), ("gpt2", "zero3", "trained")),
        *(("tied_lm", "zero2", "gradients"), ("mlp", "zero3", "gradients")),
        *(("tied_lm", "zero2", "local gradients"), ("tied_lm", "zero3", "local gradients")),
    ],
)
def test_a_copy_and_its_copy_train_apart_as_plain_ones_do(task_name, plan, moment):
    world_size, task = 2, TASKS[task_name]
    by_rank = run_on_ranks(_train_copies, world_size, task_name, plan, moment)
    first, make_optimizer = task.build(), OPTIMIZERS["sgd"]
    optimizer = make_optimizer(first.parameters())
    if moment != "new":
        train_reference(first, _batches(task, world_size), task.loss, lambda _: optimizer)
    models = [first, copy.deepcopy(first), copy.deepcopy(first)]
    for index, model in enumerate(models):
        expected = train_reference(
            model,
            _batches(task, world_size, first_step=20 + index),
            task.loss,
            (lambda _: optimizer) if model is first else make_optimizer,
        )
        traces = [traces[index] for traces in by_rank]
        assert_ranks_agree(traces, f"model {index}")
        assert_traces_match(traces[0], expected, atol=10 * task.atol, what=f"model {index}")


def _share_nothing(rank, world_size):
    model = shard_lm_by_hand(tied_lm(), fully_shard)
    lm_loss(model, token_batch(0, 0, rank)).backward()
    copied = copy.deepcopy(model)
    assert copied.head.weight is copied.embedding.weight
    assert type(copied) is type(model)
    names = [name for name, _ in parameters_of(model)]
    assert [name for name, _ in parameters_of(copied)] == names
    assert storages_of(copied.parameters()).isdisjoint(storages_of(model.parameters()))
    assert len(units_in(copied)) == len(units_in(model))
    assert {unit.name for unit in units_in(copied)} == {unit.name for unit in units_in(model)}
    kinds = (
        lambda m: m.modules(),
        units_in,
        lambda m: [flat_param for unit in units_in(m) for flat_param in unit.flat_params],
        lambda m: {hooks_of(module).schedule for module in m.modules() if hooks_of(module)},
    )
    for kind in kinds:
        ours, theirs = ({id(part) for part in kind(m)} for m in (copied, model))
        assert len(ours) == len(theirs) > 0
        assert ours.isdisjoint(theirs)
    for module in filter(hooks_of, copied.modules()):
        called = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        assert {hook.__self__ for hook in called} == {hooks_of(module)}
    # Settings go with a copy, and stay apart.
    copied.set_reshard_after_forward(False)
    assert any(unit.reshard_after_forward for unit in units_in(model))
    with model.no_sync():
        assert all(unit.syncs_gradients for unit in units_in(copy.deepcopy(model)))
    seen = {"model": 0, "copy": 0}
    model.register_forward_hook(lambda *_: seen.update(model=seen["model"] + 1))
    lm_loss(copied, token_batch(0, 0, rank))
    assert seen["model"] == 0
    # Frozen weights stay frozen, trainable ones trainable.
    model.blocks[0].requires_grad_(False)
    teacher = copy.deepcopy(model).requires_grad_(False)
    assert [p.requires_grad for p in copy.deepcopy(model).parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    assert sum(p.requires_grad for p in model.parameters()) > 0
    lm_loss(teacher, token_batch(0, 0, rank))
    with torch.inference_mode():
        later = copy.deepcopy(model)
    lm_loss(later, token_batch(0, 0, rank)).backward()
    assert later.head.weight.grad is not None
    later.load_state_dict(model.state_dict())
    with torch.no_grad():
        later.head.weight.mul_(2)


def test_a_copy_shares_no_memory_unit_or_setting():
    run_on_ranks(_share_nothing, 2)


def _free_after_step(rank, world_size):
    """Bytes whole after a backward and after a step, of a copy under ZeRO-2."""
    model = copy.deepcopy(shard_model(causal_lm(), ZERO2))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with StorageTracker(model) as tracker:
        lm_loss(model, token_batch(0, 0, rank)).backward()
        before = sum(tracker.whole_sizes())
        optimizer.step()
        return before, sum(tracker.whole_sizes())


def test_the_step_of_a_copy_frees_what_zero2_keeps():
    total = 4 * sum(p.numel() for p in causal_lm().parameters())
    for before, after in run_on_ranks(_free_after_step, 2):
        assert before >= total
        assert after == 0


# --- weight averaging ---


def _average(rank, world_size, plan, kind):
    """Four steps of training with an average after each."""
    ema = get_ema_multi_avg_fn(0.75)
    arguments = {"ema": {"multi_avg_fn": ema}, "swa": {}, "on a device": {"device": "cpu"}}[kind]
    results = []
    for is_sharded in (True, False):
        model = shard_model(causal_lm(), PLANS[plan]) if is_sharded else causal_lm()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        averaged = AveragedModel(model, **arguments)
        for step in range(4):
            for each in [rank] if is_sharded else range(world_size):
                loss = lm_loss(model, token_batch(step, 0, each))
                (loss if is_sharded else loss / world_size).backward()
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(model)
            with torch.no_grad():
                outputs = averaged(token_batch(50, 0, rank)["tokens"][:, :-1])
        results.append(
            {**values_of(averaged), "outputs": outputs, "n": averaged.n_averaged.clone()}
        )
        model_values = values_of(model)
    distance = (results[0]["module.head.weight"] - model_values["head.weight"]).abs().max()
    assert distance > 1e-3, "the average is the model: the test shows nothing"
    assert_same_tensors(*results, atol=5e-6)


@pytest.mark.parametrize("kind", ["swa", "ema", "on a device"])
@pytest.mark.parametrize("plan", PLANS)
def test_torchs_averaged_model_averages_a_sharded_one(plan, kind):
    run_on_ranks(_average, 2, plan, kind)
