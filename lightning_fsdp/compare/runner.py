"""Runs cases on groups of ranks; a crashed rank is a result with a reason, and the rest goes on."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_fsdp.compare.cases import Case
from lightning_fsdp.compare.models import build
from lightning_fsdp.compare.ranks import Plan, ended_alike
from lightning_fsdp.compare.rows import PARTS, ROWS
from lightning_fsdp.harness.processes import empty_folder, run_module

Status = Literal["passed", "failed", "crashed", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One test of one case at one number of ranks.

    Attributes:
        row: Key of :data:`~lightning_fsdp.compare.rows.ROWS`.
        status: ``skipped``: there are too few devices.
        right: Items (parameters, or micro-batches) that were right on every rank.
        total: Items that there are.
        reason: What was wrong first, with its rank; empty if it passed.
        ulps: Largest difference that was seen; see :mod:`~lightning_fsdp.compare.judge`.
        seconds: On the slowest rank.
        traceback: Of an exception on the first rank that raised one.
    """

    case: Case
    world_size: int
    row: str
    status: Status
    right: int
    total: int
    reason: str = ""
    ulps: float | None = None
    seconds: float | None = None
    traceback: str = ""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is the same for all groups.

    Attributes:
        rows: Keys of :data:`~lightning_fsdp.compare.rows.ROWS`.
        device: ``cpu`` or ``cuda``.
        timeout_s: For one test.
        out: Folder for logs.
    """

    rows: Sequence[str]
    device: str
    timeout_s: float
    out: Path


@dataclass
class _Told:
    """What the ranks of a group have written.

    Attributes:
        began: Names of the cases that a rank has begun.
        ends: Per test, what each rank wrote at its end.
        exit: Which rank left first, and how.
    """

    began: set[str] = field(default_factory=set)
    ends: dict[tuple[str, str], dict[int, dict[str, Any]]] = field(default_factory=dict)
    exit: dict[str, int] | None = None


def run_cases(cases: Sequence[Case], world_size: int, setup: Setup) -> list[Cell]:
    """Run every test of every case on that many ranks.

    One group of ranks runs all cases; after a crash a fresh one goes on with the next case.
    """
    cells: list[Cell] = []
    waiting = list(cases)
    attempt = 0
    while waiting:
        failure, told = _run_group(waiting, world_size, setup, attempt)
        attempt += 1
        while waiting:
            case = waiting[0]
            done = [_cell(case, world_size, row, told) for row in setup.rows]
            if None in done and failure is not None and told.began and case.name not in told.began:
                break  # the group ended in an earlier case: a fresh one takes this one
            reason = _reason(case, told, failure or "the ranks ended without a result")
            for row, cell in zip(setup.rows, done, strict=True):
                cells.append(cell or _not_done(case, world_size, row, "crashed", reason))
                if cell is None:  # the first has crashed, the others were not reached
                    first = setup.rows[done.index(None)]
                    reason = f"not reached: {first!r} crashed"
            waiting.pop(0)
    return cells


def skip_cases(cases: Sequence[Case], world_size: int, setup: Setup, reason: str) -> list[Cell]:
    """Cells of cases that cannot be run."""
    return [
        _not_done(case, world_size, row, "skipped", reason) for case in cases for row in setup.rows
    ]


def items_of(case: Case, row: str) -> list[str]:
    """What a test looks at one by one: parameters, or micro-batches."""
    if ROWS[row].kind == "micro-batches":
        return list(PARTS)
    return [name for name, _ in build(case.model, case.sizes).named_parameters()]


def _run_group(
    cases: Sequence[Case], world_size: int, setup: Setup, attempt: int
) -> tuple[str | None, _Told]:
    folder = empty_folder((setup.out / "groups" / f"w{world_size}_{attempt}").resolve())
    plan = Plan(
        cases=cases,
        rows=setup.rows,
        world_size=world_size,
        device=setup.device,
        timeout_s=setup.timeout_s,
        folder=str(folder),
    )
    plan.write(folder / "plan.json")
    module = ["lightning_fsdp.compare.ranks", str(folder / "plan.json")]
    # No test outlasts its own limit, so that this one is reached by none that works.
    limit_s = setup.timeout_s * (1 + len(cases) * len(setup.rows))
    start = time.perf_counter()
    failure = run_module(module, folder, timeout_s=limit_s)
    told = _read(folder, world_size)
    seconds = time.perf_counter() - start
    print(f"W={world_size}: {len(told.ends)} tests in {seconds:.0f} s", file=sys.stderr)
    return None if failure is None else failure.says, told


def _read(folder: Path, world_size: int) -> _Told:
    told = _Told()
    for rank in range(world_size):
        path = folder / f"rank{rank}.jsonl"
        for text in path.read_text().splitlines() if path.exists() else ():
            line = json.loads(text)
            told.began.add(line["case"])
            if line["event"] == "end":
                told.ends.setdefault((line["case"], line["row"]), {})[rank] = line
    if (folder / "exit.json").exists():
        told.exit = json.loads((folder / "exit.json").read_text())
    return told


def _cell(case: Case, world_size: int, row: str, told: _Told) -> Cell | None:
    """``None``: not every rank came to the end of it, or they did not end in the same way."""
    ends = told.ends.get((case.name, row), {})
    if len(ends) < world_size or not ended_alike({end["ended"] for end in ends.values()}):
        return None
    items = items_of(case, row)
    wrong: dict[str, str] = {}
    for rank, end in sorted(ends.items()):
        complaints = end.get("complaints", {})
        if "error" in end:
            complaints = dict.fromkeys(items, end["error"])
        elif missing := set(items) - set(end["items"]):
            complaints = {**complaints, **dict.fromkeys(sorted(missing), "not looked at")}
        for item, complaint in complaints.items():
            wrong.setdefault(item, f"rank {rank}: {item}: {complaint}")
    ulps = [end["ulps"] for end in ends.values() if end.get("ulps") is not None]
    return Cell(
        case=case,
        world_size=world_size,
        row=row,
        status="failed" if wrong else "passed",
        right=len(set(items) - set(wrong)),
        total=len(items),
        reason=next(iter(wrong.values()), ""),
        ulps=max(ulps, default=None),
        seconds=max(end["seconds"] for end in ends.values()),
        traceback=next((end["traceback"] for end in ends.values() if "traceback" in end), ""),
    )


def _not_done(case: Case, world_size: int, row: str, status: Status, reason: str) -> Cell:
    total = len(items_of(case, row))
    return Cell(
        case=case, world_size=world_size, row=row, status=status, right=0, total=total,
        reason=reason,
    )  # fmt: skip


def _reason(case: Case, told: _Told, failure: str) -> str:
    """What happened first: a rank's death without a word, or the earliest error of a rank."""
    if told.exit is None:
        return failure
    rank, code = told.exit["rank"], told.exit["exitcode"]
    errors = [
        (end["at"], f"rank {who}: {end['error']}")
        for (name, _), ends in told.ends.items()
        for who, end in ends.items()
        if name == case.name and "error" in end
    ]
    if errors and code > 0:
        return min(errors)[1]
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"rank {rank} left ({how}); {failure}"
