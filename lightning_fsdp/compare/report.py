"""Turns cells into ``report.json``, ``report.md`` and a log per configuration."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from lightning_fsdp.compare.cases import load_engine
from lightning_fsdp.compare.controls import Control
from lightning_fsdp.compare.rows import ROWS
from lightning_fsdp.compare.runner import Cell
from lightning_fsdp.compare.verdicts import (
    Comparison,
    Known,
    compare,
    grouped,
    ratios_of,
    surprises,
    works,
)
from lightning_fsdp.harness.environment import describe, environment
from lightning_fsdp.harness.tables import markdown_table


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that a comparison has found.

    Attributes:
        document: Environment and command; JSON.
        cells: Every test of every case at every number of ranks.
        comparisons: Engines against each other.
        controls: What the judge made of broken values.
        expected_of: The torch version whose expectation was used.
        seconds: Wall time of all groups of ranks.
        problems: Why the exit code is not 0; empty if it is.
    """

    document: dict[str, Any]
    cells: Sequence[Cell]
    comparisons: Sequence[Comparison]
    controls: Sequence[Control]
    expected_of: str
    seconds: float
    problems: Sequence[str]


def make_report(
    document: dict[str, Any],
    cells: Sequence[Cell],
    controls: Sequence[Control],
    *,
    expected: tuple[str, Known],
    seconds: float,
) -> Report:
    """Judge the whole."""
    version, known = expected
    problems = [
        f"negative control {c.name!r}: the judge said {c.complaint or 'right'!r}"
        for c in controls
        if not c.is_as_it_should_be
    ]
    skipped = Counter(cell.reason for cell in cells if cell.status == "skipped")
    problems += [f"{count} tests not run: {reason}" for reason, count in skipped.items()]
    problems += surprises(cells, known)
    return Report(
        document=document,
        cells=cells,
        comparisons=compare(cells, known),
        controls=controls,
        expected_of=version,
        seconds=seconds,
        problems=problems,
    )


def describe_environment(engines: Sequence[str], command: str) -> dict[str, Any]:
    """Python, torch, devices, and which engines this torch has."""
    found = environment()
    return {
        "command": command,
        **found,
        "python": platform.python_version(),
        "cuda_devices": found["machine"]["gpus"],
        "engines": {engine: _why_not(engine) for engine in engines},
    }


def format_report(report: Report) -> str:
    """Markdown, good to be pasted into an issue."""
    document = report.document
    devices = Counter(document["cuda_devices"])
    engines = [f"{e} ({why})" if why else e for e, why in document["engines"].items()]
    controls = [control for control in report.controls if not control.should_pass]
    noticed = sum(control.complaint is not None for control in controls)
    lines = [
        describe(document),
        "",
        f"- Python {document['python']}; "
        + ("no GPU" if not devices else ", ".join(f"{n} x {name}" for name, n in devices.items())),
        f"- engines: {', '.join(engines)}",
        f"- {len(report.cells)} tests at W = {_numbers(report.cells)} in {report.seconds:.0f} s: "
        + ", ".join(f"{n} {s}" for s, n in Counter(c.status for c in report.cells).items()),
        f"- negative controls: {noticed} of {len(controls)} called wrong by the judge ("
        + ", ".join(control.name for control in controls)
        + ")",
        f"- expectation: as recorded for torch {report.expected_of}",
        "",
        _table_of_tests(report),
        "",
        *_exceptions(report),
        f"<details><summary>Right of all, in per cent, at W = {_numbers(report.cells)}</summary>",
        "",
        _table_of_ratios(report.cells),
        "",
        "</details>",
        "",
        "Nothing unexpected." if not report.problems else "Unexpected:",
        *[f"- {problem}" for problem in report.problems],
    ]
    return "\n".join(lines) + "\n"


def write(report: Report, out: Path) -> None:
    """Write ``report.json``, ``report.md`` and ``logs/``."""
    out.mkdir(parents=True, exist_ok=True)
    groups = grouped(report.cells, lambda cell: (cell.case, cell.world_size))
    as_json = {
        **report.document,
        "expected_of": report.expected_of,
        "seconds": report.seconds,
        "controls": [asdict(control) for control in report.controls],
        "verdicts": [asdict(comparison) for comparison in report.comparisons],
        "ratios": [
            {**asdict(case), "world_size": size, **asdict(ratios_of(cells))}
            for (case, size), cells in groups.items()
        ],
        "cells": [_plain(cell) for cell in report.cells],
        "problems": list(report.problems),
    }
    (out / "report.json").write_text(json.dumps(as_json, indent=1))
    (out / "report.md").write_text(format_report(report))
    (out / "logs").mkdir(exist_ok=True)
    for (case, size), cells in groups.items():
        text = "\n".join(_log_line(cell) for cell in cells)
        (out / "logs" / f"{case.name}_w{size}.txt").write_text(f"{case} W={size}\n{text}\n")


def _why_not(engine: str) -> str | None:
    try:
        load_engine(engine)
    except (ImportError, TypeError) as error:
        return f"missing: {error}"
    return None


def _table_of_tests(report: Report) -> str:
    """A line per test: in how many cases each engine works, and what that makes of each pair."""
    engines = list(dict.fromkeys(cell.case.engine for cell in report.cells))
    pairs = list(dict.fromkeys((c.before, c.after) for c in report.comparisons))
    body = []
    for row in dict.fromkeys(cell.row for cell in report.cells):
        line = [ROWS[row].name]
        for engine in engines:
            mine = [c for c in report.cells if c.row == row and c.case.engine == engine]
            outcomes = [works(cells) for cells in grouped(mine, lambda c: c.case).values()]
            line.append(f"{outcomes.count(True)}/{len(outcomes)}")
        of_row = [comparison for comparison in report.comparisons if comparison.row == row]
        line += (
            counted(c.verdict for c in of_row if (c.before, c.after) == pair) for pair in pairs
        )
        body.append(line)
    return markdown_table(["test", *engines, *(f"{a} to {b}" for a, b in pairs)], body)


def counted(verdicts: Iterable[str]) -> str:
    """Such as ``3 both work, 1 regression``, or without a number where all are the same."""
    counts = Counter(verdicts)
    return ", ".join(v if len(counts) == 1 else f"{n} {v}" for v, n in counts.items())


def _exceptions(report: Report) -> list[str]:
    """Each test of a case that did not pass everywhere, with the first reason; same ones once."""
    wrong = [cell for cell in report.cells if cell.status in ("failed", "crashed")]
    if not wrong:
        return []
    lines = ["What does not work, and the first reason given:", ""]
    alike = grouped(wrong, lambda cell: (cell.case.engine, cell.row, cell.status))
    for (engine, row, status), cells in alike.items():
        sizes = _numbers(cells)
        cases = len({cell.case for cell in cells})
        lines.append(
            f"- {engine}, {ROWS[row].name}: {status} in {cases} cases (W = {sizes}). "
            f"{cells[0].case.name}: {cells[0].reason}"
        )
    return [*lines, ""]


def _table_of_ratios(cells: Sequence[Cell]) -> str:
    body = []
    for case, mine in grouped(cells, lambda cell: cell.case).items():
        by_size = grouped(mine, lambda cell: cell.world_size)
        kinds = zip(*(astuple(ratios_of(of_size)) for of_size in by_size.values()), strict=True)
        ratios = [" ".join(map(_percent, of_kind)) for of_kind in kinds]
        body.append([case.engine, str(case.zero_stage), case.dtype, case.model, *ratios])
    head = ["engine", "stage", "dtype", "model", "parameters", "gradients", "micro-batches"]
    return markdown_table(head, body)


def _plain(cell: Cell) -> dict[str, Any]:
    fields = asdict(cell)
    return {**fields.pop("case"), **fields}


def _log_line(cell: Cell) -> str:
    ulps = "" if cell.ulps is None else f", differs by {cell.ulps:.3g} ulps at most"
    seconds = "" if cell.seconds is None else f", {cell.seconds:.2f} s"
    line = f"{ROWS[cell.row].name}: {cell.status}, {cell.right} of {cell.total}{ulps}{seconds}"
    return line + (f"\n  {cell.reason}" if cell.reason else "") + _indented(cell.traceback)


def _indented(text: str) -> str:
    return "".join(f"\n    {line}" for line in text.splitlines())


def _numbers(cells: Sequence[Cell]) -> str:
    return ", ".join(str(n) for n in dict.fromkeys(cell.world_size for cell in cells))


def _percent(ratio: float | None) -> str:
    """Rounded, but 100 is all and 0 is none."""
    if ratio is None:
        return "-"
    percent = round(100 * ratio)
    return str(min(max(percent, 1), 99) if 0 < ratio < 1 else percent)
