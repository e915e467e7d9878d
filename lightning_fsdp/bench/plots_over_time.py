"""Pictures over time: memory with a panel per arm, losses with a line per arm."""

from __future__ import annotations

import textwrap
from typing import Any

from matplotlib.figure import Figure

from lightning_fsdp.bench import plot_style
from lightning_fsdp.bench.plot_style import SMALL
from lightning_fsdp.bench.results import ArmResult, Results, kind_label, shape_label

_MOST_COLUMNS = 3
_OF_BATCH = "Batch: sequences per rank and micro-batch x micro-batches per step."
_OF_TIME = "The number is the peak. Seconds are left out: watching slows steps down."


def memory_over_time(results: Results) -> Figure:
    """Bytes of tensors alive on rank 0 through one optimizer step: engines down, batches across.

    All panels have one scale, so that they can be compared by eye; in time they are as long as
    their step, since watching slows each engine down by another factor.
    """
    kinds, shapes = results.kinds or [("", None)], results.shapes or [(1, 1)]
    highest = max((nbytes for arm in results.arms for _, nbytes in _timeline(arm)), default=None)
    unit, suffix = plot_style.byte_unit([highest])
    figure = plot_style.new_figure(
        max(7.0, 1.6 * len(shapes)) + plot_style.label_inches(results),
        1.4 + 0.75 * len(kinds),
        f"Memory over one optimizer step, rank 0: tensors alive, {suffix}",
    )
    panels = figure.subplots(len(kinds), len(shapes), squeeze=False, sharex="col", sharey=True)
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
    notes = [f"{_OF_TIME} {_OF_BATCH}"]
    return plot_style.finish(figure, results, {"Memory over time": _timeline}, notes=notes)


def _timeline(arm: ArmResult) -> list[tuple[float, int]]:
    return (arm.first_rank and arm.first_rank.timeline) or []


def _draw_memory(axes: Any, arm: ArmResult | None, unit: float) -> None:
    plot_style.rule(axes)
    axes.tick_params(labelsize=SMALL - 1)
    axes.locator_params(nbins=3)
    timeline = [] if arm is None else _timeline(arm)
    if arm is None or not timeline:
        has_failed = arm is not None and arm.failure is not None
        says = "failed" if has_failed else "not measured"
        plot_style.say(axes, says, style="italic", fontsize=SMALL - 1)
        return
    xs = [100 * second / (timeline[-1][0] or 1.0) for second, _ in timeline]
    ys = [nbytes / unit for _, nbytes in timeline]
    color = plot_style.line_style(arm.row.kind, [arm.row.kind])["color"]
    axes.fill_between(xs, ys, step="post", color=color, alpha=0.25, linewidth=0)
    axes.plot(xs, ys, color=color, linewidth=1.2, drawstyle="steps-post")
    axes.text(0.98, 0.93, f"{max(ys):.3g}", ha="right", va="top", transform=axes.transAxes,
              fontsize=SMALL - 1)  # fmt: skip


def losses(results: Results) -> Figure:
    """Mean over ranks and micro-batches; arms with wrong losses are drawn as well."""
    shapes = results.shapes or [(1, 1)]
    columns = min(_MOST_COLUMNS, len(shapes))
    height = -(-len(shapes) // columns)
    figure = plot_style.new_figure(
        max(5.5, 3.4 * columns) + plot_style.label_inches(results),
        1.2 + 2.7 * height,
        "Training loss (the same for all engines, or the arm is wrong)",
    )
    panels = figure.subplots(height, columns, squeeze=False, sharey=True).flatten()
    for axes in panels[len(shapes) :]:
        axes.set_visible(False)
    shown = panels[: len(shapes)]
    for shape, axes in zip(shapes, shown, strict=True):
        for index, kind in enumerate(results.kinds):
            arm = results.at(kind, shape)
            ys = [] if arm is None else arm.step_losses
            if not ys:
                continue
            # Arms that do the same lie on each other: the first are wide, the last are thin, and
            # each has its few markers at places of its own.
            stride = max(1, len(ys) // 6)
            axes.plot(
                range(1, len(ys) + 1), ys, **plot_style.line_style(kind, results.kinds),
                linewidth=1.0 + 0.4 * (len(results.kinds) - 1 - index),
                markevery=(index * stride // len(results.kinds), stride),
            )  # fmt: skip
        if not axes.lines:
            plot_style.say(axes, "not measured")
        axes.set_title(f"batch {shape_label(shape)}", fontsize=10)
        axes.set_xlabel("optimizer step", fontsize=SMALL + 1)
        plot_style.rule(axes)
    for axes in shown[::columns]:
        axes.set_ylabel("loss, nats per token")
    asked = {"Losses": lambda arm: arm.step_losses}
    return plot_style.finish(figure, results, asked, notes=[_OF_BATCH], named=shown)
