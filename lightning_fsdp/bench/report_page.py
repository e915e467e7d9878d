"""``report.md``: the table, how far each arm is from its limits, what failed, what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from lightning_fsdp.bench.arms import notes_on
from lightning_fsdp.bench.records import Row, listed, sum_of
from lightning_fsdp.bench.results import Results, missing
from lightning_fsdp.harness.environment import describe
from lightning_fsdp.harness.tables import UNKNOWN, bullets, number, table_of, three_digits

Cell = Callable[[Row], str]


def _part(name: str) -> Cell:
    return lambda arm: three_digits(arm.part_ms(name))


def _utilization(arm: Row) -> str:
    return " ".join(f"{v:.0f} ({k})" for k, v in arm.utilization.items()) or UNKNOWN


def _megabytes(per_rank: Sequence[float | None]) -> str:
    return " ".join(number(n, ".1f", unit=1e6) for n in per_rank) or UNKNOWN


_PARTS = ("whole", "data", "compute", "exposed", "optimizer", "other", "overlapped")
_TIMES: dict[str, Cell] = {
    **{name: _part(name) for name in _PARTS},
    "host": lambda arm: three_digits(arm.host_ms),
    "utilization %": _utilization,
    "end to end s": lambda arm: number(arm.end_to_end_s, ".1f"),
}
_LIMITS: dict[str, Cell] = {
    "step ms": lambda arm: three_digits(arm.step_ms),
    "limit of compute ms": lambda arm: three_digits(arm.compute_limit_ms),
    "exposed ms": _part("exposed"),
    "limit of communication ms": lambda arm: three_digits(arm.communication_limit_ms),
    "times the larger limit": lambda arm: number(arm.times_limit, ".2f"),
    "calls": lambda arm: number(sum_of(arm.data_calls), "g"),
    "calls demanded": lambda arm: number(sum_of(arm.demanded.collectives), "g"),
    "MB sent": lambda arm: number(arm.sent_bytes, ".1f", unit=1e6),
    "MB demanded": lambda arm: number(arm.demanded.sent_bytes, ".1f", unit=1e6),
}
_MEMORY: dict[str, Cell] = {
    "peak of tensors, MB per rank": lambda arm: _megabytes(arm.peak_bytes),
    "mean over a step, MB per rank": lambda arm: _megabytes(arm.mean_bytes),
    "between steps, MB per rank": lambda arm: _megabytes(arm.resting_bytes),
    "peak of the process, MB per rank": lambda arm: _megabytes(arm.peak_rss_bytes),
    "CUDA allocated, MB per rank": lambda arm: _megabytes(arm.cuda_peak_allocated_bytes),
    "CUDA reserved, MB per rank": lambda arm: _megabytes(arm.cuda_peak_reserved_bytes),
}
_MFU: dict[str, Cell] = {
    "FLOPs per token": lambda arm: number(arm.flops_per_token, ".4g"),
    "MFU %": lambda arm: number(arm.mfu, ".2f", unit=0.01),
}
_OF_TIMES = """\
Medians, in ms. Overlapped is communication hidden behind compute, beside the sum.
Utilization is the mean of all samples of all ranks; end to end goes from building the model to
the last timed step."""
_OF_MEMORY = """\
Tensors are tracked in steps of their own, which run uncompiled: where anything is compiled, those
would not be its figures, and there are none."""
_OF_LIMITS = """\
The limit of compute is the step of one process with one rank's share of the work and no
communication; that of communication, the bytes that a rank sends over the measured bandwidth.
Calls are those that move parameters and gradients, and of torch's FSDP also a norm's;
demanded is what the engine's stage needs in theory. MB are those that leave rank 0."""
_OF_MFU = """\
MFU = FLOPs per token x tokens/s of all ranks / (assumed peak FLOP/s of a rank x ranks). \
FLOPs are those of forward and backward; what is recomputed counts once."""


def format_table(rows: Sequence[Row]) -> str:
    """The table that a person reads, in Markdown."""
    columns: dict[str, Callable[[Row], str]] = {
        "arm": lambda row: f"{row.arm} WRONG" if row.failure and row.tokens_per_s else row.arm,
        "ranks": lambda row: str(row.num_processes),
        "loss first": lambda row: number(row.loss_first, ".4f"),
        "loss last": lambda row: number(row.loss_last, ".4f"),
        "tokens/s": lambda row: number(row.tokens_per_s, ",.0f"),
        "step ms (quartiles)": lambda row: "{} ({}..{})".format(
            *(number(ms, ".0f") for ms in (row.step_ms, row.step_ms_q1, row.step_ms_q3))
        ),
        "peak MB per rank": lambda row: _megabytes(row.peak_bytes),
        "resting MB per rank": lambda row: _megabytes(row.resting_bytes),
        "process MB per rank": lambda row: _megabytes(row.peak_rss_bytes),
        "collectives per step": lambda row: (
            UNKNOWN if row.collectives is None else listed(row.collectives)
        ),
        "MB sent per step": lambda row: number(row.sent_bytes, ".1f", unit=1e6),
        "by": lambda row: row.comm or (listed({}) if row.collectives == {} else UNKNOWN),
    }
    return table_of(rows, columns, has_failed=lambda row: row.tokens_per_s is None, num_names=2)


def page(results: Results, pictures: Iterable[str] = ()) -> str:
    """All of the report, in Markdown; the table comes first.

    Args:
        results: Of the folder.
        pictures: Names of those in it.
    """
    lacking = missing(results, is_short=False)
    good = [arm for arm in results.arms if arm.failure is None]
    failed = [arm for arm in results.arms if arm.failure is not None]
    failures = [f"`{arm.arm}`: {arm.failure} ({arm.failure_kind})" for arm in failed]
    links = [f"[{name}](plots/{name}.png) ([SVG](plots/{name}.svg))" for name in pictures]
    notes = notes_on(results.workload.get("precision", ""))
    sections = [
        describe(vars(results)), format_table(results.rows), *notes,
        "## Where a step's time goes (rank 0)", _table(good, _TIMES), _OF_TIMES,
        "## Distance to the limits", _table(good, _LIMITS), _OF_LIMITS,
        "## Memory", _table(good, _MEMORY), _OF_MEMORY,
        "## Model FLOPs utilization", _mfu(good),
        "## Failures", bullets(failures) or "None.",
        "## What is missing", bullets(lacking) or "Nothing.",
        "## Pictures", bullets(links),
    ]  # fmt: skip
    return "\n\n".join(sections) + "\n"


def _table(arms: Sequence[Row], columns: Mapping[str, Cell]) -> str:
    return table_of(arms, {"arm": lambda arm: arm.arm, **columns})


def _mfu(arms: Sequence[Row]) -> str:
    peaks = sorted({peak for arm in arms if (peak := arm.peak_flops) is not None})
    if not peaks:
        return f"{_OF_MFU}\n\nNot given: without an assumed peak there is no MFU."
    assumed = ", ".join(f"{peak:.4g} FLOP/s" for peak in peaks)
    return f"{_OF_MFU}\n\nAssumed peak: {assumed} per rank.\n\n{_table(arms, _MFU)}"
