"""Turns runs into rows, one per arm. What was not measured is empty."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_fsdp.bench.arms import Arm, Workload
from lightning_fsdp.bench.limits import Limits
from lightning_fsdp.bench.results import slowest, step_rates
from lightning_fsdp.bench.runner import Run
from lightning_fsdp.bench.theory import as_facts, demand, sent_bytes

LOSS_TOLERANCE = 2e-3
"""Largest difference of a loss from the reference's that rounding of fp32 explains, in nats."""
LATE_LOSS_TOLERANCE = 2e-2
"""Likewise in the second half of a run. References clip by torch's norm, on CPU wrong in the fifth
digit: one process that clips by the exact norm is 4e-3 away from them after thirty steps."""
NORM_TOLERANCE = 1e-3
"""Largest difference of the first gradients' norm from the reference's, as a part of that; fp32."""
HALF_NORM_TOLERANCE = 5e-2
"""Of bf16 and fp16."""
HALF_LOSS_TOLERANCE = 5e-2
"""Of bf16 and fp16, at any time: there DDP leaves one process by 9e-3 within thirty steps."""


@dataclass(frozen=True)
class Row:
    """One arm over all its repeats. Times are medians; bytes are exact and per rank.

    Attributes:
        loss_first: Mean over ranks of the first micro-batch's loss.
        loss_last: Likewise of the last one's.
        loss_gap: Largest difference of a mean loss from that of the reference arm.
        grad_norm: Of the first step's gradients, before they are clipped.
        tokens_per_s: Median of the steps, of all ranks together.
        step_ms: Median seconds of an optimizer step, in milliseconds.
        step_ms_q1: First quartile.
        step_ms_q3: Third quartile.
        peak_bytes: Per rank.
        mean_bytes: Per rank, over a step.
        resting_bytes: Per rank, between two optimizer steps.
        collectives: Calls per optimizer step of rank 0, by kind.
        collective_bytes: Bytes that rank 0 passes to them per optimizer step, by kind.
        payload_bytes: Of all kinds together.
        data_collectives: Calls that move parameters and gradients, pairs taken together as the
            collective that they stand for; only of this project's core.
        sent_bytes: Bytes that have to leave rank 0 for them.
        theory: What the stage and the engine demand; ``None``: nobody says.
        parts_ms: Medians of rank 0's profiled steps, in milliseconds; ``None`` in it: not
            measurable.
        host_ms: Median CPU time of rank 0's process per step.
        flops_per_token: Of forward and backward; what is recomputed counts once.
        peak_flops: Assumed of one process, per second.
        mfu: ``flops_per_token * tokens_per_s / (peak_flops * num_processes)``.
        peak_by_kind: Bytes of rank 0 by owner, at its peak.
        peak_rss_bytes: Per rank, of the process, the highest of the repeats.
        cuda_peak_allocated_bytes: Likewise, of torch's allocator.
        cuda_peak_reserved_bytes: Likewise, what that took from the device.
        utilization_percent: Mean of all samples of all ranks.
        utilization_of: Of what.
        end_to_end_s: Median seconds from building the model to the end of the timed steps.
        compute_limit_ms: The single process's step, divided by the ranks.
        communication_limit_ms: Bytes over measured bandwidth.
        times_limit: The step over the larger of the two limits: 1 cannot be beaten.
        failure: Why the other fields are empty, or wrong.
        failure_kind: In a word; see ``failure.py``.
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
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    step_ms: float | None = None
    step_ms_q1: float | None = None
    step_ms_q3: float | None = None
    peak_bytes: tuple[int | None, ...] = ()
    mean_bytes: tuple[float | None, ...] = ()
    resting_bytes: tuple[int | None, ...] = ()
    collectives: dict[str, float] | None = None
    collective_bytes: dict[str, float] | None = None
    payload_bytes: float | None = None
    data_collectives: dict[str, float] | None = None
    sent_bytes: float | None = None
    theory: dict[str, Any] | None = None
    parts_ms: dict[str, float | None] | None = None
    host_ms: float | None = None
    flops_per_token: float | None = None
    peak_flops: float | None = None
    mfu: float | None = None
    peak_by_kind: dict[str, int] | None = None
    peak_rss_bytes: tuple[int | None, ...] = ()
    cuda_peak_allocated_bytes: tuple[int | None, ...] = ()
    cuda_peak_reserved_bytes: tuple[int | None, ...] = ()
    utilization_percent: float | None = None
    utilization_of: str | None = None
    end_to_end_s: float | None = None
    compute_limit_ms: float | None = None
    communication_limit_ms: float | None = None
    times_limit: float | None = None
    failure: str | None = None
    failure_kind: str | None = None


def summarize(
    arms: Sequence[Arm],
    runs: Sequence[Run],
    workload: Workload,
    *,
    limits: Limits | None = None,
    peak_flops: float | None = None,
) -> list[Row]:
    """One row per arm, failed ones included; losses are compared with the arm's reference.

    Args:
        arms: What was compared.
        runs: All repeats of all arms.
        workload: What each did.
        limits: Of this machine.
        peak_flops: Assumed of one process, per second.
    """
    rows = []
    references: dict[tuple[int, int], Run] = {}
    single_ms: dict[tuple[int, int], float | None] = {}
    units = next((r.units for run in runs for r in run.ranks if r.units is not None), None)
    for arm in arms:
        of_arm = [run for run in runs if run.arm == arm]
        shape = (arm.batch_size, arm.grad_accum)
        row = _summarize_arm(arm, of_arm, workload, references.get(shape))
        if row.failure is None:
            references.setdefault(shape, of_arm[0])
        if row.step_ms is not None:
            if arm.engine == "single":
                single_ms[shape] = row.step_ms
            row = _with_mfu(row, peak_flops)
            row = _with_limits(row, workload, units, limits, single_ms.get(shape))
        rows.append(row)
    return rows


def _summarize_arm(arm: Arm, runs: Sequence[Run], workload: Workload, reference: Run | None) -> Row:
    base = Row(
        arm=arm.name,
        engine=arm.engine,
        zero_stage=arm.zero_stage,
        batch_size=arm.batch_size,
        grad_accum=arm.grad_accum,
        num_processes=arm.num_processes(workload),
    )
    failures = [run for run in runs if run.failure is not None]
    if failures:
        return replace(base, failure=failures[0].failure, failure_kind=failures[0].failure_kind)
    if not runs:
        return replace(base, failure="not run", failure_kind="no measurement")
    step_s = [step for run in runs for step in slowest([rank.step_s for rank in run.ranks])]
    rates = [
        rate
        for run in runs
        for rate in step_rates([r.step_tokens for r in run.ranks], [r.step_s for r in run.ranks])
    ]
    low, median, high = statistics.quantiles(step_s, n=4)
    first, firsts = runs[0].ranks[0], [run.ranks[0] for run in runs]
    row = replace(
        base,
        tokens_per_s=statistics.median(rates),
        grad_norm=first.grad_norm,
        step_ms=median * 1e3,
        step_ms_q1=low * 1e3,
        step_ms_q3=high * 1e3,
        peak_bytes=tuple(rank.peak_bytes for rank in runs[0].ranks),
        mean_bytes=tuple(rank.mean_bytes for rank in runs[0].ranks),
        resting_bytes=tuple(rank.resting_bytes for rank in runs[0].ranks),
        collectives=first.collectives,
        collective_bytes=first.collective_bytes,
        payload_bytes=first.payload_bytes,
        data_collectives=first.data_collectives,
        sent_bytes=sent_bytes(first.collective_bytes, first.world_size),
        parts_ms=_parts_ms([parts for rank in firsts for parts in rank.parts]),
        host_ms=_milliseconds(_median([s for rank in firsts for s in rank.host_s])),
        flops_per_token=first.flops_per_token,
        peak_by_kind=first.peak_by_kind,
        peak_rss_bytes=_highest(runs, "peak_rss_bytes"),
        cuda_peak_allocated_bytes=_highest(runs, "cuda_peak_allocated_bytes"),
        cuda_peak_reserved_bytes=_highest(runs, "cuda_peak_reserved_bytes"),
        utilization_percent=_mean([p for run in runs for r in run.ranks for _, p in r.utilization]),
        utilization_of=first.utilization_of,
        end_to_end_s=_median([rank.fit_s for rank in firsts]),
    )
    wrong = _wrong_norm(runs, reference, workload)
    if wrong is not None:
        row = replace(row, failure=wrong, failure_kind="wrong gradients")
    return _judge_losses(row, runs, reference, tolerances=_loss_tolerances(workload))


def _loss_tolerances(workload: Workload) -> tuple[float, float]:
    """Of the first half of a run, and of all of it."""
    if workload.precision == "32-true":
        return LOSS_TOLERANCE, LATE_LOSS_TOLERANCE
    return HALF_LOSS_TOLERANCE, HALF_LOSS_TOLERANCE


def _wrong_norm(runs: Sequence[Run], reference: Run | None, workload: Workload) -> str | None:
    """What losses do not show: Adam steps as far with gradients of twice the size."""
    expected = None if reference is None else reference.ranks[0].grad_norm
    if expected is None:
        return None
    tolerance = NORM_TOLERANCE if workload.precision == "32-true" else HALF_NORM_TOLERANCE
    for rank in (rank for run in runs for rank in run.ranks):
        norm = rank.grad_norm
        if norm is not None and not abs(norm - expected) <= tolerance * expected:
            return f"gradients of norm {norm:.4g} in the first step, the reference's {expected:.4g}"
    return None


def _judge_losses(
    row: Row,
    runs: Sequence[Run],
    reference: Run | None,
    *,
    tolerances: tuple[float, float],
) -> Row:
    """The losses, and what is wrong with them."""
    lengths = {len(rank.losses) for run in runs for rank in run.ranks}
    if reference is not None:
        lengths |= {len(rank.losses) for rank in reference.ranks}
    if len(lengths) > 1 or 0 in lengths:
        found = f"numbers of losses differ: {', '.join(map(str, sorted(lengths)))}"
        return replace(row, failure=found, failure_kind="wrong losses")
    losses = [_mean_losses(run) for run in runs]
    gaps = [] if reference is None else [_gaps(run, _mean_losses(reference)) for run in losses]
    gap = max(map(max, gaps), default=None)
    early = max((max(each[: len(each) // 2 + 1]) for each in gaps), default=0.0)
    early_tolerance, tolerance = tolerances
    row = replace(row, loss_first=losses[0][0], loss_last=losses[0][-1], loss_gap=gap)
    if not all(math.isfinite(loss) for run in losses for loss in run):
        found = "a loss is not a finite number"
    elif gap is not None and (early > early_tolerance or gap > tolerance):
        found = f"losses differ from the reference by {gap:.2g}"
    else:
        return row
    return replace(row, failure=found, failure_kind="wrong losses")


def _with_mfu(row: Row, peak_flops: float | None) -> Row:
    row = replace(row, peak_flops=peak_flops)
    if peak_flops is None or row.flops_per_token is None or row.tokens_per_s is None:
        return row
    used = row.flops_per_token * row.tokens_per_s
    return replace(row, mfu=used / (peak_flops * row.num_processes))


def _with_limits(
    row: Row,
    workload: Workload,
    units: Sequence[Any] | None,
    limits: Limits | None,
    single_ms: float | None,
) -> Row:
    compute_ms = single_ms
    if single_ms is not None and row.engine != "single":
        compute_ms = single_ms / workload.num_ranks
    theory = None
    if units is not None:
        theory = demand(
            row.engine,
            row.zero_stage,
            units=as_facts(units),
            grad_accum=row.grad_accum,
            world_size=row.num_processes,
            backend="nccl" if workload.accelerator == "cuda" else "gloo",
            gathers_halves=workload.precision.endswith("-mixed"),
        )
    sent = row.sent_bytes if theory is None else theory.sent_bytes
    communication_ms = None
    if sent == 0:
        communication_ms = 0.0
    elif sent is not None and limits is not None and limits.bytes_per_s is not None:
        communication_ms = sent / limits.bytes_per_s * 1e3
    known = [limit for limit in (compute_ms, communication_ms) if limit is not None]
    limit_ms = max(known, default=0.0)
    return replace(
        row,
        theory=None if theory is None else asdict(theory),
        compute_limit_ms=compute_ms,
        communication_limit_ms=communication_ms,
        times_limit=row.step_ms / limit_ms if limit_ms and row.step_ms is not None else None,
    )


def _parts_ms(parts: Sequence[dict[str, float | None]]) -> dict[str, float | None] | None:
    if not parts:
        return None
    return {
        name.removesuffix("_s") + "_ms": _milliseconds(_median([step[name] for step in parts]))
        for name in parts[0]
    }


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(values: Sequence[float | None]) -> float | None:
    """``None`` if a value is missing, or all are."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _highest(runs: Sequence[Run], name: str) -> tuple[int | None, ...]:
    """Over the repeats, per rank."""
    per_rank = zip(*([getattr(rank, name) for rank in run.ranks] for run in runs), strict=True)
    return tuple(
        None if any(value is None for value in values) else max(values) for values in per_rank
    )


def _mean_losses(run: Run) -> list[float]:
    return [statistics.fmean(losses) for losses in zip(*(r.losses for r in run.ranks), strict=True)]


def _gaps(losses: list[float], reference: list[float]) -> list[float]:
    """Per micro-batch; infinite where there is no number."""
    gaps = [abs(a - b) for a, b in zip(losses, reference, strict=True)]
    return [math.inf if math.isnan(gap) else gap for gap in gaps]
