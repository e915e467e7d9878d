"""Pictures against the batch size: a line per engine and stage, a column per accumulation.

Arms of one global batch can differ in how it is cut (2 x 4 or 4 x 2), so the axis counts sequences
per rank and micro-batch, where each arm has a place of its own; the global batch stands below it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from lightning_fsdp.bench import plot_style
from lightning_fsdp.bench.results import ArmResult, Results, lost, step_rates, unmeasured

Value = Callable[[ArmResult], float | None]


def tokens_per_s(results: Results) -> Figure:
    """Throughput; whiskers from the slowest repeat to the fastest."""
    figure, grid = _against_batch(
        results,
        "Throughput",
        [("tokens/s of all ranks", _tokens_per_s)],
        spread=lambda arm: [statistics.median(_rates(run)) for run in arm.runs],
    )
    lacking = unmeasured(results, "Tokens/s", lambda arm: arm.get("tokens_per_s") is not None)
    note = "Whiskers: slowest and fastest repeat."
    plot_style.footnote(figure, [note, *lacking, *lost(results)])
    plot_style.legend(figure, grid.flat)
    return figure


def memory(results: Results) -> Figure:
    """Memory of the rank that takes most, a row per way of looking at it."""
    views = {
        "peak_bytes": "Peak of tensors",
        "resting_bytes": "Tensors between steps",
        "peak_rss_bytes": "Peak of the process (RSS)",
        "cuda_peak_allocated_bytes": "CUDA peak, allocated",
        "cuda_peak_reserved_bytes": "CUDA peak, reserved",
    }
    seen = [name for name in views if any(arm.worst(name) is not None for arm in results.arms)]
    rows: list[tuple[str, Value]] = []
    for name in seen or ["peak_bytes"]:
        unit, suffix = plot_style.byte_unit(arm.worst(name) for arm in results.arms)
        rows.append((f"{views[name]}, {suffix}", _per(name, unit)))
    figure, grid = _against_batch(results, "Memory per rank (largest rank)", rows)
    lacking = []
    for name, title in views.items():
        lacking += unmeasured(results, title, partial(_has, name))
    plot_style.footnote(figure, [*lacking, *lost(results)])
    plot_style.legend(figure, grid.flat)
    return figure


def _has(name: str, arm: ArmResult) -> bool:
    return arm.worst(name) is not None


def _per(name: str, unit: float) -> Value:
    def value(arm: ArmResult) -> float | None:
        worst = arm.worst(name)
        return None if worst is None else worst / unit

    return value


def _tokens_per_s(arm: ArmResult) -> float | None:
    """Of all repeats, as the whiskers are; rows of older versions have another average."""
    known: float | None = arm.get("tokens_per_s")
    rates = [rate for run in arm.runs for rate in _rates(run)]
    return known if known is None or not rates else statistics.median(rates)


def _rates(run: Any) -> list[float]:
    ranks = run["ranks"]
    return step_rates([rank["step_tokens"] for rank in ranks], [rank["step_s"] for rank in ranks])


def _against_batch(
    results: Results,
    title: str,
    rows: Sequence[tuple[str, Value]],
    spread: Callable[[ArmResult], Sequence[float]] | None = None,
) -> tuple[Figure, Any]:
    accums = sorted({accum for _, accum in results.shapes}) or [1]
    figure = plot_style.new_figure(
        max(5.5, 3.7 * len(accums)) + plot_style.label_inches(results),
        1.4 + 2.6 * len(rows),
        title,
    )
    grid = figure.subplots(len(rows), len(accums), squeeze=False, sharex="col", sharey="row")
    for (label, value), line in zip(rows, grid, strict=True):
        top = 0.0
        for accum, axes in zip(accums, line, strict=True):
            sizes = [size for size, of in results.shapes if of == accum]
            is_empty = True
            for index, kind in enumerate(results.kinds):
                # Side by side within a size, so that equal figures do not hide each other.
                shift = (index - (len(results.kinds) - 1) / 2) * 0.5 / max(1, len(results.kinds))
                points = []
                for place, size in enumerate(sizes):
                    arm = results.at(kind, (size, accum))
                    height = None if arm is None else value(arm)
                    points.append((place + shift, float("nan") if height is None else height))
                    if arm is None or height is None:
                        continue
                    is_empty, top = False, max(top, height)
                    if spread is not None and (seen := spread(arm)):
                        top = max(top, *seen)
                        ends = [max(0.0, height - min(seen)), max(0.0, max(seen) - height)]
                        axes.errorbar(
                            place + shift, height, yerr=[[ends[0]], [ends[1]]], fmt="none",
                            ecolor="#555555", elinewidth=0.8, capsize=2,
                        )  # fmt: skip
                if any(y == y for _, y in points):  # not only gaps
                    axes.plot(
                        [x for x, _ in points], [y for _, y in points],
                        **plot_style.line_style(kind, results.kinds), linewidth=1.2,
                    )  # fmt: skip
            if is_empty:
                plot_style.say_nothing(axes)
            totals = [size * accum * results.num_ranks for size in sizes]
            axes.set_xticks(
                range(len(sizes)),
                [f"{size}\n({total})" for size, total in zip(sizes, totals, strict=True)],
            )
            axes.set_xlim(-0.5, max(len(sizes), 1) - 0.5)
            axes.grid(axis="y", color="#dddddd", linewidth=0.6)
            axes.set_axisbelow(True)
        line[0].set_ylabel(label)
        line[0].set_ylim(0, 1.08 * top or 1.0)
    for accum, first, last in zip(accums, grid[0], grid[-1], strict=True):
        noun = "micro-batch" if accum == 1 else "micro-batches"
        first.set_title(f"{accum} {noun} per step", fontsize=10)
        last.set_xlabel("sequences per rank and micro-batch\n(per step, all ranks)",
                        fontsize=plot_style.SMALL + 1)  # fmt: skip
    return figure, grid
