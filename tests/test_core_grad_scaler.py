"""torch's own ``GradScaler`` on sharded gradients: what one rank finds stops the step on all.

The reference is one process with plain tensors: an fp16 copy of the model per rank, fp32 main
weights, and a ``GradScaler`` of its own.
"""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_fsdp import MixedPrecisionPolicy, gradients, shard_model
from tests.support import ranks
from tests.support.cases import each_on_ranks
from tests.support.counting import CollectiveCounter
from tests.support.models import TASKS
from tests.support.one_exchange import InOneExchange
from tests.support.parity import PLANS, Trace, assert_ranks_agree, assert_traces_match, sgd
from tests.support.ranks import PLAIN, run_on_ranks
from tests.support.scaled import INITIAL_SCALE, new_scaler
from tests.test_core_precision import local_gradients

pytestmark = pytest.mark.usefixtures("kept_ranks")

NUM_STEPS = 6
OPTIMIZERS = {
    "sgd": sgd,
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=False),
    "foreach adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
}


def fp16(reduce_dtype=torch.float32):
    return MixedPrecisionPolicy(
        param_dtype=torch.float16, reduce_dtype=reduce_dtype, output_dtype=torch.float32
    )


# -- whole trainings -------------------------------------------------------------------------------


def train_scaled(rank, world_size, plan, cases, offload=None):
    """What each case leaves: a trace, the scale after each step, and the scaler's state."""
    results = {}
    for case in cases:
        task_name, reduce_dtype, optimizer_name, max_norm = case
        task, trace, scales = TASKS[task_name], Trace(), []
        policies = {"mp_policy": fp16(reduce_dtype), "offload_policy": offload}
        model = shard_model(task.build(), PLANS[plan], **policies)
        optimizer, scaler = OPTIMIZERS[optimizer_name](model.parameters()), new_scaler(task_name)
        for step in range(NUM_STEPS):
            scaler.scale(task.loss(model, task.make_batch(step, 0, rank))).backward()
            if max_norm:
                scaler.unscale_(optimizer)
                model.clip_grad_norm_(max_norm)
            _finish(trace, scales, InOneExchange(model), optimizer, scaler)
        results[case] = trace, scales, scaler.state_dict()
    return results


def _train_reference(world_size, task_name, reduce_dtype, optimizer_name, max_norm):
    task, trace, scales = TASKS[task_name], Trace(), []
    model = task.build()
    optimizer, scaler = OPTIMIZERS[optimizer_name](model.parameters()), new_scaler(task_name)
    scaler.scale(torch.zeros(()))  # it makes its scale with the first loss that it sees
    for step in range(NUM_STEPS):
        by_rank = [
            local_gradients(
                model, task, task.make_batch(step, 0, r), torch.float16, scaler.get_scale()
            )
            for r in range(world_size)
        ]
        for parameter, parts in zip(model.parameters(), zip(*by_rank, strict=True), strict=True):
            mean = _mean(parts, reduce_dtype)
            # A sum in fp16 may overflow where the mean does not.
            mean = torch.where(mean.isfinite(), mean, _mean(parts, torch.float32).to(reduce_dtype))
            parameter.grad = mean.float()
        if max_norm:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        _finish(trace, scales, model, optimizer, scaler)
    return trace, scales, scaler.state_dict()


def _mean(parts, dtype):
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total / len(parts)


def _finish(trace, scales, model, optimizer, scaler):
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    trace.record_step(model, 0.0)
    scales.append(scaler.get_scale())


CASES = [
    *(("mlp", torch.float32, name, None) for name in OPTIMIZERS),
    ("mlp", torch.float16, "sgd", None),
    ("tied_lm", torch.float32, "sgd", None),
    ("mlp", torch.float32, "sgd", 1e-3),
    ("mlp", torch.float32, "fused adamw", 1e-3),
]


@pytest.mark.parametrize(
    ("world_size", "backend", "plan"),
    [
        *((1, "gloo", "zero2"), (2, "gloo", "zero3"), (2, PLAIN, "zero2"), (4, "gloo", "zero3")),
    ],
)
def test_training_with_a_scaler_equals_one_process(world_size, backend, plan):
    """At W=1 and 2 the order of the sums is the same: bit for bit, but for the norm's."""
    by_rank = run_on_ranks(train_scaled, world_size, plan, CASES, backend=backend)
    for case in CASES:
        expected, scales, state = _train_reference(world_size, *case)
        traces = [results[case][0] for results in by_rank]
        assert_ranks_agree(traces, str(case))
        is_same_order = world_size < 3 and case[0] == "mlp" and case[3] is None
        atol = 0 if is_same_order else 2e-5
        assert_traces_match(traces[0], expected, atol=atol, what=str(case))
        for results in by_rank:
            assert results[case][1:] == (scales, state), case
        by_step = itertools.pairwise([INITIAL_SCALE[case[0]], *scales])
        was_skipped = [after < before for before, after in by_step]
        assert was_skipped[0], case
        assert not all(was_skipped), case


# -- inf on one rank -------------------------------------------------------------------------------


def _two_tiny_layers():
    """Four parameters of one element: with four ranks, two of each unit's ranks hold nothing."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))


def _square(model, rank, step=0):
    return model(torch.tensor([[1.0 + rank + step]])).square().mean()


def _break_on(is_here, model):
    def break_one(name, gradient, micro_batch):
        if is_here and name == "1.bias":
            gradient.fill_(torch.inf)

    return gradients(model).on_local(break_one)


def _inf_on_one_rank(rank, world_size, case):
    plan, optimizer_name, unscales = case
    model = shard_model(_two_tiny_layers(), PLANS[plan], units=["Linear"])
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses_seen, held = [], [p.to_local().numel() for p in model.parameters()]
    before = [p.full_tensor() for p in model.parameters()]

    handle = _break_on(rank == world_size - 1, model)
    scaler.scale(_square(model, rank)).backward()
    handle.remove()
    finite = [bool(p.grad.to_local().isfinite().all()) for p in model.parameters()]
    if unscales:
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    after = [p.full_tensor() for p in model.parameters()]
    assert all(map(torch.equal, before, after)), "the skipped step changed something"
    assert scaler.get_scale() == 512.0
    with CollectiveCounter() as counter:
        scaler.scale(_square(model, rank, step=1)).backward()
    scaler.step(optimizer)
    scaler.update()
    losses_seen.append(_square(model, 0).item())  # of the whole weights as they are now
    return {
        "held": held,
        "finite": finite,
        "state": scaler.state_dict(),
        "parameters": [p.full_tensor() for p in model.parameters()],
        "loss": losses_seen,
        "gathers": len(counter.gathers()),
    }


def _one_good_step(optimizer_name, world_size):
    model = _two_tiny_layers()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    (sum(_square(model, rank, step=1) for rank in range(world_size)) / world_size).backward()
    optimizer.step()
    return model


# Plan, optimizer, and whether gradients are unscaled and clipped before the step.
INF_CASES = list(itertools.product(PLANS, ("sgd", "foreach adamw", "fused adamw"), (False, True)))


@pytest.mark.parametrize("world_size", [2, 4])
def test_inf_on_one_rank_skips_the_step_on_every_rank(world_size):
    """The rank whose gradient overflowed does not own the element; of four, two own nothing."""
    for case, by_rank in each_on_ranks(_inf_on_one_rank, world_size, INF_CASES).items():
        assert sum(not all(results["finite"]) for results in by_rank) == 1, case
        assert all(by_rank[-1]["finite"]) or world_size == 2, case
        assert (world_size == 4) == any(sum(results["held"]) == 0 for results in by_rank), case
        expected = _one_good_step(case[1], world_size)
        for results in by_rank:
            assert results["state"] == by_rank[0]["state"], case
            assert results["state"]["scale"] == 512.0, case
            for ours, theirs in zip(results["parameters"], expected.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-7)
            assert results["loss"] == pytest.approx([_square(expected, 0).item()], rel=1e-5), case


GATHERS_AFTER = {
    ("zero2", "sgd", False): 0,
    ("zero2", "fused adamw", False): 2,
    ("zero3", "sgd", False): 3,  # the last unit waits for its backward
    ("zero3", "fused adamw", False): 3,
}


def test_weights_kept_by_zero2_serve_the_forward_after_a_skipped_step():
    """A fused optimizer's step runs, and skips inside: it ends what was kept, as any step does."""
    for case, by_rank in each_on_ranks(_inf_on_one_rank, 2, GATHERS_AFTER).items():
        assert [results["gathers"] for results in by_rank] == [GATHERS_AFTER[case]] * 2, case


def _inf_in_one_replica(rank, world_size):
    mesh = init_device_mesh(ranks.active_device, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard_model(_two_tiny_layers(), mesh=mesh)
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    _break_on(rank == 3, model)
    scaler.scale(_square(model, rank)).backward()
    before = [p.full_tensor() for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), all(
        torch.equal(p.full_tensor(), old) for p, old in zip(model.parameters(), before, strict=True)
    )


def test_replicas_skip_together():
    assert run_on_ranks(_inf_in_one_replica, 4) == [(4.0, True)] * 4
