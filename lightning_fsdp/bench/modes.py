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

from lightning_fsdp.bench import largest_batch, output, scaling
from lightning_fsdp.bench.arms import Arm, Workload, choose_arms
from lightning_fsdp.bench.limits import measure_limits
from lightning_fsdp.bench.records import Run
from lightning_fsdp.bench.report import summarize
from lightning_fsdp.bench.report_page import format_table
from lightning_fsdp.bench.results import Results
from lightning_fsdp.bench.runner import in_turns, run_arm
from lightning_fsdp.harness.amounts import format_bytes
from lightning_fsdp.harness.command_line import end
from lightning_fsdp.harness.environment import describe


def compare(args: argparse.Namespace, workload: Workload, document: dict[str, Any]) -> int:
    """Run all arms, print the table, write the report."""
    arms, folder = _arms(args, args.batch_sizes), args.out / "runs"

    def run(arm: Arm, repeat: int) -> Run:
        return run_arm(arm, workload, repeat=repeat, out=folder, timeout_s=args.timeout)

    made, num_missing = in_turns({arm.name: arm for arm in arms}, args.repeats, run)
    runs = [done for _, done in made]
    limits = None if num_missing else measure_limits(workload, runs, args.out / "limits")
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


def simulate(args: argparse.Namespace, workload: Workload, document: dict[str, Any]) -> int:
    """Run all arms among more and more ranks that are simulated, and write how they scale."""
    networks, out = args.networks, args.out / "runs"

    def run(arm: Arm, of: Workload, repeat: int, world: str) -> Run:
        return run_arm(arm, of, repeat=repeat, out=out / world, timeout_s=args.timeout)

    arms = _arms(args, args.batch_sizes)
    points, num_missing = scaling.run_scaling(arms, workload, networks, run, repeats=args.repeats)
    scaling.write_scaling(args.out, points, networks[-1], document)
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

    def search_one(arm: Arm, _: int) -> largest_batch.Found:
        cap, device_bytes, out = args.max_batch_size, args.device_memory, args.out / "runs"
        return largest_batch.find_largest(
            arm, workload, run, cap=cap, device_bytes=device_bytes, out=out
        )

    # A size is searched, and one process would take the batches of all ranks.
    arms = {largest_batch.name_of(arm): arm for arm in _arms(args, [1]) if arm.engine != "single"}
    made, num_missing = in_turns(arms, 1, search_one)
    found = [each for _, each in made]
    largest_batch.write_found(args.out, found, document)
    table = largest_batch.format_found(found)
    print(f"\n{describe(document)}\n\n{table}\n\nWritten to {args.out}/: ")
    print("largest_batch.md, largest_batch.json (every attempt), runs/ (a log per run)")
    without = [each for each in found if each.search.largest is None]
    return end(
        f"{num_missing} arms were not searched" if num_missing else None,
        [f"{each.arm}: no batch fits; {each.search.limit}" for each in without],
    )


def _arms(args: argparse.Namespace, batch_sizes: Sequence[int]) -> list[Arm]:
    return choose_arms(
        engines=args.engines,
        zero_stages=args.stages,
        batch_sizes=batch_sizes,
        grad_accums=args.grad_accum,
    )
