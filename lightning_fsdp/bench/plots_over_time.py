"""Pictures over time: memory with a panel per arm, losses with a line per arm."""

from __future__ import annotations

import textwrap
from typing import Any

from matplotlib.figure import Figure

from lightning_fsdp.bench import plot_style
from lightning_fsdp.bench.results import (
    ArmResult,
    Results,
    kind_label,
    loss_curve,
    lost,
    shape_label,
    unmeasured,
)

_MOST_COLUMNS = 3
_OF_BATCH = "Batch: sequences per rank and micro-batch x micro-batches per step."


def memory_over_time(results: Results) -> Figure:
    """Bytes of tensors alive on rank 0 through one optimizer step: engines down, batches across.

    All panels have one scale, so that they can be compared by eye; in time they are as long as
    their step, since watching slows each engine down by another factor.
    """
    kinds, shapes = results.kinds or [("", None)], results.shapes or [(1, 1)]
    timelines = {arm.name: _timeline(arm) for arm in results.arms}
    tops = {
        name: max(nbytes for _, nbytes in timeline)
        for name, timeline in timelines.items()
        if timeline
    }
    unit, suffix = plot_style.byte_unit(tops.values())
    figure = plot_style.new_figure(
        max(7.0, 1.6 * len(shapes)) + plot_style.label_inches(results),
        1.4 + 0.75 * len(kinds),
        f"Memory over one optimizer step, rank 0: tensors alive, {suffix}",
    )
    panels = figure.subplots(len(kinds), len(shapes), squeeze=False, sharex="col", sharey=True)
    for kind, row in zip(kinds, panels, strict=True):
        row[0].set_ylabel(
            textwrap.fill(kind_label(kind), 16), rotation=0, ha="right", va="center",
            fontsize=plot_style.SMALL + 1,
        )  # fmt: skip
        for shape, axes in zip(shapes, row, strict=True):
            _draw_memory(axes, results.at(kind, shape), timelines, unit)
    panels[0, 0].set_ylim(0, 1.3 * max(tops.values(), default=1.0) / unit)
    for shape, top, bottom in zip(shapes, panels[0], panels[-1], strict=True):
        top.set_title(f"batch {shape_label(shape)}", fontsize=10)
        bottom.set_xlabel("percent of the step", fontsize=plot_style.SMALL)
    lacking = unmeasured(results, "Memory over time", lambda arm: bool(timelines[arm.name]))
    notes = [
        f"The number is the peak. Seconds are left out: watching slows steps down. {_OF_BATCH}"
    ]
    plot_style.footnote(figure, [*notes, *lacking, *lost(results)])
    return figure


def _timeline(arm: ArmResult) -> list[tuple[float, int]]:
    return (arm.first_rank("timeline") or []) if arm.failure is None else []


def _draw_memory(
    axes: Any,
    arm: ArmResult | None,
    timelines: dict[str, list[tuple[float, int]]],
    unit: float,
) -> None:
    axes.grid(color="#e5e5e5", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=plot_style.SMALL - 1)
    axes.locator_params(nbins=3)
    timeline = timelines[arm.name] if arm is not None else []
    if not timeline:
        has_failed = arm is not None and arm.failure is not None
        says = "failed" if has_failed else "not measured"
        axes.text(0.5, 0.5, says, ha="center", va="center", transform=axes.transAxes,
                  style="italic", fontsize=plot_style.SMALL - 1)  # fmt: skip
        return
    assert arm is not None
    end_s = timeline[-1][0] or 1.0
    xs = [100 * second / end_s for second, _ in timeline]
    ys = [nbytes / unit for _, nbytes in timeline]
    color = plot_style.line_style(arm.kind, [arm.kind])["color"]
    axes.fill_between(xs, ys, step="post", color=color, alpha=0.25, linewidth=0)
    axes.plot(xs, ys, color=color, linewidth=1.2, drawstyle="steps-post")
    axes.text(0.98, 0.93, f"{max(ys):.3g}", ha="right", va="top", transform=axes.transAxes,
              fontsize=plot_style.SMALL - 1)  # fmt: skip


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
    for number, (shape, axes) in enumerate(zip(shapes, panels[: len(shapes)], strict=True)):
        is_empty = True
        for index, kind in enumerate(results.kinds):
            arm = results.at(kind, shape)
            found = None if arm is None else loss_curve(arm)
            if found is None:
                continue
            is_empty = False
            xs, ys = found
            # Arms that do the same lie on each other: the first are wide, the last are thin, and
            # each has its few markers at places of its own.
            stride = max(1, len(xs) // 6)
            axes.plot(
                xs, ys, **plot_style.line_style(kind, results.kinds),
                linewidth=1.0 + 0.4 * (len(results.kinds) - 1 - index),
                markevery=(index * stride // max(1, len(results.kinds)), stride),
            )  # fmt: skip
        if is_empty:
            plot_style.say_nothing(axes)
        axes.set_title(f"batch {shape_label(shape)}", fontsize=10)
        axes.set_xlabel("optimizer step", fontsize=plot_style.SMALL + 1)
        axes.grid(color="#e5e5e5", linewidth=0.5)
        axes.set_axisbelow(True)
        if number % columns == 0:
            axes.set_ylabel("loss, nats per token")
    lacking = unmeasured(results, "Losses", lambda arm: loss_curve(arm) is not None)
    plot_style.footnote(figure, [_OF_BATCH, *lacking, *lost(results)])
    plot_style.legend(figure, panels[: len(shapes)])
    return figure
