"""Turns runs into rows, a table, a CSV file and a JSON file. What was not measured is empty."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_fsdp.bench.arms import Arm, Workload
from lightning_fsdp.bench.runner import Run
from lightning_fsdp.harness.environment import describe
from lightning_fsdp.harness.tables import markdown_table

LOSS_TOLERANCE = 2e-3
"""Largest difference of a loss from the reference's that rounding explains, in nats."""


@dataclass(frozen=True)
class Row:
    """One arm over all its repeats. Times are medians; bytes are exact and per rank.

    Attributes:
        loss_first: Mean over ranks of the first micro-batch's loss.
        loss_last: Likewise of the last one's.
        loss_gap: Largest difference of a mean loss from that of the reference arm.
        tokens_per_s: Of all ranks together.
        step_ms: Median seconds of an optimizer step, in milliseconds.
        step_ms_q1: First quartile.
        step_ms_q3: Third quartile.
        peak_bytes: Per rank.
        resting_bytes: Per rank, between two optimizer steps.
        collectives: Calls per optimizer step of rank 0, by kind.
        payload_bytes: Bytes that rank 0 passes to them per optimizer step.
        failure: Why the other fields are empty.
    """

    arm: str
    engine: str
    zero_stage: int | None
    batch_size: int
    grad_accum: int
    num_processes: int
    loss_first: float | None = None
    loss_last: float | None = None
    loss_gap: float | None = None
    tokens_per_s: float | None = None
    step_ms: float | None = None
    step_ms_q1: float | None = None
    step_ms_q3: float | None = None
    peak_bytes: tuple[int | None, ...] = ()
    resting_bytes: tuple[int | None, ...] = ()
    collectives: dict[str, float] | None = None
    payload_bytes: float | None = None
    failure: str | None = None


def summarize(arms: Sequence[Arm], runs: Sequence[Run], workload: Workload) -> list[Row]:
    """One row per arm, failed ones included; losses are compared with the arm's reference."""
    rows = []
    references: dict[tuple[int, int], list[float]] = {}
    for arm in arms:
        of_arm = [run for run in runs if run.arm == arm]
        shape = (arm.batch_size, arm.grad_accum)
        row = _summarize_arm(arm, of_arm, workload, references.get(shape))
        if row.failure is None:
            references.setdefault(shape, _mean_losses(of_arm[0]))
        rows.append(row)
    return rows


def _summarize_arm(
    arm: Arm, runs: Sequence[Run], workload: Workload, reference: list[float] | None
) -> Row:
    base = Row(
        arm=arm.name,
        engine=arm.engine,
        zero_stage=arm.zero_stage,
        batch_size=arm.batch_size,
        grad_accum=arm.grad_accum,
        num_processes=arm.num_processes(workload),
    )
    failures = [run.failure for run in runs if run.failure is not None]
    if failures or not runs:
        return _replace(base, failure=failures[0] if failures else "not run")
    # A step lasts as long as on the slowest rank.
    step_s = [
        max(steps) for run in runs for steps in zip(*(r.step_s for r in run.ranks), strict=True)
    ]
    tokens = sum(sum(rank.step_tokens) for run in runs for rank in run.ranks)
    low, median, high = statistics.quantiles(step_s, n=4)
    losses = [_mean_losses(run) for run in runs]
    gap = None
    if reference is not None:
        gap = max(_distance(run, reference) for run in losses)
    row = _replace(
        base,
        loss_first=losses[0][0],
        loss_last=losses[0][-1],
        loss_gap=gap,
        tokens_per_s=tokens / sum(step_s),
        step_ms=median * 1e3,
        step_ms_q1=low * 1e3,
        step_ms_q3=high * 1e3,
        peak_bytes=tuple(rank.peak_bytes for rank in runs[0].ranks),
        resting_bytes=tuple(rank.resting_bytes for rank in runs[0].ranks),
        collectives=runs[0].ranks[0].collectives,
        payload_bytes=runs[0].ranks[0].payload_bytes,
    )
    if not all(math.isfinite(loss) for run in losses for loss in run):
        return _replace(row, failure="a loss is not a finite number")
    if gap is not None and gap > LOSS_TOLERANCE:
        return _replace(row, failure=f"losses differ from the reference by {gap:.2g}")
    return row


def format_table(rows: Sequence[Row]) -> str:
    """The table that a person reads, in Markdown."""
    head = [
        "arm", "ranks", "loss first", "loss last", "tokens/s", "step ms (quartiles)",
        "peak MB per rank", "resting MB per rank", "collectives per step", "MB per step",
    ]  # fmt: skip
    return markdown_table(head, [_cells(row) for row in rows])


def write(out: Path, rows: Sequence[Row], runs: Sequence[Run], document: dict[str, Any]) -> None:
    """Write ``comparison.csv``, ``results.json`` and ``report.md``."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "comparison.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(asdict(rows[0])))
        writer.writeheader()
        for row in rows:
            writer.writerow({key: _csv_cell(value) for key, value in asdict(row).items()})
    results = {
        **document,
        "rows": [asdict(row) for row in rows],
        "runs": [
            {
                "arm": run.arm.name,
                "repeat": run.repeat,
                "wall_s": run.wall_s,
                "failure": run.failure,
                "failure_kind": run.failure_kind,
                "ranks": [vars(rank) for rank in run.ranks],
            }
            for run in runs
        ],
    }
    (out / "results.json").write_text(json.dumps(results, indent=1))
    (out / "report.md").write_text(f"{describe(document)}\n\n{format_table(rows)}\n")


def _cells(row: Row) -> list[str]:
    if row.tokens_per_s is None:
        return [row.arm, str(row.num_processes), "FAILED", *[""] * 7]
    collectives = ", ".join(f"{n:g} {kind}" for kind, n in (row.collectives or {}).items())
    name = row.arm if row.failure is None else f"{row.arm} WRONG"
    return [
        name,
        str(row.num_processes),
        f"{row.loss_first:.4f}",
        f"{row.loss_last:.4f}",
        f"{row.tokens_per_s:,.0f}",
        f"{row.step_ms:.0f} ({row.step_ms_q1:.0f}..{row.step_ms_q3:.0f})",
        _megabytes(row.peak_bytes),
        _megabytes(row.resting_bytes),
        collectives or "none",
        f"{(row.payload_bytes or 0) / 1e6:.1f}",
    ]


def _megabytes(per_rank: Sequence[int | None]) -> str:
    return " ".join("?" if n is None else f"{n / 1e6:.1f}" for n in per_rank)


def _csv_cell(value: Any) -> Any:
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, (list, tuple)):
        return " ".join("" if v is None else str(v) for v in value)
    return value


def _mean_losses(run: Run) -> list[float]:
    return [statistics.fmean(losses) for losses in zip(*(r.losses for r in run.ranks), strict=True)]


def _distance(losses: list[float], reference: list[float]) -> float:
    gaps = [abs(a - b) for a, b in zip(losses, reference, strict=True)]
    return math.inf if any(map(math.isnan, gaps)) else max(gaps)


def _replace(row: Row, **changes: Any) -> Row:
    return Row(**{**asdict(row), **changes})
