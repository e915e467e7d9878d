"""Pictures of lines, one per engine and stage: against the batch size, and over time.

Arms of one global batch can differ in how it is cut (2 x 4 or 4 x 2), so the axis of batch sizes
counts sequences per rank and micro-batch, where each arm has a place of its own; the global batch
stands below it. Over time, memory has a panel per arm.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lightning_fsdp.bench import plot_style
from lightning_fsdp.bench.plot_style import SMALL
from lightning_fsdp.bench.records import Row
from lightning_fsdp.bench.results import MEMORY, Results, kind_label, shape_label
from lightning_fsdp.harness.tables import three_digits

Value = Callable[[Row], float | None]
Point = Callable[[Row], tuple[float | None, float | None, float | None]]
"""How low a whisker reaches at an arm, how high the arm is, and how high the whisker reaches."""
_MOST_COLUMNS = 3
_OF_BATCH = "Batch: sequences per rank and micro-batch x micro-batches per step."
_OF_TIME = "The number is the peak. Seconds are left out: watching slows steps down."


def tokens_per_s(results: Results) -> Figure:
    """Throughput; whiskers from the slowest repeat to the fastest."""

    def point(arm: Row) -> tuple[float | None, float | None, float | None]:
        rates = [statistics.median(run.rates) for run in arm.runs]
        return min(rates, default=None), arm.tokens_per_s, max(rates, default=None)

    figure, grid = _against_batch(results, "Throughput", {"tokens/s of all ranks": point})
    note = "Whiskers: slowest and fastest repeat."
    return plot_style.finish(figure, results, ["Tokens/s"], note=note, named=grid.flat)


def memory(results: Results) -> Figure:
    """Memory of the rank that takes most, a row per way of looking at it."""
    rows: dict[str, Point] = {}
    for title, view in MEMORY.items():
        figures = [view(arm) for arm in results.arms]
        unit, suffix = plot_style.byte_unit(figures)
        if any(figure is not None for figure in figures):
            rows[f"{title}, {suffix}"] = partial(_in_unit, view, unit)
    rows = rows or {"Peak of tensors, MB": lambda _: (None,) * 3}
    figure, grid = _against_batch(results, "Memory per rank (largest rank)", rows)
    return plot_style.finish(figure, results, MEMORY, named=grid.flat)


def _against_batch(results: Results, title: str, rows: Mapping[str, Point]) -> tuple[Figure, Any]:
    accums = sorted({accum for _, accum in results.shapes}) or [1]
    width = max(5.5, 3.7 * len(accums)) + plot_style.label_inches(results)
    size, shared = (width, 1.4 + 2.6 * len(rows)), {"sharex": "col", "sharey": "row"}
    figure, grid = plot_style.new_figure(title, size, (len(rows), len(accums)), "y", **shared)
    for (label, point), line in zip(rows.items(), grid, strict=True):
        columns = zip(accums, line, strict=True)
        tops = [_draw_lines(axes, results, accum, point) for accum, axes in columns]
        line[0].set_ylabel(label)
        line[0].set_ylim(0, 1.08 * max(tops) or 1.0)
    for accum, first, last in zip(accums, grid[0], grid[-1], strict=True):
        noun = "micro-batch" if accum == 1 else "micro-batches"
        first.set_title(f"{accum} {noun} per step", fontsize=10)
        last.set_xlabel("sequences per rank and micro-batch\n(per step, all ranks)",
                        fontsize=SMALL + 1)  # fmt: skip
    return figure, grid


def _draw_lines(axes: Any, results: Results, accum: int, point: Point) -> float:
    """Returns the highest point."""
    sizes = [size for size, of in results.shapes if of == accum]
    kinds, top = results.kinds, 0.0
    for index, kind in enumerate(kinds):
        points = [point(results.at(kind, (size, accum))) for size in sizes]
        lows, ys, highs = np.array(points, dtype=float).T
        if np.isnan(ys).all():
            continue
        # Side by side within a size, so that equal figures do not hide each other.
        xs = np.arange(len(sizes)) + (index - (len(kinds) - 1) / 2) * 0.5 / len(kinds)
        whiskers = np.maximum(0.0, [ys - lows, highs - ys])  # none where there is no number
        top = max(top, np.nanmax([ys, ys + whiskers[1]]))
        look = {"fmt": "none", "ecolor": "#555555", "elinewidth": 0.8, "capsize": 2}
        axes.errorbar(xs, ys, yerr=whiskers, **look)
        axes.plot(xs, ys, **plot_style.line_style(kind), linewidth=1.2)
    if not axes.lines:
        plot_style.say(axes, "not measured")
    labels = [f"{size}\n({size * accum * results.num_ranks})" for size in sizes]
    axes.set_xticks(range(len(sizes)), labels)
    axes.set_xlim(-0.5, max(len(sizes), 1) - 0.5)
    return top


def _in_unit(view: Value, unit: float, arm: Row) -> tuple[None, float | None, None]:
    return None, plot_style.in_unit(view(arm), unit), None


def memory_over_time(results: Results) -> Figure:
    """Bytes of tensors alive on rank 0 through one optimizer step: engines down, batches across.

    All panels have one scale, so that they can be compared by eye; in time they are as long as
    their step, since watching slows each engine down by another factor.
    """
    kinds, shapes = results.kinds or [("", None)], results.shapes or [(1, 1)]
    highest = max((nbytes for arm in results.arms for _, nbytes in arm.timeline), default=None)
    unit, suffix = plot_style.byte_unit([highest])
    title = f"Memory over one optimizer step, rank 0: tensors alive, {suffix}"
    width = max(7.0, 1.6 * len(shapes)) + plot_style.label_inches(results)
    size, shared = (width, 1.4 + 0.75 * len(kinds)), {"sharex": "col", "sharey": True}
    figure, panels = plot_style.new_figure(title, size, (len(kinds), len(shapes)), "both", **shared)
    for kind, row in zip(kinds, panels, strict=True):
        row[0].set_ylabel(
            textwrap.fill(kind_label(kind), 16), rotation=0, ha="right", va="center",
            fontsize=SMALL + 1,
        )  # fmt: skip
        for shape, axes in zip(shapes, row, strict=True):
            _draw_memory(axes, results.at(kind, shape), unit)
    panels[0, 0].set_ylim(0, 1.3 * (highest or 1.0) / unit)
    for shape, top, bottom in zip(shapes, panels[0], panels[-1], strict=True):
        top.set_title(f"batch {shape_label(shape)}", fontsize=10)
        bottom.set_xlabel("percent of the step", fontsize=SMALL)
    note = f"{_OF_TIME} {_OF_BATCH}"
    return plot_style.finish(figure, results, ["Memory over time"], note=note)


def _draw_memory(axes: Any, arm: Row, unit: float) -> None:
    axes.tick_params(labelsize=SMALL - 1)
    axes.locator_params(nbins=3)
    if not (timeline := arm.timeline):
        why_not = "failed" if arm.failure else "not measured"
        plot_style.say(axes, why_not, style="italic", fontsize=SMALL - 1)
        return
    xs = [100 * second / (timeline[-1][0] or 1.0) for second, _ in timeline]
    ys = [nbytes / unit for _, nbytes in timeline]
    color = plot_style.line_style(arm.kind)["color"]
    axes.fill_between(xs, ys, step="post", color=color, alpha=0.25, linewidth=0)
    axes.plot(xs, ys, color=color, linewidth=1.2, drawstyle="steps-post")
    axes.text(0.98, 0.93, three_digits(max(ys)), ha="right", va="top", transform=axes.transAxes,
              fontsize=SMALL - 1)  # fmt: skip


def losses(results: Results) -> Figure:
    """Mean over ranks and micro-batches; arms with wrong losses are drawn as well."""
    shapes = results.shapes or [(1, 1)]
    columns = min(_MOST_COLUMNS, len(shapes))
    height = -(-len(shapes) // columns)
    title = "Training loss (the same for all engines, or the arm is wrong)"
    size = max(5.5, 3.4 * columns) + plot_style.label_inches(results), 1.2 + 2.7 * height
    figure, grid = plot_style.new_figure(title, size, (height, columns), sharey=True)
    shown, others = np.split(grid.flatten(), [len(shapes)])
    for axes in others:
        axes.set_visible(False)
    for shape, axes in zip(shapes, shown, strict=True):
        for index, kind in enumerate(results.kinds):
            ys = results.at(kind, shape).step_losses
            if not ys:
                continue
            # Arms that do the same lie on each other: the first are wide, the last are thin, and
            # each has its few markers at places of its own.
            stride = max(1, len(ys) // 6)
            axes.plot(
                range(1, len(ys) + 1), ys, **plot_style.line_style(kind),
                linewidth=1.0 + 0.4 * (len(results.kinds) - 1 - index),
                markevery=(index * stride // len(results.kinds), stride),
            )  # fmt: skip
        if not axes.lines:
            plot_style.say(axes, "not measured")
        axes.set_title(f"batch {shape_label(shape)}", fontsize=10)
        axes.set_xlabel("optimizer step", fontsize=SMALL + 1)
    for axes in shown[::columns]:
        axes.set_ylabel("loss, nats per token")
    return plot_style.finish(figure, results, ["Losses"], note=_OF_BATCH, named=shown)
