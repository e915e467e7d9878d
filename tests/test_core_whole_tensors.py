"""Optimizers that step whole tensors, each on the rank that owns it.

The reference is the same optimizer on plain tensors in one process, which is given the gradients
that the ranks had: its numbers must come out bit for bit, on any number of ranks.
"""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lightning_fsdp
from lightning_fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    elementwise_optimizer,
    full_optimizer_state_dict,
    full_state_dict,
    load_full_state_dict,
    shard_model,
)
from lightning_fsdp.core.optimizers.whole_tensors import whole_tensors_of
from tests.support.cases import each_on_ranks
from tests.support.models import causal_lm, lm_loss, mlp, mlp_batch, mlp_loss, token_batch
from tests.support.one_exchange import train_on_rank
from tests.support.optimizers import Normed, assert_same_state
from tests.support.parity import (
    PLANS,
    Trace,
    assert_same_tensors,
    assert_traces_match,
    whole,
)
from tests.support.ranks import PLAIN, run_on_ranks
from tests.support.whole_tensors import (
    OPTIMIZERS,
    AsOne,
    assert_is_one_process,
    batches_of,
    muon,
    replay,
)

pytestmark = pytest.mark.usefixtures("kept_ranks")


def _train(rank, world_size, case):
    plan, name, is_before, clip = case
    model = causal_lm()
    optimizers = OPTIMIZERS[name](model) if is_before else None
    shard_model(model, PLANS[plan])
    optimizers = optimizers or OPTIMIZERS[name](model)
    trace = train_on_rank(
        model,
        batches_of(world_size),
        lm_loss,
        AsOne(optimizers),
        rank,
        clip=(0.5, 2.0) if clip else None,
    )
    full = [full_optimizer_state_dict(optimizer) for optimizer in optimizers]
    counts = [getattr(optimizer, "num_steps", None) for optimizer in optimizers]
    return trace, full, counts


BUILT_AFTER = [("zero3", name, False, False) for name in OPTIMIZERS]
BUILT_BEFORE_AND_CLIPPED = [("zero3", name, True, True) for name in OPTIMIZERS]
FEW = [("zero2", "mixed", False, False), ("zero3", "muon", True, True)]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (1, BUILT_BEFORE_AND_CLIPPED[1::2]),
        (2, [*BUILT_AFTER, *FEW]),
        (3, BUILT_BEFORE_AND_CLIPPED[::2]),
        (4, FEW[1:]),
    ],
    ids=["1", "2", "3", "4"],
)
def test_steps_are_those_of_one_process_and_so_is_the_state(world_size, cases):
    for case, found in each_on_ranks(_train, world_size, cases).items():
        model = causal_lm()
        optimizers = OPTIMIZERS[case[1]](model)
        one = replay(model, found[0][0], optimizers)
        for trace, states, counts in found:  # each rank has losses of its own
            assert_traces_match(replace(trace, losses=one.losses), one, atol=0, what=f"{case}")
            assert counts == [getattr(optimizer, "num_steps", None) for optimizer in optimizers]
            for state, optimizer in zip(states, optimizers, strict=True):
                assert_same_state(state, optimizer.state_dict())


# --- what happens between steps ---


def _train_with_changes(rank, world_size, plan):
    """Others write weights, gradients are missing, parameters freeze, a group is added."""
    torch.manual_seed(3)
    model = mlp()
    changed = {name: torch.rand_like(p) for name, p in model.named_parameters()}
    shard_model(model, PLANS[plan])
    names = dict(model.named_parameters())
    optimizer = Normed([p for name, p in names.items() if name != "second.weight"])
    trace = Trace()
    for step in range(6):
        if step == 2:
            load_full_state_dict(model, changed)
        if step == 3:
            names["first.weight"].requires_grad_(False)
            with torch.no_grad():
                names["mix"].mul_(0.5)
        if step == 4:
            optimizer.add_param_group({"params": [names["second.weight"]], "lr": 0.01})
        batch = mlp_batch(step, 0, rank)
        outputs = model(batch["inputs"], use_bonus=step % 2 == 0)
        nn.functional.mse_loss(outputs, batch["targets"]).backward()
        trace.record(model)
        optimizer.step()
        optimizer.zero_grad()
        trace.record_step(model, 0.0)
    return trace, full_optimizer_state_dict(optimizer)


def _changed_in_one_process(trace):
    torch.manual_seed(3)
    model = mlp()
    changed = {name: torch.rand_like(p) for name, p in model.named_parameters()}
    names = dict(model.named_parameters())
    optimizer = Normed([p for name, p in names.items() if name != "second.weight"])
    found = Trace()
    for step, gradients in enumerate(trace.gradients):
        if step == 2:
            model.load_state_dict(changed)
        if step == 3:
            with torch.no_grad():
                names["mix"].mul_(0.5)
        if step == 4:
            optimizer.add_param_group({"params": [names["second.weight"]], "lr": 0.01})
        for name, parameter in names.items():
            parameter.grad = None if gradients[name] is None else gradients[name].clone()
        found.record(model)
        optimizer.step()
        found.record_step(model, 0.0)
    return found, optimizer.state_dict()


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_others_write_and_leave_out_between_steps(world_size):
    for found in each_on_ranks(_train_with_changes, world_size, PLANS).values():
        for trace, state in found:
            assert any(g is None for step in trace.gradients for g in step.values())
            expected, expected_state = _changed_in_one_process(trace)
            assert_traces_match(trace, expected, atol=0)
            assert_same_state(state, expected_state)


def _bytes_of_steps(rank, world_size):
    model = causal_lm()
    shard_model(model)
    optimizers = muon(model)
    communicator = model.head.weight.spec.communicator
    sent = []
    for step in range(3):
        lm_loss(model, token_batch(step, 0, rank)).backward()
        before = copy.copy(communicator.traffic.get("all_to_all"))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        after = communicator.traffic["all_to_all"]
        sent.append(after.sent_bytes - (before.sent_bytes if before else 0))
    held = [
        tuple(p.spec.layout.slice_of(p.spec.slot, r).numel for r in range(world_size))
        for p in model.blocks.parameters()
        if p.ndim == 2
    ]
    tensors = whole_tensors_of(optimizers[0]).agree_on_owners()
    assert [tuple(stop - start for start, stop in owned.cut.ranges) for owned in tensors] == held
    to_owners = sum(
        4 * of[rank] for of, owned in zip(held, tensors, strict=True) if owned.owner != rank
    )
    back = sum(
        4 * (sum(of) - of[rank])
        for of, owned in zip(held, tensors, strict=True)
        if owned.owner == rank
    )
    return sent, to_owners, back


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_travel_to_owners_and_parameters_back_and_nothing_else(world_size):
    """The first step also takes the parameters to their owners; AdamW, which steps other parameters
    in the same memory, changes nothing of that.
    """
    found = run_on_ranks(_bytes_of_steps, world_size)
    assert sum(to_owners for _, to_owners, _ in found) > 0
    for sent, to_owners, back in found:
        assert sent == [2 * to_owners + back] + [to_owners + back] * 2


# --- beside other features ---


def _in_replicas(rank, world_size, name):
    mesh = init_device_mesh("cpu", (2, world_size // 2))
    model = shard_model(causal_lm(), mesh=mesh)
    optimizers = OPTIMIZERS[name](model)
    trace = train_on_rank(model, batches_of(world_size), lm_loss, AsOne(optimizers), rank)
    return trace, [full_optimizer_state_dict(o, rank0_only=True) for o in optimizers]


@pytest.mark.parametrize("name", ["muon", "normed"])
def test_each_replica_has_owners_and_all_have_the_same_bits(name):
    found = run_on_ranks(_in_replicas, 4, name)
    model = causal_lm()
    optimizers = OPTIMIZERS[name](model)
    expected = replay(model, found[0][0], optimizers)
    for rank, (trace, states) in enumerate(found):
        assert_traces_match(trace, expected, atol=0, what=f"rank {rank}")
        for state, optimizer in zip(states, optimizers, strict=True):
            assert_same_state(state["state"], {} if rank else optimizer.state_dict()["state"])


def _offloaded(rank, world_size):
    model = shard_model(causal_lm(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizers = muon(model)
    return train_on_rank(model, batches_of(world_size), lm_loss, AsOne(optimizers), rank)


def test_offloaded_shards_are_stepped_on_the_host():
    for trace in run_on_ranks(_offloaded, 2):
        assert_is_one_process(trace, "muon")


def _of_mixed_precision(rank, world_size):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard_model(causal_lm(), mp_policy=policy)
    optimizers = muon(model)
    mixed = train_on_rank(model, batches_of(world_size), lm_loss, AsOne(optimizers), rank)
    model = shard_model(causal_lm().bfloat16())
    optimizer = Normed(model.parameters())
    lm_loss(model, token_batch(0, 0, rank)).backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
    optimizer.step()
    return mixed, gradients, full_state_dict(model)


def test_parameters_of_either_precision():
    for mixed, gradients, weights in run_on_ranks(_of_mixed_precision, 2):
        assert_is_one_process(mixed, "muon")
        plain = causal_lm().bfloat16()
        for name, parameter in plain.named_parameters():
            parameter.grad = gradients[name]
        Normed(plain.parameters()).step()
        assert_same_tensors(weights, plain.state_dict(), atol=0)


# --- which optimizers, and when ---


class Descent(torch.optim.Optimizer):
    """Looks at the type of what it steps."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        self.kinds = set()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.kinds.add(type(parameter).__name__)
                parameter.add_(parameter.grad, alpha=-group["lr"])


@elementwise_optimizer
class SaidElementwise(Descent):
    """Likewise."""


def _kinds(rank, world_size):
    kinds = []
    for cls in (Descent, SaidElementwise):
        model = shard_model(mlp())
        optimizer = cls(model.parameters())
        mlp_loss(model, mlp_batch(0, 0, rank)).backward()
        gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        plain = mlp()
        for name, parameter in plain.named_parameters():
            parameter.data.add_(gradients[name], alpha=-0.1)
        assert_same_tensors(full_state_dict(model), plain.state_dict(), atol=0)
        kinds.append(optimizer.kinds)
    return kinds


def test_an_unknown_optimizer_gets_whole_tensors_and_one_that_is_said_to_be_elementwise_slices():
    found = run_on_ranks(_kinds, 2)
    assert [{"ShardedTensor"}] * 2 == [said for _, said in found]
    assert set().union(*(unknown for unknown, _ in found)) == {"Parameter"}


def _with_closure(rank, world_size):
    model = shard_model(causal_lm())
    optimizer = Normed(model.parameters())
    trace = Trace()
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = lm_loss(model, token_batch(step, 0, rank))
            loss.backward()
            trace.record(model)
            return loss

        loss = optimizer.step(closure)
        trace.record_step(model, loss.item())
    return trace


@pytest.mark.parametrize("backend", ["gloo", PLAIN])
def test_closures_run_before_gradients_travel(backend):
    for trace in run_on_ranks(_with_closure, 2, backend=backend):
        assert_is_one_process(trace, "normed")


def test_the_names_are_public():
    assert lightning_fsdp.elementwise_optimizer is elementwise_optimizer
