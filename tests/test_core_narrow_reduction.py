"""bf16 gradients summed in fp32: bf16 travels, and the mean is exactly that of fp32 copies.

What several backwards added up in fp32 travels in fp32. Which of both it is, all ranks know.
"""

import copy
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fully_shard_of_torch

from lightning_fsdp import ZERO2, MixedPrecisionPolicy, gradients, shard_model
from lightning_fsdp.core.engine.communicator import LocalRegion
from lightning_fsdp.core.engine.layout import plan_layout
from lightning_fsdp.core.ranks import narrow, pairs
from lightning_fsdp.core.ranks.groups import communicator_of
from tests.support import ranks
from tests.support.counting import CollectiveCounter
from tests.support.models import causal_lm, lm_loss, shard_lm_by_hand, token_batch
from tests.support.parity import PLANS
from tests.support.ranks import PLAIN, run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

BF16, FP32 = torch.bfloat16, torch.float32
POLICIES = {
    name: MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=dtype, output_dtype=FP32)
    for name, dtype in {"fp32": FP32, "bf16": BF16}.items()
}
CUTS = [40, 10**9]  # large gradients travel from where they were made; all are copied together


def local_gradients_by_hand(rank, micro_batch=0):
    """One rank's bf16 gradients of ``causal_lm()``, as plain torch computes them."""
    model = copy.deepcopy(causal_lm()).to(BF16)
    lm_loss(lambda tokens: model(tokens).float(), token_batch(0, micro_batch, rank)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def mean_by_hand(tensors):
    """The fp32 mean, added up in order."""
    total = tensors[0].float()
    for tensor in tensors[1:]:
        total = total + tensor.float()
    return total / len(tensors)


def full_gradients(model):
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


# --- values ---


def _one_backward(rank, world_size, plan):
    found = []
    for cut in CUTS:
        with mock.patch.object(pairs, "_LARGE_NUMEL", cut):
            model = shard_model(causal_lm(), PLANS[plan], mp_policy=POLICIES["fp32"])
            lm_loss(model, token_batch(0, 0, rank)).backward()
            found.append(full_gradients(model))
    return found


@pytest.mark.parametrize(
    ("world_size", "backend", "plan"),
    [(2, "gloo", "zero2"), (2, PLAIN, "zero3"), (4, "gloo", "zero3"), (4, PLAIN, "zero2")],
)
def test_gradients_are_the_fp32_mean_of_the_ranks_bf16_gradients(world_size, backend, plan):
    by_hand = [local_gradients_by_hand(rank) for rank in range(world_size)]
    for found in itertools.chain(*run_on_ranks(_one_backward, world_size, plan, backend=backend)):
        assert found.keys() == by_hand[0].keys()
        for name, gradient in found.items():
            assert gradient.dtype == FP32
            expected = mean_by_hand([each[name] for each in by_hand])
            assert torch.equal(gradient, expected), name
            assert not torch.equal(gradient, expected.bfloat16().float()), "bf16 would do"


def _beside_torch_fsdp2(rank, world_size):
    ours = shard_model(causal_lm(), mp_policy=POLICIES["fp32"])
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(
        param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32
    )
    theirs = shard_lm_by_hand(causal_lm(), fully_shard_of_torch, mp_policy=policy)
    for model in (ours, theirs):
        lm_loss(model, token_batch(0, 0, rank)).backward()
    for (name, mine), their in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), their.grad.full_tensor()), name


def test_torchs_fsdp2_gives_the_same_bits_and_sends_fp32():
    run_on_ranks(_beside_torch_fsdp2, 2)


def _wide_range(rank, numel):
    """bf16 values of which the order of adding up shows in the fp32 sum."""
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-14, 15, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator) * 2.0**exponents).bfloat16()


def _empty(numel, dtype):
    return torch.empty(numel, dtype=dtype)


@mock.patch.object(pairs, "_LARGE_NUMEL", 1)
def _reduce_a_region(rank, world_size):
    """Two gradients with padding between and after them, sent apart or all as one."""
    communicator = communicator_of(dist.group.WORLD)
    numel = world_size * 264
    layout = plan_layout([("a", (270,)), ("b", (numel - 288 - 5,))], world_size)
    assert layout.numel == numel
    region = _wide_range(rank, numel)
    gradients = {0: region[:270], 1: region[288:-5]}
    # 264 elements are two blocks and a part of one.
    with mock.patch.object(narrow, "_BLOCK_NUMEL", 100 * world_size):
        pending = communicator.reduce(LocalRegion(gradients, layout, "u", _empty, BF16, FP32))
        traffic = communicator.traffic["reduce_scatter"]
        return pending.wait(), traffic.calls, traffic.sent_bytes


@pytest.mark.parametrize("backend", ["gloo", PLAIN])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_region_is_summed_in_rank_order_in_fp32_and_sent_in_bf16(world_size, backend):
    by_rank = run_on_ranks(_reduce_a_region, world_size, backend=backend)
    rows = [_wide_range(rank, world_size * 264) for rank in range(world_size)]
    expected, reversed_order = mean_by_hand(rows), mean_by_hand(rows[::-1])
    assert world_size == 2 or not torch.equal(expected, reversed_order), "the test shows nothing"
    expected[270:288] = 0
    expected[-5:] = 0
    shards, calls, sent_bytes = zip(*by_rank, strict=True)
    assert torch.equal(torch.cat(shards), expected)
    assert set(calls) == {1}
    for sent in sent_bytes:
        assert 2 * (264 * (world_size - 1) - 23) <= sent <= 2 * 264 * (world_size - 1)


# --- traffic ---


def _sent(counter, world_size):
    return counter.reduced_bytes(world_size), {call.dtype for call in counter.reductions()}


def _count_steps(rank, world_size, policy, plan):
    """Reduced bytes and dtypes of steps of one, three (the last synced) and again one backward."""
    model = shard_model(causal_lm(), PLANS[plan], mp_policy=POLICIES[policy])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counted = []
    for num_micro_batches in (1, 3, 1):
        with CollectiveCounter() as counter:
            with model.no_sync():
                for micro_batch in range(num_micro_batches - 1):
                    lm_loss(model, token_batch(0, micro_batch, rank)).backward()
            assert not counter.reductions()
            lm_loss(model, token_batch(0, 9, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        counted.append(_sent(counter, world_size))
    return counted


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("backend", ["gloo", PLAIN])
def test_bf16_travels_but_sums_over_backwards_travel_in_fp32(backend, plan):
    in_bf16 = run_on_ranks(_count_steps, 2, "bf16", plan, backend=backend)
    in_fp32 = run_on_ranks(_count_steps, 2, "fp32", plan, backend=backend)
    for low, wide in zip(in_bf16, in_fp32, strict=True):
        num_bytes = low[0][0]
        assert num_bytes > sum(p.numel() for p in causal_lm().parameters())  # half of them, 2 each
        assert low == [(num_bytes, {BF16})] * 3
        assert wide == [(num_bytes, {BF16}), (2 * num_bytes, {FP32}), (num_bytes, {BF16})]


def _accumulate(rank, world_size, plan):
    """Values after an unsynced and a synced backward, and what ``local()`` gave between them."""
    model = shard_model(causal_lm(), PLANS[plan], mp_policy=POLICIES["fp32"])
    access = gradients(model)
    with model.no_sync():
        lm_loss(model, token_batch(0, 0, rank)).backward()
    local = {name: access[name].local().clone() for name in access.names()}
    lm_loss(model, token_batch(0, 1, rank)).backward()
    return local, full_gradients(model)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("backend", ["gloo", PLAIN])
def test_a_sum_over_backwards_loses_no_bits_on_the_way(backend, plan):
    by_hand = [[local_gradients_by_hand(rank, m) for m in range(2)] for rank in range(2)]
    for rank, (local, found) in enumerate(run_on_ranks(_accumulate, 2, plan, backend=backend)):
        for name in found:
            sums = [first[name].float() + second[name].float() for first, second in by_hand]
            assert torch.equal(local[name], by_hand[rank][0][name].float())
            assert torch.equal(found[name], mean_by_hand(sums)), name


# --- ranks with different gradients ---


class TwoWays(nn.Module):
    """Two units; the second one's output takes part or not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, inputs, second_weight):
        first, second = self.first(inputs), self.second(inputs)
        return first.sum() + (second_weight * second.sum() if second_weight else 0.0)


SECOND_WEIGHTS = {0: [2.0, 3.0], 1: [0.0, 5.0]}  # rank 1's first backward does not see the unit


def _inputs(rank, micro_batch):
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * rank + micro_batch))


def _differ_in_the_unsynced_backward(rank, world_size):
    model = shard_model(TwoWays(), ZERO2, units=["Linear"], mp_policy=POLICIES["fp32"])
    for micro_batch, weight in enumerate(SECOND_WEIGHTS[rank]):
        model.set_requires_gradient_sync(micro_batch == 1)
        model(_inputs(rank, micro_batch), weight).backward()
    return full_gradients(model)


@pytest.mark.parametrize("backend", ["gloo", PLAIN])
def test_ranks_that_have_different_local_gradients_send_the_same_dtype(backend):
    sums = []
    for rank, weights in SECOND_WEIGHTS.items():
        total = {name: torch.zeros(p.shape) for name, p in TwoWays().named_parameters()}
        for micro_batch, weight in enumerate(weights):
            model = TwoWays().to(BF16)
            model(_inputs(rank, micro_batch).bfloat16(), weight).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    total[name] += parameter.grad.float()
        sums.append(total)
    for found in run_on_ranks(_differ_in_the_unsynced_backward, 2, backend=backend):
        for name, gradient in found.items():
            expected = mean_by_hand([total[name] for total in sums])
            torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-2)


# --- replicas ---


def _replicated(rank, world_size):
    mesh = init_device_mesh(ranks.active_device, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard_model(causal_lm(), mesh=mesh, mp_policy=POLICIES["fp32"])
    with CollectiveCounter(mesh.get_group(0), mesh.get_group(1)) as counter:
        lm_loss(model, token_batch(0, 0, rank)).backward()
    averaged = {call.dtype for call in counter.of("all_reduce")}
    return full_gradients(model), {call.dtype for call in counter.reductions()}, averaged


@pytest.mark.parametrize("backend", ["gloo", PLAIN])
def test_bf16_travels_in_a_row_of_replicas_and_fp32_between_them(backend):
    by_hand = [local_gradients_by_hand(rank) for rank in range(4)]
    for found, reduced, averaged in run_on_ranks(_replicated, 4, backend=backend):
        assert (reduced, averaged) == ({BF16}, {FP32})
        for name, gradient in found.items():
            rows = [mean_by_hand([by_hand[r][name] for r in row]) for row in ((0, 1), (2, 3))]
            assert torch.equal(gradient, mean_by_hand(rows)), name


# --- fp16, whose sums end at 65,504 ---

FP16 = torch.float16
LARGE = 40_000.0


def _reduce_fp16(rank, world_size):
    communicator = communicator_of(dist.group.WORLD)
    region = _fp16_region(rank, world_size)
    layout = plan_layout([("a", (region.numel(),))], world_size)
    reduction = communicator.reduce(LocalRegion({0: region}, layout, "fp16", _empty, FP16, FP16))
    return reduction.wait()


_SHARD_NUMEL = 264


def _fp16_region(rank, world_size):
    """Values of which the order of adding up shows, and a few whose sum is too large."""
    region = _wide_range(rank, world_size * _SHARD_NUMEL).half()
    region[:3] = LARGE
    region[3] = 40 * rank
    region[4] = torch.inf if rank == 0 else 0.0
    return region


@pytest.mark.parametrize("backend", ["gloo", PLAIN])
@pytest.mark.parametrize("world_size", [2, 3])
def test_fp16_gradients_whose_sum_overflows_have_their_mean(world_size, backend):
    found = torch.cat(run_on_ranks(_reduce_fp16, world_size, backend=backend))
    regions = [_fp16_region(rank, world_size) for rank in range(world_size)]
    assert found.dtype == FP16
    assert found[:4].tolist() == [LARGE] * 3 + [20.0 * (world_size - 1)]
    assert found[4].isinf()
    assert torch.equal(found, mean_by_hand(regions).half())


def _train_fp16(rank, world_size, num_replicas):
    mesh = init_device_mesh("cpu", (num_replicas, world_size // num_replicas))
    model = nn.Linear(3, 1, bias=False)
    policy = MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP16)
    shard_model(model, mesh=mesh, mp_policy=policy)
    model(torch.full((1, 3), LARGE)).sum().backward()
    return model.weight.grad.full_tensor()


@pytest.mark.parametrize(("world_size", "num_replicas"), [(2, 1), (2, 2), (4, 2)])
def test_large_fp16_gradients_stay_finite_over_shards_and_replicas(world_size, num_replicas):
    for gradient in run_on_ranks(_train_fp16, world_size, num_replicas):
        assert torch.equal(gradient, torch.full((1, 3), LARGE))
