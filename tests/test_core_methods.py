"""Methods other than forward, on sharded modules."""

import types

import pytest
import torch
from torch import nn

from lightning_fsdp import (
    call_with,
    fully_shard,
    register_forward_method,
    shard_model,
)
from tests.support.counting import CollectiveCounter
from tests.support.memory import StorageTracker
from tests.support.models import (
    causal_lm,
    lm_loss,
    mlp,
    mlp_batch,
    shard_lm_by_hand,
    tiny_gpt2,
    token_batch,
)
from tests.support.parity import (
    OPTIMIZERS,
    PLANS,
    assert_same_tensors,
    whole,
)
from tests.support.ranks import errors_on_ranks, run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")


def _generate(rank, world_size):
    prompt = torch.tensor([[5, 17, 3]])
    expected = tiny_gpt2().eval().generate(prompt, max_new_tokens=6, do_sample=False)
    results = {}
    for name, plan in PLANS.items():
        model = shard_model(tiny_gpt2(), plan).eval()
        register_forward_method(model, "generate")
        results[name] = model.generate(prompt, max_new_tokens=6, do_sample=False)
        lm_loss(model.train(), token_batch(0, 0, rank)).backward()
        assert all(p.grad is not None for p in model.parameters())
    return expected, results


def test_generate_of_gpt2_gives_the_same_tokens():
    for expected, results in run_on_ranks(_generate, 2):
        for name, tokens in results.items():
            assert torch.equal(tokens, expected), name


class _Scorer(nn.Module):
    """All its work is in a method that is not forward; it calls a unit inside it and uses weights
    of its own.
    """

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(7, 7)
        self.weight = nn.Parameter(torch.randn(7, 3))

    def score(self, inputs, *, power=1):
        return self.layer(inputs).tanh() @ self.weight**power


def _train_by_method(rank, world_size):
    torch.manual_seed(0)
    model = _Scorer()
    fully_shard(model.layer)
    fully_shard(model)
    register_forward_method(model, "score")
    torch.manual_seed(0)
    reference = _Scorer()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    their_optimizer = OPTIMIZERS["sgd"](reference.parameters())
    for step in range(3):
        (model.score(mlp_batch(step, 0, rank)["inputs"], power=2) ** 2).mean().backward()
        for each in range(world_size):
            loss = (reference.score(mlp_batch(step, 0, each)["inputs"], power=2) ** 2).mean()
            (loss / world_size).backward()
        for each in (optimizer, their_optimizer):
            each.step()
            each.zero_grad()
    return (
        {name: whole(p) for name, p in model.named_parameters()},
        {name: whole(p) for name, p in reference.named_parameters()},
    )


def test_a_registered_method_gathers_trains_and_passes_its_arguments():
    for ours, theirs in run_on_ranks(_train_by_method, 2):
        assert_same_tensors(ours, theirs, atol=1e-6)


def _replaced(model, way):
    """A scorer whose method is replaced by another one, which is set on the module."""

    def score(self, inputs, *, power=1):
        return self.layer(inputs) @ self.weight * power

    if way == "function":
        model.score = lambda inputs, power: score(model, inputs, power=power)
    else:
        model.score = types.MethodType(score, model)
    return model


def _train_by_method_of_the_object(rank, world_size, way):
    torch.manual_seed(0)
    reference = _replaced(_Scorer(), way)
    torch.manual_seed(0)
    model = _replaced(fully_shard(_Scorer()), way)
    register_forward_method(model, "score")
    model.score(mlp_batch(0, 0, rank)["inputs"], power=2).square().mean().backward()
    for each in range(world_size):
        loss = reference.score(mlp_batch(0, 0, each)["inputs"], power=2).square().mean()
        (loss / world_size).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("way", ["method", "function"])
def test_a_method_that_was_set_on_the_module_is_the_one_that_is_registered(way):
    run_on_ranks(_train_by_method_of_the_object, 2, way)


def _register_wrong(rank, world_size, name):
    model = fully_shard(mlp())
    register_forward_method(nn.Linear(2, 2) if name == "forward of a stranger" else model, name)


@pytest.mark.parametrize("name", ["no_such_method", "scale"])
def test_registering_what_is_no_method_is_refused(name):
    for error in errors_on_ranks(_register_wrong, 1, name):
        assert error is not None
        assert error.type_name == "ValueError"
        assert name in error.message


class _Later(nn.Linear):
    """Methods that have computed nothing when they return."""

    def steps(self, inputs):
        yield self.weight @ inputs

    async def answer(self, inputs):
        return self.weight @ inputs

    @torch.no_grad()
    def decorated(self, inputs):
        yield self.weight @ inputs


def _compute_later(rank, world_size, name):
    model = fully_shard(_Later(3, 3))
    said = f"expected a function that returns what it has computed, got '{name}'"
    with pytest.raises(TypeError, match=f"^register_forward_method: {said}"):
        register_forward_method(model, name)
    for module in (model, nn.Linear(3, 3)):  # a plain one that runs it may be sharded tomorrow
        with pytest.raises(TypeError, match=f"^call_with: {said}"):
            call_with(module, getattr(model, name), torch.ones(3))


@pytest.mark.parametrize("name", ["steps", "answer", "decorated"])
def test_a_generator_or_an_async_method_is_refused_when_it_is_registered(name):
    run_on_ranks(_compute_later, 1, name)


def _explicit_unshard(rank, world_size):
    model, inputs = causal_lm(width=24), token_batch(0, 0, rank)["tokens"][:, :-1]
    shard_lm_by_hand(model, fully_shard)
    block, gathers = model.blocks[0], {}
    with torch.no_grad(), StorageTracker(model) as tracker:
        model(inputs)
        with CollectiveCounter() as counter:
            block.unshard()
            handle = model.blocks[1].unshard(async_op=True)
            handle.wait()
        gathers["unshard"] = counter.num_gathers(world_size)
        gathers["whole"] = len(tracker.whole_sizes())
        with CollectiveCounter() as counter:
            model(inputs)
        gathers["forward"] = counter.num_gathers(world_size)
        block.unshard()
        block.reshard()
        gathers["whole after reshard"] = len(tracker.whole_sizes())
    return gathers


def test_explicit_unshard_gathers_ahead_and_reshard_frees():
    for gathers in run_on_ranks(_explicit_unshard, 2):
        assert gathers == {"unshard": 2, "whole": 2, "forward": 7 - 2, "whole after reshard": 0}


def _reshard_in_backward(rank, world_size):
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    model[1].register_full_backward_hook(lambda *_: model.reshard())
    with pytest.raises(RuntimeError, match=r"expected reshard\(\) outside of its forward and back"):
        model(torch.ones(2, 4)).sum().backward()


def test_reshard_is_refused_while_a_backward_computes_with_the_whole_copy():
    run_on_ranks(_reshard_in_backward, 1)


class _Applies(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def apply_to(self, inputs, *, function, module="layer"):
        return function(getattr(self, module)(inputs))


def _keywords(rank, world_size):
    model = fully_shard(_Applies())
    register_forward_method(model, "apply_to")
    return model.apply_to(torch.ones(2, 4), function=torch.tanh, module="layer").shape


def test_a_method_may_have_keywords_of_any_name():
    assert run_on_ranks(_keywords, 2) == [(2, 4)] * 2
