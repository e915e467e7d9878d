"""Turns runs into rows, one per arm. What was not measured is empty."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_fsdp.bench.arms import Arm, Workload
from lightning_fsdp.bench.runner import Run

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


def _mean_losses(run: Run) -> list[float]:
    return [statistics.fmean(losses) for losses in zip(*(r.losses for r in run.ranks), strict=True)]


def _distance(losses: list[float], reference: list[float]) -> float:
    gaps = [abs(a - b) for a, b in zip(losses, reference, strict=True)]
    return math.inf if any(map(math.isnan, gaps)) else max(gaps)


def _replace(row: Row, **changes: Any) -> Row:
    return Row(**{**asdict(row), **changes})
