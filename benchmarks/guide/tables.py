"""What was measured, as the tables of ``docs/fsdp1-vs-fsdp2.md``.

Each table stands between two markers with its name, so that what a reader sees is what the JSON
says; a test compares them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.guide.counters import ACCUMULATIONS
from lightning_fsdp.compare.rows import ROWS
from lightning_fsdp.harness.environment import describe
from lightning_fsdp.harness.tables import markdown_table

RESULTS = Path(__file__).parent.parent / "results" / "guide"
ENGINES = {"fsdp1": "FSDP1", "fsdp2": "FSDP2", "here": "here"}
_NAMES = re.compile(r"(inlet|blocks|head|factor|encode)\b")  # of the small model
_SILENT = "**"  # what is wrong without an exception is bold

Document = dict[str, Any]


def read(part: str) -> Document:
    """What ``make guide`` has measured last."""
    document: Document = json.loads((RESULTS / f"{part}.json").read_text())
    return document


def behaviours(topic: str) -> Callable[[], str]:
    """A table with a line per claim."""

    def table() -> str:
        rows = [row for row in read("behaviours")["rows"] if row["topic"] == topic]
        body = [[row["claim"], *(row[e]["said"] for e in ENGINES)] for row in rows]
        return markdown_table(["", *ENGINES.values()], body)

    return table


def failures() -> str:
    """How the same probes fail: silently, or with a message that says where."""
    rows = read("behaviours")["rows"]
    body = [["a value, right or as told"], ["an exception"], ["… that names the place"]]
    body += [["**silently wrong, a hang, or a killed process**"]]
    for engine in ENGINES:
        outcomes = [row[engine] for row in rows]
        silent = [o for o in outcomes if _SILENT in o["said"]]
        raised = [o for o in outcomes if o not in silent and o["detail"]]
        placed = [o for o in raised if _NAMES.search(o["detail"])]
        numbers = (len(outcomes) - len(silent) - len(raised), len(raised), len(placed), len(silent))
        for line, number in zip(body, numbers, strict=True):
            line.append(str(number))
    return markdown_table([f"of {len(rows)} lines", *ENGINES.values()], body)


def memory() -> str:
    """Bytes held, in units of the model."""
    keys = ("resting", "forward_peak", "after_forward", "backward_peak", "after_unsynced")
    body = [
        [_arm(row), row["call"], *(f"{row['memory'][key]:.2f}" for key in keys)]
        for row in read("counters")["rows"]
    ]
    head = ["engine", "call", "at rest", "peak in forward", "after forward", "peak in backward"]
    return markdown_table([*head, "after a backward without sync"], body)


def traffic() -> str:
    """Collectives and bytes moved of an optimizer step."""
    body = [
        [
            _arm(row),
            row["call"],
            *(
                f"{t['gathers']:g} + {t['reductions']:g}, {t['moved']:.1f} P"
                for t in (row["traffic"][a] for a in ACCUMULATIONS)
            ),
        ]
        for row in read("counters")["rows"]
        if "alone" not in row["call"]
    ]
    head = ["engine", "call", "1 micro-batch", "4, each reduced", "4, the last reduced"]
    return markdown_table(head, body)


def _arm(row: dict[str, Any]) -> str:
    return f"{ENGINES[row['engine']]} ZeRO-{row['stage']}"


def speed() -> str:
    """The benchmark's arms."""
    document = read("speed")
    body = []
    for row in document["rows"]:
        if row["failure"] is not None:
            body.append([row["arm"], "FAILED", row["failure"], "", ""])
            continue
        peak, resting = (
            " ".join(f"{n / 1e6:.1f}" for n in row[key]) for key in ("peak_bytes", "resting_bytes")
        )
        step = f"{row['step_ms']:.0f} ({row['step_ms_q1']:.0f}..{row['step_ms_q3']:.0f})"
        body.append([row["arm"], f"{row['tokens_per_s']:,.0f}", step, peak, resting])
    head = ["arm", "tokens/s", "step ms (quartiles)", "peak MB per rank", "resting MB per rank"]
    return f"{describe(document)}\n\n{markdown_table(head, body)}"


def access() -> str:
    """The suite's verdicts: in how many cases each engine's values were right."""
    tests: dict[tuple[str, ...], list[str]] = {}  # those that ended alike are one line
    for row in read("access")["rows"]:
        passed = (row["passed"][engine] for engine in ("fsdp1", "fsdp2", "scratch"))
        tests.setdefault((*passed, *row["verdicts"]), []).append(row["test"])
    body = [[_tests(names), *outcome] for outcome, names in tests.items()]
    head = ["each of these tests", *(f"{name}, cases" for name in ENGINES.values())]
    return markdown_table([*head, "FSDP1 to FSDP2", "FSDP2 to here"], body)


def _tests(names: list[str]) -> str:
    """By name where they are few."""
    if len(names) <= 3:
        return ", ".join(names)
    kinds = Counter(test.kind for test in ROWS.values() if test.name in names)
    return ", ".join(f"{n} on {kind}" for kind, n in kinds.items())


def measured() -> str:
    """Where and with what."""
    return describe(read("behaviours"))


TABLES: dict[str, Callable[[], str]] = {
    "measured": measured,
    **{
        topic: behaviours(topic)
        for topic in ("wrapping", "models", "precision", "offload", "checkpoints", "by-hand",
                      "debugging")
    },
    "failures": failures,
    "memory": memory,
    "traffic": traffic,
    "speed": speed,
    "access": access,
}  # fmt: skip
