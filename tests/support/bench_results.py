"""Results of a benchmark that never ran: every figure made from an arm's engine, stage and size."""

import copy
import json
from dataclasses import asdict

from pydantic import TypeAdapter

from lightning_fsdp.bench.arms import Workload, choose_arms
from lightning_fsdp.bench.records import Row
from lightning_fsdp.bench.results import Results
from lightning_fsdp.harness.environment import environment

MIB = 2**20
SPEEDS = {"single": 1.3, "ddp": 1.2, "scratch": 1.1, "fsdp1": 0.8, "fsdp2": 0.9}


def workload(num_ranks=2):
    return Workload(
        config="recipe.yaml", num_ranks=num_ranks, accelerator="cpu", precision="32-true",
        warmup_steps=1,
        timed_steps=3, profiled_steps=1, observed_steps=1,
    )  # fmt: skip


def document_of(
    *,
    engines=("scratch", "fsdp1", "fsdp2"),
    stages=(2, 3),
    batch_sizes=(1, 2, 4),
    accums=(1, 2),
    num_ranks=2,
    repeats=2,
    failures=None,
    is_old=False,
):
    """What ``results.json`` says of a sweep; ``failures`` is arm -> (kind, reason)."""
    work = workload(num_ranks)
    arms = choose_arms(
        engines=engines, zero_stages=stages, batch_sizes=batch_sizes, grad_accums=accums
    )
    rows, runs = [], []
    for arm in arms:
        kind, reason = (failures or {}).get(arm.name, (None, None))
        row = {**asdict(base_row(arm, work)), **({} if is_old else new_fields(arm, work))}
        if reason is not None:
            kept = {"arm", "engine", "zero_stage", "batch_size", "grad_accum", "num_processes"}
            if kind != "wrong losses":  # those were measured, and are there
                row = {name: value if name in kept else None for name, value in row.items()}
            row["failure"] = reason
            if not is_old:
                row["failure_kind"] = kind
        rows.append(row)
        for repeat in range(repeats):
            ranks = [
                rank_of(arm, work, rank, repeat, is_old=is_old)
                for rank in range(arm.num_processes(work))
            ]
            has_ranks = kind in (None, "wrong losses") and (reason is None or kind is not None)
            runs.append({
                "arm": arm.name, "repeat": repeat, "wall_s": 9.0, "failure": reason,
                "failure_kind": kind, "ranks": ranks if has_ranks else [],
            })  # fmt: skip
    made = {
        "command": "python -m lightning_fsdp.bench",
        "workload": {**asdict(work)},
        **environment(),
        "rows": rows,
        "runs": runs,
    }
    return json.loads(json.dumps(made))


def as_results(document):
    return TypeAdapter(Results).validate_json(json.dumps(document), strict=True)


def results_of(**choice):
    """The same, as it is read."""
    return as_results(document_of(**choice))


def without(document, *names):
    """The same, with some arms never run."""
    changed = copy.deepcopy(document)
    changed["rows"] = [row for row in changed["rows"] if row["arm"] not in names]
    changed["runs"] = [run for run in changed["runs"] if run["arm"] not in names]
    return changed


def step_ms(arm):
    return 40.0 * arm.batch_size * arm.grad_accum / SPEEDS[arm.engine] + 5 * (arm.zero_stage or 0)


def tokens_per_s(arm, work):
    return 256 * arm.batch_size * arm.grad_accum * work.num_ranks / step_ms(arm) * 1e3


def peak_bytes(arm):
    return (60 - 10 * (arm.zero_stage or 0) + 12 * arm.batch_size) * MIB


def exposed_ms(arm):
    return 0.0 if arm.engine == "single" else 0.1 * step_ms(arm)


def base_row(arm, work):
    world = arm.num_processes(work)
    return Row(
        arm=arm.name, engine=arm.engine, zero_stage=arm.zero_stage, batch_size=arm.batch_size,
        grad_accum=arm.grad_accum, num_processes=world, loss_first=8.3, loss_last=7.1,
        loss_gap=0.0, tokens_per_s=tokens_per_s(arm, work), step_ms=step_ms(arm),
        step_ms_q1=0.9 * step_ms(arm), step_ms_q3=1.2 * step_ms(arm),
        peak_bytes=[peak_bytes(arm) + rank * MIB for rank in range(world)],
        resting_bytes=[24 * MIB // (arm.zero_stage or 1)] * world,
        collectives={} if world == 1 else {"all_gather": 6.0, "reduce_scatter": 5.0, "send": 2.5},
        payload_bytes=0.0 if world == 1 else 5.8e6 * (arm.zero_stage or 1),
    )  # fmt: skip


def new_fields(arm, work):
    whole, exposed, world = step_ms(arm), exposed_ms(arm), arm.num_processes(work)
    return {
        "parts_ms": {
            "data_ms": 0.05 * whole, "compute_ms": 0.7 * whole - exposed, "exposed_ms": exposed,
            "overlapped_ms": 2 * exposed, "optimizer_ms": 0.1 * whole, "other_ms": 0.15 * whole,
            "whole_ms": whole,
        },
        "mfu": 0.31, "peak_flops": 2e11, "flops_per_token": 1.2e7, "host_ms": 0.4 * whole,
        "peak_rss_bytes": [(700 + 20 * arm.batch_size) * MIB] * world,
        "cuda_peak_allocated_bytes": [None] * world, "cuda_peak_reserved_bytes": [None] * world,
        "end_to_end_s": 12.5, "mean_bytes": [0.7 * peak_bytes(arm)] * world,
        "sent_bytes": 0.0 if world == 1 else 3.1e6 * (arm.zero_stage or 1),
        "theory": {
            "collectives": {} if world == 1 else {"all_gather": 6, "reduce_scatter": 5},
            "payload_bytes": 0 if world == 1 else 5.5e6 * (arm.zero_stage or 1),
            "sent_bytes": 0 if world == 1 else 3e6 * (arm.zero_stage or 1),
        },
        "compute_limit_ms": 0.6 * whole, "communication_limit_ms": 0.05 * whole,
        "times_limit": 1 / 0.6, "failure_kind": None,
        "peak_by_kind": by_owner(peak_bytes(arm)),
    }  # fmt: skip


def by_owner(peak):
    return {
        "parameters": peak // 4, "gradients": peak // 8, "optimizer": peak // 4,
        "activations": peak - 2 * (peak // 4) - peak // 8,
    }  # fmt: skip


def timeline(arm):
    peak = peak_bytes(arm)
    return [[0.002 * i, round(peak * (0.3 + 0.7 * (1 - abs(i - 50) / 50)))] for i in range(101)]


def rank_of(arm, work, rank, repeat, *, is_old):
    world = arm.num_processes(work)
    losses = [8.3 - 0.05 * i + 0.01 * rank for i in range(5 * arm.grad_accum)]
    second = step_ms(arm) / 1e3 * (1 + 0.1 * repeat)
    tokens = 256 * arm.batch_size * arm.grad_accum * work.num_ranks // world
    old = {
        "rank": rank, "world_size": world, "losses": losses, "step_s": [second] * 3,
        "step_tokens": [tokens] * 3, "resting_bytes": 24 * MIB, "peak_bytes": peak_bytes(arm),
        "collectives": {}, "payload_bytes": 0.0,
    }  # fmt: skip
    if is_old:
        return old
    return {
        **old, "timeline": timeline(arm), "host_s": [0.01] * 3, "fit_s": 12.5, "parts": [],
        "utilization": [[0.1 * i, 60 + 10 * rank + 5 * repeat] for i in range(4)],
        "utilization_of": "cpu", "peak_rss_bytes": 700 * MIB,
        "peak_by_kind": by_owner(peak_bytes(arm)),
    }  # fmt: skip


SMALL = {"engines": ["scratch"], "stages": [3], "batch_sizes": [2], "accums": [1]}
FAILED = {"scratch_zero3_b2_a1": ("out of memory", "exit code 1: DefaultCPUAllocator: no memory")}


def arms():
    return choose_arms(engines=["scratch"], zero_stages=[3], batch_sizes=[2], grad_accums=[1])


def folder_of(document, path):
    (path / "results.json").write_text(json.dumps(document))
    return path
