"""Several micro-batches per optimizer step: their gradients, what is sent for them, and how they
are dropped.
"""

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

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
    make_batches,
    train_reference,
    whole,
)
from tests.support.ranks import errors_on_ranks, run_on_ranks

# Every two of a plan, a way to accumulate and an optimizer.
MODES = [
    ("zero2", "local", "sgd"),
    ("zero2", "sum", "adamw"),
    ("zero3", "local", "adamw"),
    ("zero3", "sum", "sgd"),
]
NUM_MICRO_BATCHES = 3


def _batches(world_size):
    make_batch = TASKS["tied_lm"].make_batch
    return make_batches(
        make_batch, num_steps=2, num_micro_batches=NUM_MICRO_BATCHES, world_size=world_size
    )


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
    cases = list(itertools.product([plan], UNSYNCED, [True, False]))
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


# Which ranks use ``bonus``, by step and micro-batch.
USERS = [[{0}, {1}], [{0}, set()], [set(), {1}], [set(), set()], [{0, 1}, set()]]


def _optional_batch(step, micro_batch, rank):
    return {**mlp_batch(step, micro_batch, rank), "use_bonus": rank in USERS[step][micro_batch]}


def _optional_loss(model, batch):
    outputs = model(batch["inputs"], batch["use_bonus"])
    return 0.25 * torch.nn.functional.mse_loss(outputs, batch["targets"])


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
            _optional_loss,
            OPTIMIZERS["adamw"](model.parameters()),
            rank,
            accumulation=accumulation,
        )
    expected = train_reference(mlp(), batches, _optional_loss, OPTIMIZERS["adamw"], joined=False)
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


def _use_unreduced(rank, world_size, how):
    model = shard_model(mlp())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with model.no_sync():
        mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    if how == "step":
        optimizer.step()
    else:
        model.clip_grad_norm_(1.0)


@pytest.mark.parametrize(
    ("how", "what"), [("step", "an optimizer step"), ("clip", "clip_grad_norm_")]
)
def test_unreduced_gradients_are_refused(how, what):
    for error in errors_on_ranks(_use_unreduced, 2, how):
        assert error is not None, f"{how} on unreduced gradients went through"
        assert error.type_name == "RuntimeError"
        assert f"expected a reduced gradient for {what}, got one rank's own" in error.message


def _bonus_backward(model, rank, uses_bonus):
    model(mlp_batch(0, 0, rank)["inputs"], uses_bonus).sum().backward()


def _zero_in_place(rank, world_size, has_reduced, then):
    """Rank 0 alone has a local gradient of ``bonus`` when all gradients are zeroed."""
    model = shard_model(mlp())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    if has_reduced:
        _bonus_backward(model, rank, True)
    with model.no_sync():
        _bonus_backward(model, rank, rank == 0)
    optimizer.zero_grad(set_to_none=False)
    if then == "backward":
        _bonus_backward(model, rank, False)
    elif then == "unsynced backward":
        with model.no_sync():
            _bonus_backward(model, rank, False)
        model.zero_grad(set_to_none=False)
    optimizer.step()
    return {name: whole(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("then", ["step", "backward", "unsynced backward"])
@pytest.mark.parametrize("has_reduced", [False, True])
def test_gradients_zeroed_in_place_are_zeros_on_every_rank(has_reduced, then):
    """As in one process: weight decay is applied with them."""
    model = mlp()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    _bonus_backward(model, 0, True)
    optimizer.zero_grad(set_to_none=False)
    if then == "backward":
        for rank in range(2):
            (model(mlp_batch(0, 0, rank)["inputs"], False).sum() / 2).backward()
    optimizer.step()
    expected = {name: whole(p) for name, p in model.named_parameters()}
    for ours in run_on_ranks(_zero_in_place, 2, has_reduced, then):
        assert_same_tensors(ours, expected, atol=1e-7)


def _step_with_unreduced_on_one_rank(rank, world_size):
    model = shard_model(mlp())
    with model.no_sync():
        _bonus_backward(model, rank, rank == 0)
    OPTIMIZERS["adamw"]([model.bonus]).step()


def test_a_gradient_that_waits_on_one_rank_is_refused_on_every_rank():
    for error in errors_on_ranks(_step_with_unreduced_on_one_rank, 2):
        assert error is not None
        assert error.type_name == "RuntimeError"
        assert "gradient of 'bonus'" in error.message


class _Hiding(nn.Module):
    """Its output is an object that nothing can look into: only arriving gradients tell of it."""

    def __init__(self, shared):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        self.layer.weight = shared

    def forward(self, x):
        return SimpleNamespace(value=self.layer(x))


def _train_what_is_left(rank, world_size):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 4))
    plain = nn.Parameter(weight.detach().clone())
    first, second = fully_shard(_Hiding(weight)), fully_shard(_Hiding(weight))
    del second
    first(torch.ones(2, 4)).value.square().sum().backward()
    torch.nn.functional.linear(torch.ones(2, 4), plain).square().sum().backward()
    torch.testing.assert_close(weight.grad.full_tensor(), plain.grad, rtol=0, atol=1e-4)


def test_a_model_trains_on_when_another_that_shares_its_weight_is_gone():
    run_on_ranks(_train_what_is_left, 2)
