"""Command line of the comparison; see ``--help``."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from lightning_fsdp.compare.cases import DTYPES, ENGINES, Case, choose_cases
from lightning_fsdp.compare.controls import run_controls
from lightning_fsdp.compare.models import MODELS, Sizes
from lightning_fsdp.compare.report import describe_environment, format_report, make_report, write
from lightning_fsdp.compare.rows import ROWS
from lightning_fsdp.compare.runner import Cell, Setup, run_cases, skip_cases
from lightning_fsdp.compare.verdicts import expectation
from lightning_fsdp.harness.command_line import (
    CommandParser,
    at_least,
    exit_with,
    folder_argument,
    positive,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests, print the table, write the files.

    Returns:
        Exit code: 0 if everything came out as recorded for this torch, and everything was run.
    """
    parser = make_parser()
    args = parser.parse(arguments)
    sizes = Sizes(width=args.width, depth=args.depth)
    cases = choose_cases(
        engines=args.engines,
        zero_stages=args.stages,
        dtypes=args.dtypes,
        models=args.models,
        sizes=sizes,
    )
    if args.expected is not None and not args.expected.is_file():
        parser.error(f"--expected: no file {str(args.expected)!r}")
    try:
        expected = expectation(torch.__version__, args.expected)
    except (OSError, ValueError) as error:
        parser.error(f"--expected: {str(args.expected)!r}: {error}")
    command = shlex.join(["python", "-m", "lightning_fsdp.compare", *(arguments or sys.argv[1:])])
    document = describe_environment(args.engines, command)
    missing = {engine: why for engine, why in document["engines"].items() if why}
    for engine, why in missing.items():
        if engine not in ENGINES:  # one of ours, which this torch lacks, is skipped
            parser.error(f"--engines: {engine!r}: {why}")
    rows = list(dict.fromkeys(args.tests))
    setup = Setup(rows=rows, device=args.device, timeout_s=args.timeout, out=args.out)
    start = time.perf_counter()
    cells: list[Cell] = []
    for world_size in dict.fromkeys(args.ranks):
        cells += _at(world_size, cases, setup, missing)
    report = make_report(
        document,
        cells,
        run_controls(Case(engine="none", zero_stage=3, dtype="fp32", model="mlp", sizes=sizes)),
        expected=expected,
        seconds=time.perf_counter() - start,
    )
    write(report, args.out)
    print(f"\n{format_report(report)}\nWritten to {args.out}/: report.md, report.json, logs/")
    return 1 if report.problems else 0


def _at(
    world_size: int, cases: Sequence[Case], setup: Setup, missing: Mapping[str, str]
) -> list[Cell]:
    """All cases at one number of ranks, in order, as far as engines and devices go."""
    present = [case for case in cases if case.engine not in missing]
    cells: list[Cell] = []
    for engine, why in missing.items():
        absent = [case for case in cases if case.engine == engine]
        cells += skip_cases(absent, world_size, setup, f"engine {why}")
    num_devices = torch.cuda.device_count()
    if setup.device == "cuda" and num_devices < world_size:
        reason = f"W={world_size} needs {world_size} GPUs, this machine has {num_devices}"
        return cells + skip_cases(present, world_size, setup, reason)
    return cells + run_cases(present, world_size, setup)


def make_parser() -> CommandParser:
    """The options."""
    parser = CommandParser(
        "lightning_fsdp.compare",
        "Read every weight and gradient under each engine, and judge them by value.",
        examples=[
            "--engines scratch fsdp1 fsdp2 --ranks 1 2 4 --out runs/compare",
            "--engines mine.engine:MyEngine --ranks 2 --dtypes fp32 --models mlp",
        ],
        old={"--world-sizes": "--ranks"},
    )
    parser.add_argument(
        "--ranks",
        nargs="+",
        type=at_least(1),
        default=[1, 2, 4],
        help="numbers of processes, one after the other",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device of each rank"
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        type=_engine,
        default=list(ENGINES),
        metavar="ENGINE",
        help=f"engines to compare: some of {', '.join(ENGINES)}; or your own, as module:Class",
    )
    parser.add_some("--stages", (2, 3), "stages of ZeRO to compare", type=int)
    of_dtypes = "dtypes of compute; after a dash that of reductions, where it is another"
    parser.add_some("--dtypes", DTYPES, of_dtypes)
    parser.add_some("--models", MODELS, "models to read from")
    parser.add_some("--tests", ROWS, "what is read and judged; a row of the table each")
    sizes = Sizes()
    parser.add_argument(
        "--width", type=at_least(1), default=sizes.width, help="features of the MLP"
    )
    parser.add_argument("--depth", type=at_least(1), default=sizes.depth, help="layers of the MLP")
    parser.add_argument(
        "--timeout", type=positive, default=60.0, help="most seconds that a test may take"
    )
    parser.add_argument(
        "--expected",
        type=Path,
        metavar="FILE",
        help="file that lists what is known not to work (default: expected.json of this package)",
    )
    parser.add_argument(
        "--out",
        type=folder_argument,
        default="runs/compare",
        help="folder for all that is written",
    )
    return parser


def _engine(text: str) -> str:
    module, _, name = text.partition(":")
    if text not in ENGINES and not all(map(str.isidentifier, [*module.split("."), name])):
        raise argparse.ArgumentTypeError(
            f"expected some of {', '.join(ENGINES)}, or module:Class, got {text!r}"
        )
    return text


if __name__ == "__main__":
    exit_with(main)
