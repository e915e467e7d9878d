"""Command line of the benchmarks; see ``--help``, ``optimizer --help`` and ``plot --help``.

What is chosen with options is one of three: to compare arms, to find their largest batches, or to
see how they scale over ranks that are only simulated.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning_fsdp.bench import optimizer, output
from lightning_fsdp.bench.arms import Arm, Workload
from lightning_fsdp.bench.largest_batch import find_largest, format_found, write_found
from lightning_fsdp.bench.limits import mean_unit_bytes, measure_limits
from lightning_fsdp.bench.options import parse
from lightning_fsdp.bench.report import summarize
from lightning_fsdp.bench.report_page import format_table
from lightning_fsdp.bench.runner import Run, run_arm, run_arms
from lightning_fsdp.bench.scaling import networks_of, run_scaling
from lightning_fsdp.bench.scaling_report import write_scaling
from lightning_fsdp.harness.amounts import format_bytes
from lightning_fsdp.harness.command_line import INTERRUPTED, exit_with
from lightning_fsdp.harness.environment import describe, environment

_DTYPES = {"32": "float32", "bf16": "bfloat16", "16": "float16"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison, print the table, write the files.

    Returns:
        Exit code: 0 if every arm ran and agrees with its reference.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["optimizer"]:
        return optimizer.main(given[1:])
    if given[:1] == ["plot"]:
        return output.main(given[1:])
    parser, args = parse(given)
    arms = args.arms
    workload = Workload(
        config=args.config,
        num_ranks=args.nproc,
        accelerator=args.accelerator,
        precision=args.precision,
        warmup_steps=args.warmup,
        timed_steps=args.steps,
        profiled_steps=2,
        observed_steps=2,
        writes_traces=args.profile,
        writes_snapshots=args.snapshot,
    )
    command = shlex.join(["python", "-m", "lightning_fsdp.bench", *given])
    configuration = {key: _plain(value) for key, value in asdict(workload).items()}
    document = {"command": command, "workload": configuration, **environment()}
    unprofiled = replace(workload, profiled_steps=0)
    if args.simulate_world is not None:
        return _simulate(parser, args, arms, unprofiled, document)
    if args.largest_batch is not None:
        return _find_largest(arms, unprofiled, args, document)
    return _compare(arms, workload, args, document)


def _compare(
    arms: Sequence[Arm], workload: Workload, args: argparse.Namespace, document: dict[str, Any]
) -> int:
    runs = run_arms(arms, workload, repeats=args.repeats, out=args.out, timeout_s=args.timeout)
    num_missing = len(arms) * args.repeats - len(runs)
    limits = None
    if not num_missing:
        limits = measure_limits(
            args.nproc,
            accelerator=args.accelerator,
            unit_bytes=mean_unit_bytes(runs),
            dtype=_DTYPES[args.precision.partition("-")[0]],
            out=args.out / "limits",
        )
    peak_flops = args.peak_flops or (None if limits is None else limits.flops_per_s)
    rows = summarize(arms, runs, workload, limits=limits, peak_flops=peak_flops)
    document["limits"] = None if limits is None else asdict(limits)
    document["peak_flops_from"] = "given" if args.peak_flops else "measured products"
    output.write(args.out, rows, runs, document)
    table = format_table([asdict(row) for row in rows])
    print(f"\n{describe(document)}\n\n{table}\n\nWritten to {args.out}/: {output.WRITTEN}")
    if num_missing:
        print(f"interrupted: {num_missing} runs were not made", file=sys.stderr)
        return INTERRUPTED
    failed = [row for row in rows if row.failure is not None]
    for row in failed:
        of_arm = [run for run in runs if run.arm.name == row.arm]
        log = next((run.log for run in of_arm if run.failure is not None), of_arm[0].log)
        print(f"error: {row.arm}: {row.failure}; see {log}", file=sys.stderr)
    return 1 if failed else 0


def _simulate(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    arms: list[Arm],
    workload: Workload,
    document: dict[str, Any],
) -> int:
    try:
        networks = networks_of(
            args.simulate_world,
            bandwidth_gb_s=args.bandwidth,
            latency_us=args.latency,
            num_hosts=args.hosts,
            host_bandwidth_gb_s=args.host_bandwidth,
        )
    except ValueError as error:
        parser.error(f"--simulate-world: {error}")
    points = run_scaling(
        arms,
        workload,
        networks,
        repeats=args.repeats,
        out=args.out,
        timeout_s=args.timeout,
    )
    write_scaling(args.out, points, networks[-1], document)
    print((args.out / "scaling.md").read_text())
    print(f"Written to {args.out}/: scaling.md, .csv, .json, .png, .svg")
    failed = [point for point in points if point.failure is not None]
    for point in failed:
        print(f"error: {point.arm} at {point.world_size}: {point.failure}", file=sys.stderr)
    return 1 if failed else 0


def _find_largest(
    arms: Sequence[Arm], workload: Workload, args: argparse.Namespace, document: dict[str, Any]
) -> int:
    def run(arm: Arm, of: Workload, out: Path) -> Run:
        done = run_arm(arm, of, repeat=0, out=out, timeout_s=args.timeout)
        peaks = [rank.peak_bytes for rank in done.ranks]
        known = " ".join("?" if peak is None else format_bytes(peak) for peak in peaks)
        said = done.failure or f"at most {known}"
        print(f"{arm.name}, {of.total_steps} steps, {done.wall_s:.0f} s: {said}", flush=True)
        return done

    # A size is searched, and one process would take the batches of all ranks.
    chosen = dict.fromkeys(replace(arm, batch_size=1) for arm in arms if arm.engine != "single")
    found = find_largest(
        list(chosen),
        workload,
        run,
        cap=args.largest_batch,
        device_bytes=args.device_memory,
        out=args.out / "runs",
    )
    write_found(args.out, found, document)
    print(f"\n{describe(document)}\n\n{format_found(found)}\n\nWritten to {args.out}/: ")
    print("largest_batch.md, largest_batch.json (every attempt), runs/ (a log per run)")
    without = [each for each in found if each.search.largest is None]
    for each in without:
        print(f"error: {each.arm}: no batch fits; {each.search.limit}", file=sys.stderr)
    return 1 if without else 0


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    exit_with(main)
