"""Command line of the benchmarks; see ``--help``, ``optimizer --help`` and ``plot --help``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from lightning_fsdp.bench import optimizer, output
from lightning_fsdp.bench.arms import ENGINES, Arm, Workload, choose_arms
from lightning_fsdp.bench.largest_batch import find_largest, format_found, write_found
from lightning_fsdp.bench.limits import mean_unit_bytes, measure_limits
from lightning_fsdp.bench.report import summarize
from lightning_fsdp.bench.report_page import format_table
from lightning_fsdp.bench.runner import Run, run_arm, run_arms
from lightning_fsdp.bench.scaling import networks_of, run_scaling
from lightning_fsdp.bench.scaling_report import write_scaling
from lightning_fsdp.harness.amounts import format_bytes, parse_bytes
from lightning_fsdp.harness.environment import describe, environment

_DTYPES = {"32": "float32", "bf16": "bfloat16", "16": "float16", "64": "float64"}


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
    parser = _parser()
    args = parser.parse_args(given)
    try:
        arms = choose_arms(
            engines=args.engines,
            zero_stages=args.stages,
            batch_sizes=args.batch_sizes,
            grad_accums=args.grad_accum,
        )
    except ValueError as error:
        parser.error(str(error))
    if not args.config.is_file():
        parser.error(f"--config: no file {str(args.config)!r}. Run from the project's folder.")
    if args.nproc < 1 or args.steps < 2 or args.repeats < 1 or args.warmup < 0:
        parser.error("--nproc and --repeats: at least 1; --steps: at least 2; --warmup: at least 0")
    if (args.largest_batch is None) != (args.device_memory is None):
        parser.error("--largest-batch and --device-memory: expected both or none of them")
    if args.largest_batch is not None and args.simulate_world:
        parser.error("--simulate-world and --largest-batch: expected one of them")
    if args.largest_batch is not None and args.largest_batch < 1:
        parser.error(f"--largest-batch: expected at least 1, got {args.largest_batch}")
    if args.snapshot and (args.warmup < 1 or not torch.cuda.is_available()):
        parser.error("--snapshot records CUDA's memory in the last warm-up step: expected a CUDA "
                     f"device and --warmup of at least 1, got {torch.cuda.device_count()} devices "
                     f"and {args.warmup}")  # fmt: skip
    workload = Workload(
        config=args.config,
        num_ranks=args.nproc,
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
    if args.simulate_world:
        return _simulate(parser, args, arms, unprofiled, document)
    if args.largest_batch is not None:
        return _find_largest(arms, unprofiled, args, document)
    runs = run_arms(arms, workload, repeats=args.repeats, out=args.out, timeout_s=args.timeout)
    limits = measure_limits(
        args.nproc,
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
    failed = [row for row in rows if row.failure is not None]
    for row in failed:
        logs = [str(run.log) for run in runs if run.arm.name == row.arm]
        print(f"error: {row.arm}: {row.failure}; see {logs[0]}", file=sys.stderr)
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
        peaks = [format_bytes(rank.peak_bytes or 0) for rank in done.ranks]
        said = done.failure or f"at most {' '.join(peaks)}"
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


def _amount(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_fsdp.bench",
        description="Train one recipe under several strategies, in turns, and compare. "
        "(`optimizer`: another benchmark, of optimizers built before sharding. `plot DIR`: tables "
        "and pictures of earlier results.)",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--engines", nargs="+", default=list(ENGINES))
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[4], help="per rank")
    parser.add_argument("--grad-accum", nargs="+", type=int, default=[1])
    parser.add_argument("--nproc", type=int, default=2, help="ranks")
    parser.add_argument("--config", type=Path, default=Path("recipes/gpt2_zero3.yaml"))
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=20, help="timed optimizer steps")
    parser.add_argument("--warmup", type=int, default=5, help="optimizer steps before them")
    parser.add_argument("--repeats", type=int, default=2, help="rounds over all arms")
    simulation = parser.add_argument_group("past this machine (see network.py for the model)")
    simulation.add_argument(
        "--simulate-world",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="one real process each, among so many ranks that are only modelled",
    )
    simulation.add_argument("--bandwidth", type=float, default=10.0, help="of a link, GB/s")
    simulation.add_argument("--latency", type=float, default=10.0, help="of a message, us")
    simulation.add_argument("--hosts", type=int, default=1, help="that the largest N are spread on")
    simulation.add_argument("--host-bandwidth", type=float, help="of a link between hosts, GB/s")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds per run")
    parser.add_argument(
        "--largest-batch",
        type=int,
        metavar="CAP",
        help="in place of comparing: find each arm's largest batch per rank, at most CAP",
    )
    parser.add_argument(
        "--device-memory",
        type=_amount,
        metavar="AMOUNT",
        help="with --largest-batch: what a rank's tensors may take, such as 2GB",
    )
    parser.add_argument(
        "--profile", action="store_true", help="write a chrome trace of each run's profiled steps"
    )
    parser.add_argument(
        "--peak-flops",
        type=float,
        help="of one device per second, for the MFU; by default what matrix products reach here",
    )
    parser.add_argument("--snapshot", action="store_true", help="CUDA memory of rank 0, per run")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    return parser


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    sys.exit(main())
