"""Command line of the benchmarks; see ``--help``, ``optimizer --help`` and ``plot --help``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from lightning_fsdp.bench import optimizer, output
from lightning_fsdp.bench.arms import ENGINES, Workload, choose_arms
from lightning_fsdp.bench.report import summarize
from lightning_fsdp.bench.report_page import format_table
from lightning_fsdp.bench.runner import run_arms
from lightning_fsdp.harness.environment import describe, environment


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
        observed_steps=2,
        writes_snapshots=args.snapshot,
    )
    runs = run_arms(arms, workload, repeats=args.repeats, out=args.out, timeout_s=args.timeout)
    rows = summarize(arms, runs, workload)
    command = shlex.join(["python", "-m", "lightning_fsdp.bench", *given])
    configuration = {key: _plain(value) for key, value in asdict(workload).items()}
    document = {"command": command, "workload": configuration, **environment()}
    output.write(args.out, rows, runs, document)
    table = format_table([asdict(row) for row in rows])
    print(f"\n{describe(document)}\n\n{table}\n\nWritten to {args.out}/: {output.WRITTEN}")
    failed = [row for row in rows if row.failure is not None]
    for row in failed:
        logs = [str(run.log) for run in runs if run.arm.name == row.arm]
        print(f"error: {row.arm}: {row.failure}; see {logs[0]}", file=sys.stderr)
    return 1 if failed else 0


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
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds per run")
    parser.add_argument("--snapshot", action="store_true", help="CUDA memory of rank 0, per run")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    return parser


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    sys.exit(main())
