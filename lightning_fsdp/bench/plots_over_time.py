"""Pictures over time: a panel per batch shape, a line per engine and stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.figure import Figure

from lightning_fsdp.bench import plot_style
from lightning_fsdp.bench.results import (
    ArmResult,
    Line,
    Results,
    loss_curve,
    lost,
    shape_label,
    unmeasured,
)

_MOST_COLUMNS = 3


def memory_over_time(results: Results) -> Figure:
    """Bytes of tensors alive on rank 0 through one optimizer step that is watched closely."""
    tops = [
        max((nbytes for _, nbytes in arm.first_rank("timeline") or []), default=None)
        for arm in results.arms
    ]
    unit, suffix = plot_style.byte_unit(tops)

    def line(arm: ArmResult) -> Line | None:
        timeline = arm.first_rank("timeline")
        if arm.failure is not None or not timeline:
            return None
        return [second for second, _ in timeline], [nbytes / unit for _, nbytes in timeline]

    figure = _over_time(
        results,
        "Memory over one optimizer step, rank 0",
        line,
        xlabel="seconds (watching slows the step down)",
        ylabel=f"tensors alive, {suffix}",
        drawstyle="steps-post",
        lacking=unmeasured(results, "Memory over time", lambda arm: line(arm) is not None),
    )
    figure.axes[0].set_ylim(bottom=0)
    return figure


def losses(results: Results) -> Figure:
    """Mean over ranks and micro-batches; arms with wrong losses are drawn as well."""
    return _over_time(
        results,
        "Training loss (the same for all engines, or the arm is wrong)",
        loss_curve,
        xlabel="optimizer step",
        ylabel="loss, nats per token",
        drawstyle="default",
        lacking=unmeasured(results, "Losses", lambda arm: loss_curve(arm) is not None),
    )


def _over_time(
    results: Results,
    title: str,
    line: Callable[[ArmResult], Line | None],
    *,
    xlabel: str,
    ylabel: str,
    drawstyle: str,
    lacking: Sequence[str],
) -> Figure:
    shapes = results.shapes or [(1, 1)]
    columns = min(_MOST_COLUMNS, len(shapes))
    height = -(-len(shapes) // columns)
    figure = plot_style.new_figure(
        max(5.5, 3.4 * columns) + plot_style.label_inches(results), 1.2 + 2.7 * height, title
    )
    panels = figure.subplots(height, columns, squeeze=False, sharey=True).flatten()
    for axes in panels[len(shapes) :]:
        axes.set_visible(False)
    for number, (shape, axes) in enumerate(zip(shapes, panels[: len(shapes)], strict=True)):
        is_empty = True
        for index, kind in enumerate(results.kinds):
            arm = results.at(kind, shape)
            found = None if arm is None else line(arm)
            if found is None:
                continue
            is_empty = False
            xs, ys = found
            # Arms that do the same lie on each other: the first are wide, the last are thin, and
            # each has its few markers at places of its own.
            stride = max(1, len(xs) // 6)
            axes.plot(
                xs, ys, **plot_style.line_style(kind, results.kinds), drawstyle=drawstyle,
                linewidth=1.0 + 0.4 * (len(results.kinds) - 1 - index),
                markevery=(index * stride // max(1, len(results.kinds)), stride),
            )  # fmt: skip
        if is_empty:
            plot_style.say_nothing(axes)
        axes.set_title(f"batch {shape_label(shape)}", fontsize=10)
        axes.set_xlabel(xlabel, fontsize=plot_style.SMALL + 1)
        axes.grid(color="#e5e5e5", linewidth=0.5)
        axes.set_axisbelow(True)
        if number % columns == 0:
            axes.set_ylabel(ylabel)
    note = "Batch: sequences per rank and micro-batch x micro-batches per step."
    plot_style.footnote(figure, [note, *lacking, *lost(results)])
    plot_style.legend(figure, panels[: len(shapes)])
    return figure
