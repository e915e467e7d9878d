"""Measure everything that ``docs/fsdp1-vs-fsdp2.md`` says, and put it there.

    python -m benchmarks.guide                          # all of it; or: make guide
    python -m benchmarks.guide --parts behaviours       # one part, and the page

    behaviours   what each engine does, by doing it           (behaviours/)
    counters     bytes held and sent in a step, exact          (counters.py)
    access       the verdicts of ``python -m lightning_fsdp.compare``
    speed        the arms of ``python -m lightning_fsdp.bench``; the only part with a clock

Each writes ``benchmarks/results/guide/PART.json``; the page's tables are made of these files.
"""

from __future__ import annotations

import json
import shlex
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.guide import behaviours, counters
from benchmarks.guide.tables import RESULTS, TABLES
from benchmarks.update_tables import GUIDE, put
from lightning_fsdp.bench.__main__ import main as bench
from lightning_fsdp.compare.__main__ import main as compare
from lightning_fsdp.compare.report import counted
from lightning_fsdp.compare.rows import ROWS
from lightning_fsdp.harness.command_line import CommandParser
from lightning_fsdp.harness.environment import environment

COMPARE = ["--engines", "fsdp1", "fsdp2", "scratch", "--ranks", "2", "--dtypes", "fp32"]
BENCH = ["run", "--engines", "fsdp1", "fsdp2", "scratch", "--stages", "3", "2"]
BENCH += ["--steps", "10", "--warmup", "3", "--repeats", "2"]
Part = dict[str, Any]


def access(out: str) -> Part:
    """The suite at W=2 in fp32, where values must be equal to the bit."""
    code = compare([*COMPARE, "--out", out])
    report = json.loads((Path(out) / "report.json").read_text())
    rows = []
    for key, test in ROWS.items():
        cells = [cell for cell in report["cells"] if cell["row"] == key]
        passed = {}
        for engine in ("fsdp1", "fsdp2", "scratch"):
            statuses = [cell["status"] for cell in cells if cell["engine"] == engine]
            passed[engine] = f"{statuses.count('passed')} of {len(statuses)}"
        of_row = [verdict for verdict in report["verdicts"] if verdict["row"] == key]
        verdicts = [
            counted(v["verdict"] for v in of_row if (v["before"], v["after"]) == pair)
            for pair in (("fsdp1", "fsdp2"), ("fsdp2", "scratch"))
        ]
        rows.append({"test": test.name, "passed": passed, "verdicts": verdicts})
    return {"command": _command("compare", COMPARE), "exit_code": code, "rows": rows}


def speed(out: str) -> Part:
    """GPT-2 nano under the Trainer."""
    code = bench([*BENCH, "--out", out])
    results = json.loads((Path(out) / "results.json").read_text())
    return {
        "command": _command("bench", BENCH),
        "exit_code": code,
        "workload": results["workload"],
        "rows": results["rows"],
    }


def _command(package: str, arguments: list[str]) -> str:
    return shlex.join(["python", "-m", f"lightning_fsdp.{package}", *arguments])


PARTS: dict[str, Callable[[str], Part]] = {
    "behaviours": lambda _: {"rows": behaviours.run_all()},
    "counters": lambda _: {"rows": counters.run_all()},
    "access": access,
    "speed": speed,
}


def main() -> int:
    """Measure, write JSON, rewrite the page.

    Returns:
        Exit code: 0 if the benchmark and the suite had nothing to complain about.
    """
    args = make_parser().parse(None)
    codes = []
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in args.parts:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as out:
            part = {"command": "make guide", **environment(), **PARTS[name](out)}
        part["seconds"] = round(time.perf_counter() - start)
        (RESULTS / f"{name}.json").write_text(json.dumps(part, indent=1) + "\n")
        codes.append(part.get("exit_code", 0))
        print(f"{name}: {part['seconds']} s, written to {RESULTS / name}.json")
    for name, table in TABLES.items():
        put(GUIDE, name, table())
    print(f"tables written to {GUIDE}")
    return max(codes)


def make_parser() -> CommandParser:
    """The options."""
    parser = CommandParser(
        "benchmarks.guide",
        __doc__.splitlines()[0],
        examples=["--parts behaviours", "--parts access counters"],
    )
    parser.add_some("--parts", PARTS, "parts to measure again")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
