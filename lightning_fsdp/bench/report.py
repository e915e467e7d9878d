"""Turns runs into rows, one per arm. What was not measured is empty."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields

from lightning_fsdp.bench.arms import Arm, Workload
from lightning_fsdp.bench.limits import Limits
from lightning_fsdp.bench.parts import Parts
from lightning_fsdp.bench.records import PER_RANK, Row, Run, Shape, in_ms, of_all, worst
from lightning_fsdp.bench.theory import demand, sent_bytes

LOSS_TOLERANCE = 5e-3
"""Largest difference of a loss from the reference's that rounding of fp32 explains, in nats. DDP
with two micro-batches of 8 sequences was 4e-3 away for one step, and 3e-5 before and after it."""
LATE_LOSS_TOLERANCE = 2e-2
"""Likewise in the second half of a run. References clip by torch's norm, on CPU wrong in the fifth
digit: one process that clips by the exact norm is 4e-3 away from them after thirty steps."""
NORM_TOLERANCE = 1e-3
"""Largest difference of the first gradients' norm from the reference's, as a part of that; fp32."""
HALF_NORM_TOLERANCE = 5e-2
"""Of bf16 and fp16."""
HALF_LOSS_TOLERANCE = 5e-2
"""Of bf16 and fp16, at any time: there DDP leaves one process by 9e-3 within thirty steps."""


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
        arms: What was compared; each has run.
        runs: All repeats of all arms.
        workload: What each did.
        limits: Of this machine.
        peak_flops: Assumed of one process, per second.
    """
    rows = [Row(arm.name, **asdict(arm), num_processes=arm.num_processes(workload)) for arm in arms]
    references: dict[Shape, Run] = {}
    bytes_per_s = None if limits is None else limits.bytes_per_s
    units = next((r.units for run in runs for r in run.ranks if r.units is not None), None)
    for arm, row in zip(arms, rows, strict=True):
        row.runs = [run for run in runs if run.arm == row.arm]
        failed = [run for run in row.runs if run.failure is not None]
        if failed:
            row.failure, row.failure_kind = failed[0].failure, failed[0].failure_kind
            continue
        _fill_in(row, arm.num_shards(workload))
        wrong = [*_judge(row, references.get(row.shape), workload.precision)]
        if wrong:
            row.failure, row.failure_kind = wrong[0]
        else:
            references.setdefault(row.shape, row.runs[0])
        if row.flops_per_token is not None and row.tokens_per_s is not None and peak_flops:
            used = row.flops_per_token * row.tokens_per_s
            row.mfu = used / (peak_flops * row.num_processes)
        row.peak_flops = peak_flops
        if units is not None:
            row.theory = demand(arm, workload, units)
        alone = (r.step_ms for r in rows if r.engine == "single" and r.shape == row.shape)
        _add_limits(row, next(alone, None), bytes_per_s)
    return rows


def _fill_in(row: Row, num_shards: int) -> None:
    """Everything but what other arms or the machine must be known for."""
    firsts = [run.ranks[0] for run in row.runs]
    first = firsts[0]
    steps = [step for run in row.runs for step in run.slowest_s]
    # Quartiles of two are extrapolated beyond both.
    quartiles = (min(max(s, min(steps)), max(steps)) for s in statistics.quantiles(steps, n=4))
    row.step_ms_q1, row.step_ms, row.step_ms_q3 = (1e3 * second for second in quartiles)
    row.tokens_per_s = statistics.median(rate for run in row.runs for rate in run.rates)
    for name in PER_RANK:
        of_runs = ([getattr(rank, name) for rank in run.ranks] for run in row.runs)
        setattr(row, name, [worst(figures) for figures in zip(*of_runs, strict=True)])
    row.take_over(first)
    if (nbytes := first.collective_bytes) is not None:
        row.sent_bytes = sent_bytes(nbytes, first.world_size, shard_size=num_shards)
    parts = [step for rank in firsts for step in rank.parts]
    if parts:
        seconds = {of.name: [getattr(step, of.name) for step in parts] for of in fields(Parts)}
        medians = {name: in_ms(statistics.median, of) for name, of in seconds.items()}
        row.parts_ms = {f"{name.removesuffix('_s')}_ms": ms for name, ms in medians.items()}
    row.host_ms = in_ms(statistics.median, [second for rank in firsts for second in rank.host_s])
    row.utilization_percent = row.utilization.get(first.utilization_of or "cpu")
    row.end_to_end_s = of_all(statistics.median, [rank.fit_s for rank in firsts])


def _judge(row: Row, reference: Run | None, precision: str) -> Iterator[tuple[str, str]]:
    """What the arm trained otherwise than the reference did; gradients first."""
    norm_gap, early_gap, late_gap = HALF_NORM_TOLERANCE, HALF_LOSS_TOLERANCE, HALF_LOSS_TOLERANCE
    if precision == "32-true":
        norm_gap, early_gap, late_gap = NORM_TOLERANCE, LOSS_TOLERANCE, LATE_LOSS_TOLERANCE
    # What losses do not show: Adam steps as far with gradients of twice the size.
    norms = [n for run in row.runs for rank in run.ranks if (n := rank.grad_norm) is not None]
    expected = None if reference is None else reference.ranks[0].grad_norm
    for norm in norms:
        if expected is not None and not abs(norm - expected) <= norm_gap * expected:
            says = f"gradients of norm {norm:.4g} in the first step, the reference's {expected:.4g}"
            yield says, "wrong gradients"
    compared = [*row.runs, reference] if reference is not None else row.runs
    lengths = {len(rank.losses) for run in compared for rank in run.ranks}
    if len(lengths) > 1 or 0 in lengths:
        yield f"numbers of losses differ: {', '.join(map(str, sorted(lengths)))}", "wrong losses"
        return
    losses = [run.mean_losses for run in row.runs]
    gaps = [] if reference is None else [_gaps(of_run, reference.mean_losses) for of_run in losses]
    row.loss_first, row.loss_last = losses[0][0], losses[0][-1]
    row.loss_gap = max(map(max, gaps), default=None)
    early = max((max(of_run[: len(of_run) // 2 + 1]) for of_run in gaps), default=0.0)
    if not all(math.isfinite(loss) for of_run in losses for loss in of_run):
        yield "a loss is not a finite number", "wrong losses"
    elif early > early_gap or (row.loss_gap or 0.0) > late_gap:
        yield f"losses differ from the reference by {row.loss_gap:.2g}", "wrong losses"


def _add_limits(row: Row, alone_ms: float | None, bytes_per_s: float | None) -> None:
    if alone_ms is not None:
        row.compute_limit_ms = alone_ms / row.num_processes
    sent = (row.theory or row).sent_bytes
    if sent == 0 or row.num_processes == 1:
        row.communication_limit_ms = 0.0
    elif sent is not None and bytes_per_s is not None:
        row.communication_limit_ms = sent / bytes_per_s * 1e3
    limit_ms = worst((row.compute_limit_ms, row.communication_limit_ms))  # if both are known
    if limit_ms and row.step_ms is not None:
        row.times_limit = row.step_ms / limit_ms


def _gaps(losses: list[float], reference: list[float]) -> list[float]:
    """Per micro-batch; infinite where there is no number."""
    gaps = [abs(a - b) for a, b in zip(losses, reference, strict=True)]
    return [math.inf if math.isnan(gap) else gap for gap in gaps]
