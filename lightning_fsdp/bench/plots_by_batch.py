"""Pictures against the batch size: a line per engine and stage, a column per accumulation.

Arms of one global batch can differ in how it is cut (2 x 4 or 4 x 2), so the axis counts sequences
per rank and micro-batch, where each arm has a place of its own; the global batch stands below it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from lightning_fsdp.bench import plot_style
from lightning_fsdp.bench.records import Row, worst
from lightning_fsdp.bench.results import ArmResult, Results

Value = Callable[[ArmResult], float | None]
_VIEWS: dict[str, Callable[[Row], float | None]] = {
    "Peak of tensors": lambda row: worst(row.peak_bytes),
    "Tensors between steps": lambda row: worst(row.resting_bytes),
    "Peak of the process (RSS)": lambda row: worst(row.peak_rss_bytes),
    "CUDA peak, allocated": lambda row: worst(row.cuda_peak_allocated_bytes),
    "CUDA peak, reserved": lambda row: worst(row.cuda_peak_reserved_bytes),
}


def tokens_per_s(results: Results) -> Figure:
    """Throughput; whiskers from the slowest repeat to the fastest."""

    def median(arm: ArmResult) -> float | None:
        """Of all repeats, as the whiskers are; rows of older versions have another average."""
        known = arm.figures.tokens_per_s
        rates = [rate for run in arm.runs for rate in run.rates]
        return known if known is None or not rates else statistics.median(rates)

    figure, grid = _against_batch(
        results,
        "Throughput",
        {"tokens/s of all ranks": median},
        spread=lambda arm: [statistics.median(run.rates) for run in arm.runs],
    )
    asked = {"Tokens/s": lambda arm: arm.figures.tokens_per_s}
    notes = ["Whiskers: slowest and fastest repeat."]
    return plot_style.finish(figure, results, asked, notes=notes, named=grid.flat)


def memory(results: Results) -> Figure:
    """Memory of the rank that takes most, a row per way of looking at it."""

    def of(view: Callable[[Row], float | None], unit: float = 1.0) -> Value:
        def value(arm: ArmResult) -> float | None:
            figure = view(arm.figures)
            return None if figure is None else figure / unit

        return value

    rows: dict[str, Value] = {}
    for title, view in _VIEWS.items():
        figures = [view(arm.figures) for arm in results.arms]
        unit, suffix = plot_style.byte_unit(figures)
        if any(figure is not None for figure in figures):
            rows[f"{title}, {suffix}"] = of(view, unit)
    figure, grid = _against_batch(
        results, "Memory per rank (largest rank)", rows or {"Peak of tensors, MB": lambda _: None}
    )
    asked = {title: of(view) for title, view in _VIEWS.items()}
    return plot_style.finish(figure, results, asked, named=grid.flat)


def _against_batch(
    results: Results,
    title: str,
    rows: Mapping[str, Value],
    spread: Callable[[ArmResult], Sequence[float]] = lambda _: (),
) -> tuple[Figure, Any]:
    accums = sorted({accum for _, accum in results.shapes}) or [1]
    width = max(5.5, 3.7 * len(accums)) + plot_style.label_inches(results)
    figure = plot_style.new_figure(width, 1.4 + 2.6 * len(rows), title)
    grid = figure.subplots(len(rows), len(accums), squeeze=False, sharex="col", sharey="row")
    for (label, value), line in zip(rows.items(), grid, strict=True):
        tops = [
            _draw_lines(axes, results, accum, value, spread)
            for accum, axes in zip(accums, line, strict=True)
        ]
        line[0].set_ylabel(label)
        line[0].set_ylim(0, 1.08 * max(tops) or 1.0)
    for accum, first, last in zip(accums, grid[0], grid[-1], strict=True):
        noun = "micro-batch" if accum == 1 else "micro-batches"
        first.set_title(f"{accum} {noun} per step", fontsize=10)
        last.set_xlabel("sequences per rank and micro-batch\n(per step, all ranks)",
                        fontsize=plot_style.SMALL + 1)  # fmt: skip
    return figure, grid


def _draw_lines(
    axes: Any,
    results: Results,
    accum: int,
    value: Value,
    spread: Callable[[ArmResult], Sequence[float]],
) -> float:
    """Returns the highest point."""
    sizes = [size for size, of in results.shapes if of == accum]
    kinds, tops = results.kinds, []
    for index, kind in enumerate(kinds):
        arms = [results.at(kind, (size, accum)) for size in sizes]
        heights = [None if arm is None else value(arm) for arm in arms]
        ys = [math.nan if height is None else height for height in heights]
        # Side by side within a size, so that equal figures do not hide each other.
        xs = [
            place + (index - (len(kinds) - 1) / 2) * 0.5 / len(kinds) for place in range(len(sizes))
        ]
        for x, y, arm in zip(xs, ys, arms, strict=True):
            if arm is None or math.isnan(y):
                continue
            seen = [*spread(arm)] or [y]
            tops.append(max(y, *seen))
            if spread(arm):
                axes.errorbar(
                    x, y, yerr=[[max(0.0, y - min(seen))], [max(0.0, max(seen) - y)]], fmt="none",
                    ecolor="#555555", elinewidth=0.8, capsize=2,
                )  # fmt: skip
        if not all(map(math.isnan, ys)):
            axes.plot(xs, ys, **plot_style.line_style(kind, kinds), linewidth=1.2)
    if not tops:
        plot_style.say(axes, "not measured")
    labels = [f"{size}\n({size * accum * results.num_ranks})" for size in sizes]
    axes.set_xticks(range(len(sizes)), labels)
    axes.set_xlim(-0.5, max(len(sizes), 1) - 0.5)
    plot_style.rule(axes, "y")
    return max(tops, default=0.0)
