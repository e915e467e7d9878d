"""A deepcopy of a sharded module is a second sharded module: it trains as the first would have, and
neither sees the other. Against copies of plain modules, by value.
"""

import copy
import io
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_fsdp import (
    ZERO2,
    fully_shard,
    gradients,
    register_forward_method,
    shard_model,
)
from lightning_fsdp.core.engine.hooks import hooks_of
from lightning_fsdp.core.sharded_module import units_in
from tests.support.counting import CollectiveCounter
from tests.support.memory import StorageTracker, storages_of
from tests.support.models import (
    TASKS,
    causal_lm,
    lm_loss,
    mlp,
    mlp_batch,
    mlp_loss,
    shard_lm_by_hand,
    tied_lm,
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
)
from tests.support.ranks import run_on_ranks


def _batches(task, world_size, first_step=0):
    """Two steps of two micro-batches, others from each first step."""
    return make_batches(
        lambda step, micro, rank: task.make_batch(step + first_step, micro, rank),
        num_steps=2,
        num_micro_batches=2,
        world_size=world_size,
    )


def _values(model):
    named = dict(model.named_parameters())
    return dict(zip(named, wholes([*named.values()]), strict=True))


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
    before = [None if p.grad is None else gradients(first)[n].state for n, p in _named(first)]
    with CollectiveCounter() as counter:
        second = copy.deepcopy(first)
        third = copy.deepcopy(second)
    assert not counter.calls
    after = [None if p.grad is None else gradients(first)[n].state for n, p in _named(first)]
    assert before == after
    traces, models = [], [first, second, third]
    for index, model in enumerate(models):
        others = [_values(other) for other in models if other is not model]
        if model is first:
            model.zero_grad()
        else:
            assert all(p.grad is None for p in model.parameters())
            optimizer = make_optimizer(model.parameters())
        batches = _batches(task, world_size, first_step=20 + index)
        traces.append(train_on_rank(model, batches, task.loss, optimizer, rank))
        for other, values in zip([m for m in models if m is not model], others, strict=True):
            assert_same_tensors(_values(other), values, atol=0, what="a copy that did not train")
    return traces


def _named(model):
    return list(model.named_parameters())


MOMENTS = ("new", "trained", "gradients", "local gradients")


@pytest.mark.parametrize(
    ("task_name", "plan", "moment"),
    [
        *itertools.product(["tied_lm"], PLANS, MOMENTS),
        *(("mlp", "zero2", moment) for moment in MOMENTS[::2]),
        *(("mlp", "zero3", moment) for moment in MOMENTS[1::2]),
        ("gpt2", "zero3", "trained"),
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
    names = [name for name, _ in _named(model)]
    assert [name for name, _ in _named(copied)] == names
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
    assert all(hooks_of(m).module is m for m in copied.modules() if hooks_of(m))
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
        results.append({**_values(averaged), "outputs": outputs, "n": averaged.n_averaged.clone()})
        model_values = _values(model)
    distance = (results[0]["module.head.weight"] - model_values["head.weight"]).abs().max()
    assert distance > 1e-3, "the average is the model: the test shows nothing"
    assert_same_tensors(*results, atol=5e-6)


@pytest.mark.parametrize("kind", ["swa", "ema", "on a device"])
@pytest.mark.parametrize("plan", PLANS)
def test_torchs_averaged_model_averages_a_sharded_one(plan, kind):
    run_on_ranks(_average, 2, plan, kind)


# --- at any time ---


class _CopiesItself(nn.Module):
    """Holds a language model, and copies it while it computes."""

    def __init__(self):
        super().__init__()
        self.lm = causal_lm()
        self.copies = []  # a list: not submodules
        self.copies_now = False

    def forward(self, tokens):
        if not self.copies_now:
            return self.lm(tokens)
        handle = self.lm.blocks[1].up.register_forward_hook(
            lambda *_: self.copies.append(copy.deepcopy(self.lm))
        )
        output = self.lm(tokens)
        handle.remove()
        output.register_hook(lambda grad: self.copies.append(copy.deepcopy(self.lm)))
        return output


def _copy_while_computing(rank, world_size, plan):
    model, plain = shard_model(_CopiesItself(), PLANS[plan]), causal_lm()
    with torch.no_grad():
        for parameter in [*model.parameters(), *plain.parameters()]:
            parameter.mul_(1.5)
    model.copies_now = True
    lm_loss(model, token_batch(0, 0, rank)).backward()
    loss = lm_loss(plain, token_batch(0, 0, rank))
    in_forward, in_backward = model.copies
    for copied in (in_forward, in_backward):
        assert not any(unit.has_leaves_installed for unit in units_in(copied))
        assert_same_tensors(_values(copied), _values(plain), atol=0)
        assert torch.equal(lm_loss(copied, token_batch(0, 0, rank)), loss)
    lm_loss(in_forward, token_batch(0, 0, rank)).backward()
    for (name, theirs), ours in zip(_named(model.lm), in_forward.parameters(), strict=True):
        assert torch.equal(theirs.grad.to_local(), ours.grad.to_local()), name


@pytest.mark.parametrize("plan", PLANS)
def test_a_copy_made_while_the_model_computes(plan):
    run_on_ranks(_copy_while_computing, 2, plan)


# --- parts ---


def _copy_parts(rank, world_size, plan):
    plain, model = tied_lm(), shard_model(tied_lm(), PLANS[plan])
    hidden = torch.randn(2, 9, 20, generator=torch.Generator().manual_seed(rank))
    tokens = token_batch(0, 0, rank)["tokens"][:, :-1]
    with StorageTracker(model) as tracker:
        before = tracker.settled_bytes()
        block = copy.deepcopy(model.blocks[1])
        grown = tracker.settled_bytes() - before
    share = 4 * sum(p.numel() for p in plain.blocks[1].parameters()) / world_size
    assert share <= grown <= 1.05 * share + 2048, "a block's copy is a block"
    for _ in range(2):  # the second runs in the recorded order
        assert torch.equal(block(hidden), plain.blocks[1](hidden))
        block(hidden).sum().backward()
    blocks = copy.deepcopy(model.blocks)  # a container of units
    assert torch.equal(blocks[2](blocks[0](hidden)), plain.blocks[2](plain.blocks[0](hidden)))
    # The embedding without the head that its weight is tied to; the norm, whose unit has the head.
    assert torch.equal(copy.deepcopy(model.embedding)(tokens), plain.embedding(tokens))
    norm = copy.deepcopy(model.norm)
    assert torch.equal(norm(hidden), plain.norm(hidden))
    norm(hidden).square().sum().backward()
    assert norm.weight.grad is not None
    # Two modules of one unit, below a module that is not sharded.
    pair = nn.ModuleList([nn.Linear(20, 5), nn.Linear(5, 2)])
    with torch.no_grad():
        expected = pair[1](pair[0](hidden))
    fully_shard(list(pair))
    copied = copy.deepcopy(pair)
    assert len({id(unit) for unit in units_in(copied)}) == 1
    assert torch.equal(copied[1](copied[0](hidden)), expected)
    # And the other way: a copy becomes a part of another model.
    outer = fully_shard(nn.Sequential(block, nn.Linear(20, 3)))
    outer(hidden).sum().backward()
    assert outer[0].up.weight.grad is not None
    assert outer[0].up.weight.spec.name == "0.up.weight"


@pytest.mark.parametrize("plan", PLANS)
def test_parts_of_a_sharded_model_can_be_copied(plan):
    run_on_ranks(_copy_parts, 2, plan)


def _part_of_a_unit(rank, world_size):
    model = shard_model(causal_lm())
    with pytest.raises(NotImplementedError, match=r"'blocks\.1'.*rank.*inside.*Copy the unit's"):
        copy.deepcopy(model.blocks[1].up)
    model(token_batch(0, 0, rank)["tokens"][:, :-1])


def test_a_part_of_a_unit_is_not_copied():
    run_on_ranks(_part_of_a_unit, 2)


class _Scorer(nn.Linear):
    def score(self, inputs):
        return super().forward(inputs).sum()


def _copy_with_method(rank, world_size):
    torch.manual_seed(0)
    model = shard_model(_Scorer(7, 5))
    register_forward_method(model, "score")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2.0)
    inputs = torch.ones(2, 7)
    torch.testing.assert_close(copied.score(inputs), 2 * model.score(inputs))


def test_a_registered_method_of_a_copy_is_the_copys_own():
    run_on_ranks(_copy_with_method, 2)


class _CopiesOnlyWeights(nn.Linear):
    def __deepcopy__(self, memo):
        copied = nn.Linear.__new__(type(self))
        nn.Module.__init__(copied)
        return copied


def _copy_in_its_own_way(rank, world_size):
    model = shard_model(_CopiesOnlyWeights(7, 5))
    with pytest.raises(NotImplementedError, match=r"_CopiesOnlyWeights\.__deepcopy__.*full_state"):
        copy.deepcopy(model)


def test_a_class_that_copies_itself_in_part_is_refused():
    run_on_ranks(_copy_in_its_own_way, 1)


# --- tensors and optimizers ---


def _copy_tensors_and_optimizers(rank, world_size, order):
    model, plain = shard_model(mlp()), mlp()
    optimizers = [OPTIMIZERS["adamw"](m.parameters()) for m in (model, plain)]

    def step(model, optimizer, index, is_sharded):
        for each in [rank] if is_sharded else range(world_size):
            loss = mlp_loss(model, mlp_batch(index, 0, each))
            (loss if is_sharded else loss / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()

    pairs = []
    for is_sharded, pair in zip(
        (True, False), zip((model, plain), optimizers, strict=True), strict=True
    ):
        step(*pair, 0, is_sharded)
        copied = copy.deepcopy(pair if order == "model first" else pair[::-1])
        pairs.append(copied if order == "model first" else copied[::-1])
        for each in (pair, pairs[-1]):
            step(*each, 1, is_sharded)
        assert all(
            p is q
            for p, q in zip(
                pairs[-1][0].parameters(), pairs[-1][1].param_groups[0]["params"], strict=True
            )
        )
        step(*pairs[-1], 2, is_sharded)
    assert_same_tensors(_values(pairs[0][0]), _values(pairs[1][0]), atol=1e-6)
    assert_same_tensors(_values(model), _values(plain), atol=1e-6, what="the first")

    parameter = model.second.weight
    alone = copy.deepcopy(parameter)
    assert type(alone) is type(parameter)
    assert isinstance(alone, nn.Parameter)
    assert torch.equal(alone.full_tensor(), parameter.full_tensor())
    before = parameter.to_local().clone()
    with torch.no_grad():
        alone.mul_(2.0)
    assert torch.equal(parameter.to_local(), before)
    stranger = nn.Linear(2, 2)
    stranger.weight = alone
    with pytest.raises(ValueError, match=r"'weight'.*full_tensor"):
        fully_shard(stranger)

    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        parameter.zero_()
    assert torch.equal(state["second.weight"].to_local(), before)
    model.load_state_dict(state)
    assert torch.equal(parameter.to_local(), before)

    mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    gradient = copy.deepcopy(parameter.grad)
    model.zero_grad(set_to_none=False)
    assert gradient.to_local().abs().sum() > 0
    model.zero_grad()
    with model.no_sync():
        mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    with pytest.raises(RuntimeError, match=r"second\.weight.*deepcopy.*not reduced"):
        copy.deepcopy(parameter.grad)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_optimizers_parameters_and_states_can_be_copied(order):
    run_on_ranks(_copy_tensors_and_optimizers, 2, order)


# --- other ways to copy ---

SAVINGS = {
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
    "torch.save of one around it": lambda model: torch.save(nn.Sequential(model), io.BytesIO()),
    "pickle": pickle.dumps,
    "copy.copy": copy.copy,
}


def _save_modules(rank, world_size):
    for model in (shard_model(mlp()), shard_model(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))):
        for save in SAVINGS.values():
            with pytest.raises(TypeError, match=r"sharded.*full_state_dict"):
                save(model)
    with pytest.raises(TypeError, match=r"second\.weight.*full_state_dict"):
        pickle.dumps(shard_model(mlp()).second)


def test_saving_a_sharded_module_is_refused_with_the_way_to_do_it():
    run_on_ranks(_save_modules, 2)
