"""Pictures with a place for every arm, failed ones included: bars, and a heat map."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lightning_fsdp.bench import plot_style
from lightning_fsdp.bench.plot_style import HATCHES, PARTS, SMALL
from lightning_fsdp.bench.records import Row, sum_of
from lightning_fsdp.bench.results import Results, kind_label, shape_label
from lightning_fsdp.callbacks.memory_picture import COLORS as OWNERS
from lightning_fsdp.harness.tables import three_digits

Stack = Mapping[str, float | None]
"""Lengths of a bar's parts, by label; ``None`` is not known."""
_DEVICES = {"gpu": "GPU utilization, percent", "cpu": "CPU time of a rank, percent of one core"}
_EXPOSED = "exposed (compute waits)"
_OVERLAPPED = "overlapped (hidden behind compute)"
_OF_THEORY: dict[str, Any] = {"mark_title": "demanded by theory", "marker": "D"}
_COLORS = ("#1f3b73", "#b5403f", "#6fae75", "#ecd9a0", "#a9a9a9", "#7b4f9d", "#c98a2b")


@dataclass(frozen=True, kw_only=True)
class _Panel:
    """A bar per arm.

    Attributes:
        title: Below the axis.
        stack: An arm's bar, if it has one.
        looks: Colour and hatch, by label.
        form: The length, as it is written behind it.
        mark: What an arm's bar is held against, if there is that.
        mark_title: In the legend.
        marker: Of matplotlib.
    """

    title: str
    stack: Callable[[Row], Stack | None]
    looks: Mapping[str, tuple[str, str]]
    form: Callable[[float], str] = three_digits
    mark: Callable[[Row], float | None] = lambda _: None
    mark_title: str = ""
    marker: str = "|"


def communication(results: Results) -> Figure:
    """Calls, sent bytes and time of collectives per optimizer step, beside what theory demands."""
    kinds = sorted({kind for arm in results.arms for kind in arm.data_calls or {}})
    unit, suffix = plot_style.byte_unit(arm.sent_bytes for arm in results.arms)
    calls = _Panel(
        title="calls that move parameters and gradients",
        stack=lambda arm: arm.data_calls,
        looks=_hatched(kinds, itertools.cycle(_COLORS)),
        form="{:g}".format,
        mark=lambda arm: sum_of(arm.demanded.collectives),
        **_OF_THEORY,
    )
    sent = _Panel(
        title=f"{suffix} sent",
        stack=lambda arm: {"bytes sent": plot_style.in_unit(arm.sent_bytes, unit)},
        looks={"bytes sent": ("#777777", "")},
        mark=lambda arm: plot_style.in_unit(arm.demanded.sent_bytes, unit),
        **_OF_THEORY,
    )
    seconds = _Panel(
        title="ms (exposed + overlapped)",
        stack=lambda arm: {
            _EXPOSED: arm.part_ms("exposed"),
            _OVERLAPPED: arm.part_ms("overlapped"),
        },
        looks={_EXPOSED: PARTS["exposed"], _OVERLAPPED: ("#e8e8e8", "\\\\")},
        mark=lambda arm: arm.communication_limit_ms,
        mark_title="limit: bytes over measured bandwidth",
    )
    title = "Communication per optimizer step, rank 0"
    figure, rows = _bars(results, title, [calls, sent, seconds])
    for axes in rows:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=SMALL)
    names = ("Calls", "Bytes sent", "Exposed communication", "Limit of communication")
    return plot_style.finish(figure, results, [*names, "Calls demanded by theory"])


def time_breakdown(results: Results) -> Figure:
    """Where a step's time goes; the line is what one process needs for one rank's share of it."""
    unknown = "not told apart"
    labels = {name: "exposed communication" if name == "exposed" else name for name in PARTS}

    def stack(arm: Row) -> Stack | None:
        if not arm.parts_ms:
            return None
        parts = {label: arm.part_ms(name) for name, label in labels.items()}
        known = {label: ms for label, ms in parts.items() if ms is not None}
        whole_ms = arm.part_ms("whole")
        if len(known) < len(parts) and whole_ms is not None:
            known[unknown] = max(0.0, whole_ms - sum(known.values()))
        return known

    panel = _Panel(
        title="ms per step (median of profiled steps)",
        stack=stack,
        looks={**{labels[name]: look for name, look in PARTS.items()}, unknown: ("#ffffff", "--")},
        mark=lambda arm: arm.compute_limit_ms,
        mark_title="limit: compute alone",
    )
    figure, (axes,) = _bars(results, "Where an optimizer step's time goes, rank 0", [panel])
    for row, arm in enumerate(results.arms):
        if hidden := arm.part_ms("overlapped"):
            axes.barh(row + 0.39, hidden, height=0.14, color="#e8e8e8", edgecolor="black",
                      hatch="\\\\\\\\", linewidth=0.5,
                      label="communication hidden behind compute")  # fmt: skip
    names = ("Parts of a step", "Limit of compute")
    return plot_style.finish(figure, results, names, named=[axes])


def memory_at_peak(results: Results) -> Figure:
    """What rank 0's memory is for at the moment when there is most of it."""
    unit, suffix = plot_style.byte_unit(sum_of(arm.peak_by_kind) for arm in results.arms)
    names = list(dict.fromkeys(owner for arm in results.arms for owner in arm.peak_by_kind or {}))
    panel = _Panel(
        title=suffix,
        stack=lambda arm: {of: n / unit for of, n in (arm.peak_by_kind or {}).items()} or None,
        looks=_hatched(names, (OWNERS.get(name, "#ffffff") for name in names)),
    )
    figure, named = _bars(results, "Memory at its peak by owner, rank 0", [panel])
    return plot_style.finish(figure, results, ["Memory by owner"], named=named)


def utilization(results: Results) -> Figure:
    """Mean of all samples of all ranks and repeats: kinds down, batch shapes across.

    A heat map shows a pattern over two directions; one batch shape is shown in bars.
    """
    devices = list(dict.fromkeys(of for arm in results.arms for of in arm.utilization)) or [""]
    title = "Utilization over the timed steps"
    if len(results.shapes) > 1:
        height = 0.6 + len(devices) * (1.6 + 0.36 * len(results.kinds))
        width = max(6.2, 1.6 + 0.95 * len(results.shapes)) + plot_style.label_inches(results)
        figure, panels = plot_style.new_figure(title, (width, height), (len(devices), 1), "")
        for device, axes in zip(devices, panels[:, 0], strict=True):
            _draw_heat_map(axes, results, device)
    else:
        figure, _ = _bars(results, title, [_utilization_bars(device) for device in devices])
    note = "Mean of all samples of all ranks."
    return plot_style.finish(figure, results, ["Utilization"], note=note)


def _utilization_bars(device: str) -> _Panel:
    return _Panel(
        title=_DEVICES.get(device, "not measured"),
        stack=lambda arm: {device: arm.utilization.get(device)},
        looks={device: ("#1f3b73", "")},
        form="{:.0f}".format,
    )


def _draw_heat_map(axes: Any, results: Results, device: str) -> None:
    kinds, shapes = results.kinds, results.shapes
    arms = [[results.at(kind, shape) for shape in shapes] for kind in kinds]
    grid = np.array([[arm.utilization.get(device) for arm in row] for row in arms], dtype=float)
    top = max([100.0, *grid[~np.isnan(grid)]])
    image = axes.imshow(grid, cmap="cividis", vmin=0, vmax=top, aspect="auto")
    for (y, x), percent in np.ndenumerate(grid):
        is_dark = percent < 0.55 * top  # never where it is not a number
        why_not = "failed" if arms[y][x].failure else "?"
        text = why_not if np.isnan(percent) else f"{percent:.0f}"
        color = "white" if is_dark else "black"
        axes.text(x, y, text, ha="center", va="center", color=color, fontsize=9)
    axes.set_xticks(range(len(shapes)), [shape_label(shape) for shape in shapes])
    axes.set_yticks(range(len(kinds)), [kind_label(kind) for kind in kinds])
    axes.set_xlabel("sequences per rank and micro-batch x micro-batches per step")
    axes.set_title(_DEVICES.get(device, "not measured"), fontsize=10)
    if device:
        axes.figure.colorbar(image, ax=axes, label="percent")


def _bars(results: Results, title: str, panels: Sequence[_Panel]) -> tuple[Figure, Sequence[Any]]:
    """A picture of panels side by side, with the arms' names at the left."""
    arms, names = results.arms, [arm.arm for arm in results.arms]
    width = 3.8 * len(panels) + 0.075 * max((len(name) for name in names), default=0)
    size = max(10.0, width), 1.8 + 0.27 * max(2, len(names))
    figure, (columns,) = plot_style.new_figure(title, size, (1, len(panels)), "x", sharey=True)
    columns[0].set_yticks(range(len(names)), names, fontsize=SMALL)
    shapes = list(dict.fromkeys(row.shape for row in results.rows))
    for panel, axes in zip(panels, columns, strict=True):
        axes.set_ylim(max(len(names), 1) - 0.4, -0.6)  # the first arm on top
        for shape in shapes[1::2]:
            rows = [row for row, arm in enumerate(arms) if arm.shape == shape]
            axes.axhspan(min(rows) - 0.5, max(rows) + 0.5, color="black", alpha=0.05, lw=0)
        _draw_bars(axes, arms, panel)
        axes.set_xlabel(panel.title)
    return figure, columns


def _draw_bars(axes: Any, arms: Sequence[Row], panel: _Panel) -> None:
    """A bar of parts per arm, its length written behind it; words where there is none."""
    stacks = [panel.stack(arm) for arm in arms]
    rows, ends = np.arange(len(arms)), np.zeros(len(arms))
    for label, (color, hatch) in panel.looks.items():
        lengths = np.array([(stack or {}).get(label) for stack in stacks], dtype=float)
        known = ~np.isnan(lengths)
        if known.any():
            axes.barh(
                rows[known], lengths[known], left=ends[known], height=0.62, color=color,
                hatch=hatch, label=label, edgecolor="black", linewidth=0.5,
            )  # fmt: skip
        ends[known] += lengths[known]
    marks = np.array([panel.mark(arm) for arm in arms], dtype=float)
    marked = ~np.isnan(marks)
    longest = max([max(ends, default=0.0) or 1.0, *marks[marked]])
    if marked.any():
        is_line = panel.marker == "|"
        axes.plot(
            marks[marked], rows[marked], linestyle="none", marker=panel.marker,
            color="black", markerfacecolor="white", label=panel.mark_title, clip_on=False,
            markersize=11 if is_line else 5, markeredgewidth=1.8 if is_line else 1.0,
        )  # fmt: skip
    for row, (arm, stack) in enumerate(zip(arms, stacks, strict=True)):
        is_known = stack is not None and None not in stack.values()
        axes.text(
            np.fmax(ends, marks)[row] + 0.03 * longest, row,
            panel.form(ends[row]) if is_known else arm.failure_kind or "not measured",
            va="center", style="normal" if is_known else "italic", fontsize=SMALL - 1,
        )  # fmt: skip
    axes.set_xlim(0, longest * 1.25)


def _hatched(labels: Sequence[str], colors: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Neighbours in a bar differ without colour."""
    return dict(zip(labels, zip(colors, itertools.cycle(HATCHES)), strict=False))
