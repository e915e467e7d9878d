"""What the command does, by its options: compare arms, see how they scale, find the largest batch.

Each prints a table, leaves its files in ``--out``, and returns the command's exit code: 0 if all of
it ran and holds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lightning_fsdp.bench import output
from lightning_fsdp.bench.arms import Arm, Workload, choose_arms
from lightning_fsdp.bench.largest_batch import Found, find_largest, format_found, write_found
from lightning_fsdp.bench.limits import mean_unit_bytes, measure_limits
from lightning_fsdp.bench.records import Run
from lightning_fsdp.bench.report import summarize
from lightning_fsdp.bench.report_page import format_table
from lightning_fsdp.bench.results import Results
from lightning_fsdp.bench.runner import run_arm, run_arms
from lightning_fsdp.bench.scaling import run_scaling
from lightning_fsdp.bench.scaling_report import write_scaling
from lightning_fsdp.harness.amounts import format_bytes
from lightning_fsdp.harness.command_line import end
from lightning_fsdp.harness.environment import describe
from lightning_fsdp.simulate.network import networks_of

_PRODUCT_DTYPES = {"32": "float32", "bf16": "bfloat16", "16": "float16"}  # by precision


def compare(args: argparse.Namespace, workload: Workload, document: dict[str, Any]) -> int:
    """Run all arms, print the table, write the report."""
    arms = _arms(args, args.batch_sizes)
    runs = run_arms(arms, workload, repeats=args.repeats, out=args.out, timeout_s=args.timeout)
    num_missing = len(arms) * args.repeats - len(runs)
    limits = None
    if not num_missing:
        limits = measure_limits(
            args.ranks,
            accelerator=args.device,
            unit_bytes=mean_unit_bytes(runs),
            dtype=_PRODUCT_DTYPES[args.precision.partition("-")[0]],
            out=args.out / "limits",
        )
    peak_flops = args.peak_flops or (None if limits is None else limits.flops_per_s)
    rows = summarize(arms, runs, workload, limits=limits, peak_flops=peak_flops)
    results = Results(
        **document,
        config=next((run.config for run in runs if run.config is not None), None),
        limits=limits,
        peak_flops_from="given" if args.peak_flops else "measured products",
        rows=rows,
        runs=runs,
    )
    output.write(args.out, results)
    table = format_table(rows)
    print(f"\n{describe(document)}\n\n{table}\n\nWritten to {args.out}/: {output.WRITTEN}")
    logs = {run.arm: run.log for run in reversed(runs)}
    logs |= {run.arm: run.log for run in reversed(runs) if run.failure is not None}
    return end(
        f"{num_missing} runs were not made" if num_missing else None,
        [f"{row.arm}: {row.failure}; see {logs.get(row.arm)}" for row in rows if row.failure],
    )


def simulate(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    workload: Workload,
    document: dict[str, Any],
) -> int:
    """Run all arms among more and more ranks that are simulated, and write how they scale."""
    try:
        networks = networks_of(
            args.ranks,
            bandwidth_gb_s=args.bandwidth,
            latency_us=args.latency,
            num_hosts=args.hosts,
            host_bandwidth_gb_s=args.host_bandwidth,
        )
    except ValueError as error:
        parser.error(f"--ranks: {error}")
    points, num_missing = run_scaling(
        _arms(args, args.batch_sizes),
        workload,
        networks,
        repeats=args.repeats,
        out=args.out,
        timeout_s=args.timeout,
    )
    write_scaling(args.out, points, networks[-1], document)
    print((args.out / "scaling.md").read_text())
    print(f"Written to {args.out}/: scaling.md, .csv, .json, .png, .svg")
    return end(
        f"{num_missing} runs were not made" if num_missing else None,
        [f"{p.arm} at {p.world_size}: {p.failure}" for p in points if p.failure is not None],
    )


def search(args: argparse.Namespace, workload: Workload, document: dict[str, Any]) -> int:
    """Find the largest batch of every arm, and write every attempt."""

    def run(arm: Arm, of: Workload, out: Path) -> Run:
        done = run_arm(arm, of, repeat=0, out=out, timeout_s=args.timeout)
        peaks = [rank.peak_bytes for rank in done.ranks]
        known = " ".join("?" if peak is None else format_bytes(peak) for peak in peaks)
        said = done.failure or f"at most {known}"
        # Above the bar.
        tqdm.write(f"{arm.name}, {of.total_steps} steps, {done.wall_s:.0f} s: {said}")
        sys.stdout.flush()
        return done

    # A size is searched, and one process would take the batches of all ranks.
    chosen = [arm for arm in _arms(args, [1]) if arm.engine != "single"]
    found: list[Found] = []
    is_complete = False
    try:
        for of_arm in find_largest(
            chosen,
            workload,
            run,
            cap=args.max_batch_size,
            device_bytes=args.device_memory,
            out=args.out / "runs",
        ):
            found.append(of_arm)  # noqa: PERF402 (what was found before Ctrl-C counts)
        is_complete = True
    except KeyboardInterrupt:
        if not found:
            raise
    write_found(args.out, found, document)
    print(f"\n{describe(document)}\n\n{format_found(found)}\n\nWritten to {args.out}/: ")
    print("largest_batch.md, largest_batch.json (every attempt), runs/ (a log per run)")
    without = [each for each in found if each.search.largest is None]
    return end(
        None if is_complete else f"{len(chosen) - len(found)} arms were not searched",
        [f"{each.arm}: no batch fits; {each.search.limit}" for each in without],
    )


def _arms(args: argparse.Namespace, batch_sizes: Sequence[int]) -> list[Arm]:
    return choose_arms(
        engines=args.engines,
        zero_stages=args.stages,
        batch_sizes=batch_sizes,
        grad_accums=args.grad_accum,
    )
