"""``report.md``: the table, how far each arm is from its limits, what failed, what is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lightning_fsdp.bench.arms import OF_UNFUSED, has_unfused_references
from lightning_fsdp.bench.plots import PICTURES
from lightning_fsdp.bench.results import (
    ArmResult,
    Results,
    lost,
    mean_utilization,
    sum_of,
    unmeasured,
)
from lightning_fsdp.harness.environment import describe
from lightning_fsdp.harness.tables import markdown_table

_PARTS = ("whole", "data", "compute", "exposed", "optimizer", "other", "overlapped")
_UNKNOWN = "?"
"""In place of what was not measured; never 0."""
_OF_TIMES = """\
Medians, in ms. Overlapped is communication hidden behind compute, beside the sum.
Utilization is the mean of all samples of all ranks; end to end goes from building the model to
the last timed step."""
_OF_MEMORY = """\
Tensors are tracked in steps of their own, which run uncompiled: where anything is compiled, those
would not be its figures, and there are none."""
_OF_LIMITS = """\
The limit of compute is the step of one process with one rank's share of the work and no
communication; that of communication, an arm's bytes over the measured bandwidth.
Calls are those that move parameters and gradients, and of torch's FSDP also a norm's;
demanded is what the engine's stage needs in theory."""


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table that a person reads, in Markdown."""
    head = [
        "arm", "ranks", "loss first", "loss last", "tokens/s", "step ms (quartiles)",
        "peak MB per rank", "resting MB per rank", "process MB per rank", "collectives per step",
        "MB per step",
    ]  # fmt: skip
    return markdown_table(head, [_cells(row) for row in rows])


def page(results: Results) -> str:
    """All of the report, in Markdown; the table comes first."""
    good = [arm for arm in results.arms if arm.failure is None]
    sections = [
        describe(dict(results.document)),
        format_table([arm.row for arm in results.arms]),
        *([OF_UNFUSED] if has_unfused_references(results.precision) else []),
        "## Where a step's time goes (rank 0)",
        _times(good),
        _OF_TIMES,
        "## Distance to the limits",
        _limits(good),
        _OF_LIMITS,
        "## Memory",
        _memory(good),
        _OF_MEMORY,
        "## Model FLOPs utilization",
        _mfu(good),
        "## Failures",
        _failures(results),
        "## What is missing",
        "\n".join(f"* {line}" for line in _missing(results)) or "Nothing.",
        "## Pictures",
        "\n".join(f"* [{name}](plots/{name}.png) ([SVG](plots/{name}.svg))" for name in PICTURES),
    ]
    return "\n\n".join(sections) + "\n"


def _cells(row: Mapping[str, Any]) -> list[str]:
    get = row.get
    if get("tokens_per_s") is None:
        return [row["arm"], str(row["num_processes"]), "FAILED", *[""] * 8]
    calls = get("collectives")
    listed = (
        _UNKNOWN
        if calls is None
        else ", ".join(f"{_number(n, 'g')} {kind}" for kind, n in calls.items())
    )
    median, low, high = (_number(get(f"step_ms{q}"), ".0f") for q in ("", "_q1", "_q3"))
    return [
        row["arm"] if get("failure") is None else f"{row['arm']} WRONG",
        str(row["num_processes"]),
        _number(get("loss_first"), ".4f"),
        _number(get("loss_last"), ".4f"),
        _number(get("tokens_per_s"), ",.0f"),
        f"{median} ({low}..{high})",
        _megabytes(get("peak_bytes")),
        _megabytes(get("resting_bytes")),
        _megabytes(get("peak_rss_bytes")),
        listed or "none",
        _number(get("payload_bytes"), ".1f", unit=1e6),
    ]


def _times(arms: Sequence[ArmResult]) -> str:
    head = ["arm", *_PARTS, "host", "utilization %", "end to end s"]
    body = [
        [
            arm.name,
            *[_number(arm.get("parts_ms", f"{part}_ms"), ".3g") for part in _PARTS],
            _number(arm.get("host_ms"), ".3g"),
            " ".join(f"{v:.0f} ({k})" for k, v in mean_utilization(arm).items()) or _UNKNOWN,
            _number(arm.get("end_to_end_s"), ".1f"),
        ]
        for arm in arms
    ]
    return markdown_table(head, body)


def _limits(arms: Sequence[ArmResult]) -> str:
    head = [
        "arm", "step ms", "limit of compute ms", "exposed ms", "limit of communication ms",
        "times the larger limit", "calls", "demanded", "MB", "demanded",
    ]  # fmt: skip
    body = [
        [
            arm.name,
            _number(arm.get("step_ms"), ".3g"),
            _number(arm.get("compute_limit_ms"), ".3g"),
            _number(arm.get("parts_ms", "exposed_ms"), ".3g"),
            _number(arm.get("communication_limit_ms"), ".3g"),
            _number(arm.get("times_limit"), ".2f"),
            _number(sum_of(arm.data_calls()), "g"),
            _number(arm.total("theory", "collectives"), "g"),
            _number(arm.get("payload_bytes"), ".1f", unit=1e6),
            _number(arm.get("theory", "payload_bytes"), ".1f", unit=1e6),
        ]
        for arm in arms
    ]
    return markdown_table(head, body)


def _memory(arms: Sequence[ArmResult]) -> str:
    names = {
        "peak_bytes": "peak of tensors", "mean_bytes": "mean over a step",
        "resting_bytes": "between steps",
        "peak_rss_bytes": "peak of the process", "cuda_peak_allocated_bytes": "CUDA allocated",
        "cuda_peak_reserved_bytes": "CUDA reserved",
    }  # fmt: skip
    head = ["arm", *(f"{title}, MB per rank" for title in names.values())]
    body = [[arm.name, *(_megabytes(arm.get(name)) for name in names)] for arm in arms]
    return markdown_table(head, body)


def _mfu(arms: Sequence[ArmResult]) -> str:
    formula = (
        "MFU = FLOPs per token x tokens/s of all ranks / (assumed peak FLOP/s of a rank x ranks). "
        "FLOPs are those of forward and backward; what is recomputed counts once."
    )
    peaks = sorted({arm.get("peak_flops") for arm in arms} - {None})
    if not peaks:
        return f"{formula}\n\nNot given: without an assumed peak there is no MFU."
    assumed = ", ".join(f"{peak:.4g} FLOP/s" for peak in peaks)
    body = [
        [
            arm.name,
            _number(arm.get("flops_per_token"), ".4g"),
            _number(arm.get("mfu"), ".2f", unit=0.01),
        ]
        for arm in arms
    ]
    table = markdown_table(["arm", "FLOPs per token", "MFU %"], body)
    return f"{formula}\n\nAssumed peak: {assumed} per rank.\n\n{table}"


def _failures(results: Results) -> str:
    lines = [
        f"* `{arm.name}`: {arm.row['failure']}"
        + (f" ({arm.failure})" if arm.failure != arm.row["failure"] else "")
        for arm in results.arms
        if arm.failure is not None
    ]
    return "\n".join(lines) or "None."


def _missing(results: Results) -> list[str]:
    asked: dict[str, Callable[[ArmResult], Any]] = {
        "Tokens/s": lambda arm: arm.get("tokens_per_s"),
        "Peak of tensors": lambda arm: arm.worst("peak_bytes"),
        "Mean of tensors": lambda arm: arm.worst("mean_bytes"),
        "Peak of the process": lambda arm: arm.worst("peak_rss_bytes"),
        "CUDA memory": lambda arm: arm.worst("cuda_peak_reserved_bytes"),
        "Memory by owner": lambda arm: arm.first_rank("peak_by_kind"),
        "Memory over time": lambda arm: arm.first_rank("timeline"),
        "Parts of a step": lambda arm: arm.get("parts_ms", "whole_ms"),
        "Exposed communication": lambda arm: arm.get("parts_ms", "exposed_ms"),
        "Utilization": lambda arm: mean_utilization(arm) or None,
        "Host time": lambda arm: arm.get("host_ms"),
        "End-to-end time": lambda arm: arm.get("end_to_end_s"),
        "MFU": lambda arm: arm.get("mfu"),
        "Limit of compute": lambda arm: arm.get("compute_limit_ms"),
        "Limit of communication": lambda arm: arm.get("communication_limit_ms"),
        "Demanded collectives": lambda arm: arm.total("theory", "collectives"),
    }
    lines: list[str] = []
    for what, get in asked.items():
        lines += unmeasured(results, what, partial(_has, get), is_short=False)
    return [*lines, *lost(results, is_short=False)]


def _has(get: Callable[[ArmResult], Any], arm: ArmResult) -> bool:
    return get(arm) is not None


def _megabytes(per_rank: Sequence[float | None] | None) -> str:
    return " ".join(_number(n, ".1f", unit=1e6) for n in per_rank or ()) or _UNKNOWN


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return _UNKNOWN if value is None else format(value / unit, form)
