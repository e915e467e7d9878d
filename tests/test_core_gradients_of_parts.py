"""Weights and gradients by name: streamed, of parts, and reduced one after the other."""

import copy

import pytest
import torch
from torch import nn

from lightning_fsdp import (
    fully_shard,
    gradients,
    shard_model,
    weights,
)
from tests.support.by_name import assert_same_tensors
from tests.support.memory import StorageTracker, tensors_of
from tests.support.models import causal_lm, lm_loss, mlp, mlp_batch, mlp_loss, token_batch
from tests.support.parity import PLANS
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")


def _weights(rank, world_size, plan):
    model, reference = shard_model(causal_lm(), PLANS[plan]), causal_lm()
    w = weights(model)
    seen = {}
    model.blocks[1].register_forward_hook(
        lambda *_: seen.update({name: w_.full() for name, w_ in weights(model).items()})
    )
    lm_loss(model, token_batch(0, 0, rank)).backward()
    expected = {name: p.detach() for name, p in reference.named_parameters()}
    assert w.names() == list(expected)
    assert_same_tensors(dict(w.full()), expected, atol=0, what="streamed")
    assert_same_tensors({name: w[name].full() for name in w}, expected, atol=0, what="singly")
    assert_same_tensors(seen, expected, atol=0, what="inside a forward")
    inner = weights(model.blocks[0])
    assert_same_tensors(
        dict(inner.full()),
        {n: p.detach() for n, p in reference.blocks[0].named_parameters()},
        atol=0,
    )
    with pytest.raises(KeyError, match=r"blocks\.0\.up\.weight"):
        w["blocks.0.up.wieght"]
    with pytest.raises(ValueError, match="without any"):
        weights(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("plan", PLANS)
def test_weights_are_there_by_name_at_any_time(plan):
    run_on_ranks(_weights, 2, plan)


def _stream_memory(rank, world_size):
    model = shard_model(causal_lm(width=96))
    lm_loss(model, token_batch(0, 0, rank)).backward()
    g, most = gradients(model), 0
    unit = 4 * max(sum(p.numel() for p in b.parameters()) for b in causal_lm(width=96).blocks)
    with StorageTracker(model) as tracker:
        tracker.track(tensors_of(model))
        before, sizes = tracker.settled_bytes(), []
        tracker.at_each_operation = lambda: sizes.append(tracker.live_bytes())
        for _ in g.full():
            pass
        most = max(sizes) - before
    return unit, most


def test_streaming_holds_one_unit_at_most():
    for unit, most in run_on_ranks(_stream_memory, 2):
        assert unit <= most <= 1.05 * unit


class _CalledTwice(nn.Module):
    """The second call alone uses ``bias``, so its gradient is reduced before the first's come."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.end = _Optional(), nn.Linear(7, 3)

    def forward(self, inputs):
        return self.end(self.layer(self.layer(inputs, False), True))


class _Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.bias = nn.Linear(7, 7), nn.Parameter(torch.zeros(7))

    def forward(self, inputs, use_bias):
        outputs = torch.tanh(self.linear(inputs))
        return outputs + self.bias if use_bias else outputs


def _late(rank, world_size, plan):
    model, batches = _CalledTwice(), [mlp_batch(0, each, rank) for each in range(2)]
    for child in model.children():
        fully_shard(child, reshard_after_forward=plan == "zero3")
    fully_shard(model, reshard_after_forward=plan == "zero3")
    g = gradients(model)
    with g.micro_batches("separate"):
        for batch in batches:
            mlp_loss(model, batch).backward()
    reference, earlier = _CalledTwice(), {}
    for micro_batch in range(2):
        for each in range(world_size):
            (mlp_loss(reference, mlp_batch(0, micro_batch, each)) / world_size).backward()
        total = {name: p.grad.clone() for name, p in reference.named_parameters()}
        expected = {name: t - earlier.get(name, 0) for name, t in total.items()}
        ours = {name: g[name].full(micro_batch) for name in total}
        assert_same_tensors(ours, expected, atol=1e-7, what=f"micro-batch {micro_batch}")
        earlier = total


@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_parts_of_a_micro_batch_that_are_reduced_one_after_the_other_add_up(plan):
    run_on_ranks(_late, 2, plan)


def _keep_apart_twice(rank, world_size):
    model = shard_model(mlp())
    outer, inner = gradients(model), gradients(model)
    with outer.micro_batches("separate"), inner.micro_batches("separate"):
        mlp_loss(model, mlp_batch(0, 0, rank)).backward()
        for name, whole in outer.full(micro_batch=0):
            assert torch.equal(whole, outer[name].full()), name


def test_what_two_contexts_keep_apart_is_kept_once():
    run_on_ranks(_keep_apart_twice, 2)


def _ask_a_part_of_a_unit(rank, world_size):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    fully_shard(model[0])
    seen, part = [], model[0][1]
    gradients(part).on_local(lambda name, gradient, index: seen.append(name))
    model(torch.ones(2, 4)).sum().backward()
    assert sorted(seen) == ["bias", "weight"]
    assert {name: whole.shape for name, whole in weights(part).full()} == {
        "weight": (4, 4), "bias": (4,),
    }  # fmt: skip


def test_a_module_inside_a_unit_has_its_gradients_and_weights_by_name():
    run_on_ranks(_ask_a_part_of_a_unit, 2)


def _keep_a_part_local(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    fully_shard(model[0])
    fully_shard(model)
    inputs = torch.arange(world_size * 2 * 4.0).view(world_size, 2, 1, 4)  # of two micro-batches
    g = gradients(model[0][1])
    with g.micro_batches("local"):
        for each in inputs[rank]:
            model(each).square().sum().backward()
            assert g["weight"].state == g["bias"].state == "local"
            assert gradients(model)["1.weight"].state == "reduced"
    for each in inputs.flatten(0, 1):
        (plain(each).square().sum() / world_size).backward()
    expected = {name: p.grad for name, p in plain[0][1].named_parameters()}
    assert_same_tensors(dict(g.full()), expected, atol=1e-3)


def test_micro_batches_of_a_module_inside_a_unit_wait_to_be_reduced():
    run_on_ranks(_keep_a_part_local, 2)
