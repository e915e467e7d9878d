"""Copies made while a model computes, of its parts, tensors and optimizers; ways not to copy."""

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn

from lightning_fsdp import (
    fully_shard,
    register_forward_method,
    shard_model,
)
from lightning_fsdp.core.sharded_module import units_in
from tests.support.copied import parameters_of, values_of
from tests.support.memory import StorageTracker
from tests.support.models import (
    causal_lm,
    lm_loss,
    mlp,
    mlp_batch,
    mlp_loss,
    tied_lm,
    token_batch,
)
from tests.support.parity import (
    OPTIMIZERS,
    PLANS,
    assert_same_tensors,
)
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

# --- of a unit with several modules ---


def _layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


def _train_beside(rank, world_size, what):
    """Train a model and, if it is a copy of all of it, the copy, while both are alive."""
    model, inputs = _layers(), torch.randn(3, world_size, 4, generator=torch.manual_seed(1))
    fully_shard([model[1], model[2]], reshard_after_forward=False)
    fully_shard(model)
    traffic = model[1].weight.spec.communicator.traffic["reduce_scatter"]
    copied = copy.deepcopy({"all": model, "part": model[2], "around a part": [model[2]]}[what])
    for each in (model, copied, model) if what == "all" else (model, model):
        plain = _layers()
        plain.load_state_dict({name: p.full_tensor() for name, p in each.named_parameters()})
        optimizers = [OPTIMIZERS["adamw"](m.parameters()) for m in (each, plain)]
        for x in inputs:
            for optimizer in optimizers:
                optimizer.zero_grad()
            before = traffic.calls
            each(x[rank]).square().sum().backward()
            assert traffic.calls - before == 2, "of each unit one"
            (plain(x).square().sum() / world_size).backward()
            for optimizer in optimizers:
                optimizer.step()
            # Under ZeRO-2 as well, nothing is whole after a step.
            assert not any(unit.is_held for unit in units_in(each))
        for ours, theirs in zip(each.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs.detach())


@pytest.mark.parametrize("what", ["all", "part", "around a part"])
def test_a_unit_of_several_modules_and_its_copy_train_apart(what):
    run_on_ranks(_train_beside, 2, what)


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
        assert_same_tensors(values_of(copied), values_of(plain), atol=0)
        assert torch.equal(lm_loss(copied, token_batch(0, 0, rank)), loss)
    lm_loss(in_forward, token_batch(0, 0, rank)).backward()
    for (name, theirs), ours in zip(parameters_of(model.lm), in_forward.parameters(), strict=True):
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
    part = fully_shard(nn.Sequential(nn.Linear(2, 2)))[0]
    gc.collect()  # its module is gone
    with pytest.raises(NotImplementedError, match=r"'Sequential'.*Copy the unit's"):
        copy.deepcopy(part)
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
    assert_same_tensors(values_of(pairs[0][0]), values_of(pairs[1][0]), atol=1e-6)
    assert_same_tensors(values_of(model), values_of(plain), atol=1e-6, what="the first")

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


def _take_what_is_over_a_parameter(rank, world_size):
    model, other = shard_model(mlp()), mlp()
    weight = next(model.parameters())
    for taken in (nn.Parameter(weight.data), copy.deepcopy(weight)):
        taken.requires_grad_(False)
        next(other.children()).weight = taken
        with pytest.raises(ValueError, match="expected a plain parameter, got the copy of a shard"):
            shard_model(other)
    mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    return weight.grad is not None


def test_what_is_over_a_parameter_or_a_copy_of_it_is_not_the_parameter():
    assert all(run_on_ranks(_take_what_is_over_a_parameter, 2))


def _save_modules(rank, world_size):
    for model in (shard_model(mlp()), shard_model(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))):
        for save in SAVINGS.values():
            with pytest.raises(TypeError, match=r"sharded.*full_state_dict"):
                save(model)
    with pytest.raises(TypeError, match=r"second\.weight.*full_state_dict"):
        pickle.dumps(shard_model(mlp()).second)


def test_saving_a_sharded_module_is_refused_with_the_way_to_do_it():
    run_on_ranks(_save_modules, 2)
