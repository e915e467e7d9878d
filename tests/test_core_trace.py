"""A profiler's trace of a step: ranges named as the life cycle's steps, compute between them."""

import json

import torch

from lightning_fsdp import shard_model
from tests.support.models import causal_lm, lm_loss, token_batch
from tests.support.ranks import run_on_ranks

STEPS = ("unshard", "wait_for_unshard", "reduce", "wait_for_reduce")


def _trace(rank, world_size, folder):
    model = shard_model(causal_lm())
    for step in range(2):  # the first records the order in which units follow each other
        lm_loss(model, token_batch(step, 0, rank)).backward()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        lm_loss(model, token_batch(2, 0, rank)).backward()
    path = folder / f"rank{rank}.json"
    profile.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    return [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events]


def _first(events, name, after=0.0):
    """Start and stop of the first range of a name that starts after a moment."""
    return min((start, stop) for n, start, stop in events if n == name and start >= after)


def _products(events, start, stop):
    names = ("aten::mm", "aten::addmm", "aten::bmm")
    return sum(n in names and start <= begin and end <= stop for n, begin, end in events)


def test_gathers_and_reductions_are_in_flight_while_the_model_computes(tmp_path):
    for events in run_on_ranks(_trace, 2, tmp_path):
        names = {name for name, _, _ in events}
        for index in range(3):
            assert {f"{step} blocks.{index}" for step in STEPS} <= names
        for unit in ("blocks.1", "blocks.2"):  # gathered ahead, while the one before computes
            _, started = _first(events, f"unshard {unit}")
            waits, _ = _first(events, f"wait_for_unshard {unit}")
            assert _products(events, started, waits) > 0, unit
        for unit in ("blocks.2", "blocks.1"):
            _, started = _first(events, f"reduce {unit}")
            waits, _ = _first(events, f"wait_for_reduce {unit}", after=started)
            assert _products(events, started, waits) > 0, unit
