"""A steady step on a device: the host waits for nothing, and data moves while blocks compute."""

import itertools
import json

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lightning_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, shard_model
from tests.support.models import causal_lm, lm_loss, token_batch
from tests.support.parity import PLANS
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.gpu

POLICIES = {"fp32": None, "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}


def _step_without_waiting(rank, world_size):
    """Steps in which torch raises for every call that waits for the device."""
    for plan, policy, offload in itertools.product(
        PLANS.values(), POLICIES.values(), (None, CPUOffloadPolicy())
    ):
        model = shard_model(causal_lm(), plan, mp_policy=policy, offload_policy=offload)
        # Fused: steps of others read numbers, whose device torch's versions choose differently.
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        batches = [token_batch(0, micro_batch, rank) for micro_batch in range(2)]
        for step in range(4):
            try:
                torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
                with model.no_sync():
                    lm_loss(model, batches[0]).backward()
                lm_loss(model, batches[1]).backward()
                if offload is None:  # else the norm is the device's, and the host needs it
                    model.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_steady_step_waits_for_nothing(world_size):
    run_on_ranks(_step_without_waiting, world_size)


WIDTH, NUM_BLOCKS = 2048, 6
# A block computes for as long as one moves, and longer; the other rank leaves the device alone: two
# processes take turns on it, and in another's turn copies have no computation of their own beside.
ROWS = (2**17, 8)


def _trace(rank, world_size, folder, plan):
    torch.manual_seed(0)
    blocks = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_BLOCKS))
    model = shard_model(nn.Sequential(*blocks), PLANS[plan], units=["Linear"])
    inputs = torch.randn(ROWS[rank], WIDTH)
    for _ in range(2):
        model(inputs).mean().backward()
        model.zero_grad()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        model(inputs).mean().backward()
        torch.cuda.synchronize()
    profiled.export_chrome_trace(str(folder / f"{rank}.json"))


def _intervals(events, category, is_wanted):
    """Begin and end of events, microseconds."""
    chosen = [event for event in events if event.get("cat") == category and is_wanted(event)]
    return [(event["ts"], event["ts"] + event["dur"]) for event in chosen]


def _overlap(ours, theirs):
    """Length of ``ours`` that lies within ``theirs``, whose intervals do not overlap."""
    return sum(
        max(0.0, min(stop, other_stop) - max(start, other_start))
        for start, stop in ours
        for other_start, other_stop in theirs
    )


def _hidden_share(events, way):
    """Of the time that copies of the groups' streams take, how much lies beside computation."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    compute_stream = max(kernels, key=lambda event: event["dur"])["args"]["stream"]

    def computes(event):
        return event["args"]["stream"] == compute_stream

    computing = _intervals(events, "kernel", computes)
    moving = _intervals(events, "gpu_memcpy", lambda e: way in e["name"] and not computes(e))
    assert len(moving) >= NUM_BLOCKS, f"{way}: {len(moving)} copies"
    return _overlap(moving, computing) / sum(stop - start for start, stop in moving)


@pytest.mark.parametrize("plan", PLANS)
def test_gathers_and_reductions_move_while_blocks_compute(plan, tmp_path):
    run_on_ranks(_trace, 2, tmp_path, plan)
    events = json.loads((tmp_path / "0.json").read_text())["traceEvents"]
    shares = {way: _hidden_share(events, way) for way in ("DtoH", "HtoD")}
    assert min(shares.values()) >= 0.5, f"of the time of copies is hidden: {shares}"
