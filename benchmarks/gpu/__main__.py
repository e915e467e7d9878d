"""Run everything that a GPU has to tell; see ``docs/gpu.md``.

python -m benchmarks.gpu --part tests --out runs/gpu
python -m benchmarks.gpu --part speed --out runs/gpu     # again: goes on where it was stopped
python -m benchmarks.gpu --device cpu                    # all of it in small, in a minute
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
import time
import tomllib
import traceback
from pathlib import Path

from benchmarks.gpu.cases import all_cases, assumptions, small_cases
from benchmarks.gpu.jobs import describe_session, preload
from benchmarks.gpu.record import AS_WHOLE, FAILED, Record
from benchmarks.gpu.table import count_failures, write_table
from lightning_fsdp.harness.command_line import (
    CommandParser,
    exit_with,
    folder_argument,
    positive,
)
from lightning_fsdp.harness.environment import is_installed

ROOT = Path(__file__).resolve().parents[2]
# And what each part's processes import.
PARTS = {"tests": "torch", "speed": "benchmarks.gpu.measure", "recipes": "recipes.train"}
BUDGET_S = 510.0  # of a part: what ends within 9 minutes leaves some for the way there
PEAK_TFLOPS = 989.0  # bfloat16, dense: NVIDIA's data sheet of the H100 and H200 (SXM)


def missing_for(part: str) -> list[str]:
    """Packages that a part cannot do without and that are not here."""
    needed = {"tests": ["pytest"], "speed": ["transformers"], "recipes": _packages_of_recipes()}
    return [name for name in needed[part] if not is_installed(name)]


def _packages_of_recipes() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["recipes"]
    return [re.split(r"[\[<>=~!;, ]", requirement)[0] for requirement in wanted]


def main() -> int:
    """Run, print, write.

    Returns:
        Exit code: 0 if nothing failed of what could be run.
    """
    began = time.monotonic()
    parser = make_parser()
    args = parser.parse(None)
    _set_environment(args.device)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends what was started, too
    parts = list(PARTS) if args.part == "all" else [args.part]
    part_to_missing = {part: missing_for(part) for part in parts}
    preload([PARTS[part] for part in parts if not part_to_missing[part]])
    try:
        found, method = describe_session(args.device)
        command = shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
        session = {"command": command, "peak_tflops": args.peak_tflops, **found}
        session["commit"] = args.commit or found["commit"]
        part_to_record = {part: Record(args.out / f"{part}.json") for part in PARTS}
        for record in part_to_record.values():
            record.require_kind(session)
        for part, missing in part_to_missing.items():
            record = part_to_record[part]
            assumed = assumptions(args.device) if part == "speed" else {}
            record.begin({**session, "missing": missing, **assumed})
            if not missing:
                _run_guarded(part, record, args, method, began + args.budget)
            began = time.monotonic()  # the first part pays for finding the device
    except (RuntimeError, ValueError) as error:  # of the device, and of the folder
        parser.error(str(error))
    print(write_table(args.out))
    return 1 if count_failures(args.out) else 0


def _run_guarded(
    part: str, record: Record, args: argparse.Namespace, method: str, deadline: float
) -> None:
    """Run a part; an error of this command's own is a result, and other parts go on."""
    try:
        _run(part, record, args, method, deadline)
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        says = f"{type(error).__name__}: {error}"
        Record(record.path).put(AS_WHOLE, state=FAILED, says=says, log=traceback.format_exc())


def _run(part: str, record: Record, args: argparse.Namespace, method: str, deadline: float) -> None:
    if part == "tests":
        from benchmarks.gpu.suite import run_suite

        run_suite(record, args.tests, device=args.device, deadline=deadline)
    elif part == "speed":
        from benchmarks.gpu.speed import run_speed

        cases = small_cases() if args.device == "cpu" else all_cases()
        run_speed(record, cases, device=args.device, method=method, deadline=deadline)
    else:
        from benchmarks.gpu.recipes import run_recipes

        run_recipes(record, device=args.device, method=method, deadline=deadline)


def _set_environment(device: str) -> None:
    """For every process that is started."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or engines would choose the device themselves
        os.environ["OMP_NUM_THREADS"] = "1"  # as the suite and the command line have it
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([before] if before else [])])
    # One host: names of hosts need not be known, and no other network is there.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, loopback)
    # Otherwise the question whether there is a device leaves a process from which none can fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def make_parser() -> CommandParser:
    """The options."""
    parser = CommandParser(
        "benchmarks.gpu",
        __doc__.splitlines()[0],
        examples=["--part speed --out runs/gpu", "--device cpu"],
    )
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all", help="part to run")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda",
        help="device to measure; cpu: everything in small",
    )
    parser.add_argument(
        "--out",
        type=folder_argument,
        default="runs/gpu",
        help="folder of results; continues what is there",
    )
    parser.add_argument(
        "--budget", type=positive, default=BUDGET_S, help="most seconds that a part may take"
    )
    parser.add_argument(
        "--peak-tflops",
        type=positive,
        default=PEAK_TFLOPS,
        help="best speed of the device in bfloat16, in 10^12 FLOP/s, for MFU; that of H100, H200",
    )
    parser.add_argument("--commit", help="commit to record (default: what git tells)")
    parser.add_argument(
        "--tests", type=Path, default=ROOT / "tests" / "gpu", help="folder of tests for pytest"
    )
    return parser


if __name__ == "__main__":
    exit_with(main)
