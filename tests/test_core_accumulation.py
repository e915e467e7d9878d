"""Several micro-batches per optimizer step: their gradients, what is sent for them, and how they
are dropped.
"""

import pytest
import torch

from lightning_fsdp import ZERO2, fully_shard, shard_model
from tests.support.cases import each_on_ranks
from tests.support.counting import CollectiveCounter
from tests.support.models import (
    TASKS,
    causal_lm,
    lm_loss,
    mlp,
    mlp_batch,
    mlp_loss,
    shard_lm_by_hand,
    token_batch,
)
from tests.support.one_exchange import train_on_rank, wholes
from tests.support.parity import (
    OPTIMIZERS,
    PLANS,
    assert_ranks_agree,
    assert_same_tensors,
    assert_traces_match,
    batches_for,
    train_reference,
    whole,
)
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

# Every two of a plan, a way to accumulate and an optimizer.
MODES = [
    ("zero2", "local", "sgd"),
    ("zero2", "sum", "adamw"),
    ("zero3", "local", "adamw"),
    ("zero3", "sum", "sgd"),
]
NUM_MICRO_BATCHES = 3


def _batches(world_size):
    return batches_for("tied_lm", world_size, num_steps=2, num_micro_batches=NUM_MICRO_BATCHES)


def _train_in_every_mode(rank, world_size):
    task, traces = TASKS["tied_lm"], {}
    for plan, accumulation, optimizer in MODES:
        model = shard_model(task.build(), PLANS[plan])
        traces[plan, accumulation, optimizer] = train_on_rank(
            model,
            _batches(world_size),
            task.loss,
            OPTIMIZERS[optimizer](model.parameters()),
            rank,
            accumulation=accumulation,
        )
    return traces


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_micro_batches_add_up(world_size):
    task, by_rank = TASKS["tied_lm"], run_on_ranks(_train_in_every_mode, world_size)
    for mode in MODES:
        expected = train_reference(
            task.build(), _batches(world_size), task.loss, OPTIMIZERS[mode[2]]
        )
        traces = [traces[mode] for traces in by_rank]
        assert_ranks_agree(traces, str(mode))
        assert_traces_match(traces[0], expected, atol=task.atol, what=str(mode))


def _count_reductions(rank, world_size, plan, accumulation):
    """Reductions and gathers of each micro-batch of the third step."""
    model = shard_lm_by_hand(causal_lm(), fully_shard, reshard_after_forward=plan == "zero3")
    if plan == "zero2":
        model = shard_model(causal_lm(), ZERO2)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for _ in range(3):
        counts = []
        for index in range(NUM_MICRO_BATCHES):
            is_synced = accumulation == "sum" or index == NUM_MICRO_BATCHES - 1
            model.set_requires_gradient_sync(is_synced)
            with CollectiveCounter() as counter:
                lm_loss(model, token_batch(0, index, rank)).backward()
            counts.append((counter.num_gathers(world_size), counter.num_reductions(world_size)))
        optimizer.step()
        optimizer.zero_grad()
    return counts


@pytest.mark.parametrize("accumulation", ["local", "sum"])
@pytest.mark.parametrize("plan", PLANS)
def test_only_synced_micro_batches_reduce(plan, accumulation):
    for counts in run_on_ranks(_count_reductions, 2, plan, accumulation):
        gathers, reductions = zip(*counts, strict=True)
        num_units = reductions[-1]
        assert num_units == (5 if plan == "zero2" else 7)
        expected = num_units if accumulation == "sum" else 0
        assert reductions[:-1] == (expected,) * (NUM_MICRO_BATCHES - 1)
        if plan == "zero2":
            assert gathers == (num_units, 0, 0)
        else:
            assert all(num_units < number <= 2 * num_units for number in gathers)


UNSYNCED = {
    "all": lambda model: [module for module in model.modules() if hasattr(module, "no_sync")],
    "some blocks": lambda model: model.blocks[1:],
    "embedding": lambda model: [model.embedding],
    "root": lambda model: [model],
}


def _gradients_of(model):
    named = {name: p.grad for name, p in model.named_parameters()}
    return dict(zip(named, wholes([*named.values()]), strict=True))


def _sync_some_units(rank, world_size, case):
    """Only some units wait for the last micro-batch. Counts of the second step's micro-batches."""
    plan, which, reshards_after_backward = case
    models = model, reference = causal_lm(), causal_lm()
    for module in [model.embedding, model.positions, *model.blocks]:
        fully_shard(module, reshard_after_forward=plan == "zero3")
    fully_shard(model, reshard_after_forward=plan == "zero3")  # norm and head
    optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in models]
    model.set_reshard_after_backward(reshards_after_backward)
    for step in range(2):
        counts = []
        for index in range(NUM_MICRO_BATCHES):
            is_last = index == NUM_MICRO_BATCHES - 1
            for module in UNSYNCED[which](model):
                module.set_requires_gradient_sync(is_last, recurse=False)
            with CollectiveCounter() as counter:
                lm_loss(model, token_batch(step, index, rank)).backward()
            counts.append((counter.num_gathers(world_size), counter.num_reductions(world_size)))
            for r in range(world_size):
                (lm_loss(reference, token_batch(step, index, r)) / world_size).backward()
        assert_same_tensors(*map(_gradients_of, models), atol=5e-6, what=f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return counts


@pytest.mark.parametrize("plan", PLANS)
def test_some_units_may_sync_and_stay_whole_when_others_do_not(plan):
    # Over both plans each of them with and without copies that stay after the backward.
    first = list(PLANS).index(plan)
    cases = [(plan, which, bool((i + first) % 2)) for i, which in enumerate(UNSYNCED)]
    for case, by_rank in each_on_ranks(_sync_some_units, 2, cases).items():
        for counts in by_rank:
            _check_counts(counts, *case)


def _check_counts(counts, plan, which, reshards_after_backward):
    what = f"{which}, {reshards_after_backward=}"
    # The backward of embeddings reads no weight, and the last unit waits for its own.
    num_units, num_gathered_in_backward = 6, 3
    num_unsynced = {"all": num_units, "some blocks": 2, "embedding": 1, "root": 1}[which]
    gathers, reductions = zip(*counts, strict=True)
    few, num_before = num_units - num_unsynced, NUM_MICRO_BATCHES - 1
    assert reductions == (few,) * num_before + (num_units,), what
    if plan == "zero2":
        kept = 0 if not reshards_after_backward else num_units
        assert gathers == (num_units, kept, kept), what
    elif reshards_after_backward:
        assert gathers == (num_units + num_gathered_in_backward,) * NUM_MICRO_BATCHES, what
    else:
        assert gathers[0] == num_units + num_gathered_in_backward, what
        # What the backward left whole needs no gather until the forward frees it, all but the last.
        assert gathers[1:] == (num_units - 1,) * num_before, what


def _clear_unsynced(rank, world_size, how):
    model, reference = shard_model(causal_lm()), shard_model(causal_lm())
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for _ in range(2):  # the second round starts from what the first one left
        with model.no_sync():
            lm_loss(model, token_batch(7, 0, rank)).backward()
            lm_loss(model, token_batch(8, 0, rank)).backward()
        if how == "model":
            model.zero_grad()
        elif how == "optimizer":
            optimizer.zero_grad()
        elif how == "optimizer to zero":
            optimizer.zero_grad(set_to_none=False)
        else:
            for parameter in model.parameters():
                parameter.grad = None
        for each in (model, reference):
            lm_loss(each, token_batch(0, 0, rank)).backward()
        assert_same_tensors(*map(_gradients_of, (model, reference)), atol=0, what=how)
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize("how", ["model", "optimizer", "optimizer to zero", "by hand"])
def test_clearing_gradients_drops_what_was_not_synced(how):
    run_on_ranks(_clear_unsynced, 2, how)


def _clear_one_parameter(rank, world_size):
    """Setting one parameter's gradient to None drops that one only."""
    model, reference = shard_model(mlp()), shard_model(mlp())
    for each in (model, reference):
        with each.no_sync():
            mlp_loss(each, mlp_batch(0, 0, rank)).backward()
    model.first.weight.grad = None
    mlp_loss(model, mlp_batch(0, 1, rank)).backward()
    mlp_loss(reference, mlp_batch(0, 1, rank)).backward()
    alone = shard_model(mlp())
    mlp_loss(alone, mlp_batch(0, 1, rank)).backward()
    for (name, ours), both, last in zip(
        model.named_parameters(), reference.parameters(), alone.parameters(), strict=True
    ):
        expected = last if name == "first.weight" else both
        assert torch.equal(whole(ours.grad), whole(expected.grad)), name


def test_clearing_one_gradient_drops_that_one_only():
    run_on_ranks(_clear_one_parameter, 2)


def _reduced_then_local(rank, world_size):
    """A reduced gradient stays while later micro-batches accumulate locally, and is added to."""
    model, reference = shard_model(mlp()), mlp()
    mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    with model.no_sync():
        mlp_loss(model, mlp_batch(0, 1, rank)).backward()
    mlp_loss(model, mlp_batch(0, 2, rank)).backward()
    for micro_batch in range(3):
        for each in range(world_size):
            (mlp_loss(reference, mlp_batch(0, micro_batch, each)) / world_size).backward()
    assert_same_tensors(
        {name: whole(p.grad) for name, p in model.named_parameters()},
        {name: whole(p.grad) for name, p in reference.named_parameters()},
        atol=1e-7,
    )


def test_synced_and_unsynced_micro_batches_mix():
    run_on_ranks(_reduced_then_local, 2)


def _freeze_between(rank, world_size, plan):
    model, reference = shard_model(mlp(), PLANS[plan]), mlp()
    with model.no_sync():
        mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    for each in range(world_size):
        (mlp_loss(reference, mlp_batch(0, 0, each)) / world_size).backward()
    frozen = next(iter(dict(reference.named_parameters())))
    for each in (model, reference):
        each.get_parameter(frozen).requires_grad_(False)
    mlp_loss(model, mlp_batch(0, 1, rank)).backward()
    for each in range(world_size):
        (mlp_loss(reference, mlp_batch(0, 1, each)) / world_size).backward()
    assert_same_tensors(
        {name: whole(p.grad) for name, p in model.named_parameters()},
        {name: whole(p.grad) for name, p in reference.named_parameters()},
        atol=1e-7,
    )


@pytest.mark.parametrize("plan", PLANS)
def test_a_parameter_frozen_between_micro_batches_keeps_the_gradient_that_it_has(plan):
    run_on_ranks(_freeze_between, 2, plan)


def _fail_between(rank, world_size, plan):
    model, reference = shard_model(mlp(), PLANS[plan]), mlp()

    def fail(module, args):
        raise ValueError("in the forward")

    with model.no_sync():
        mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    handle = model.last.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="in the forward"):
        mlp_loss(model, mlp_batch(0, 1, rank))
    handle.remove()
    mlp_loss(model, mlp_batch(0, 2, rank)).backward()
    for micro_batch in (0, 2):
        for each in range(world_size):
            (mlp_loss(reference, mlp_batch(0, micro_batch, each)) / world_size).backward()
    assert_same_tensors(
        {name: whole(p.grad) for name, p in model.named_parameters()},
        {name: whole(p.grad) for name, p in reference.named_parameters()},
        atol=1e-7,
    )


@pytest.mark.parametrize("plan", PLANS)
def test_a_forward_that_fails_between_micro_batches_keeps_their_gradients(plan):
    run_on_ranks(_fail_between, 2, plan)
