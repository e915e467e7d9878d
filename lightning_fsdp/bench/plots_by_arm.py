"""Pictures with a place for every arm, failed ones included: bars, and a heat map."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from lightning_fsdp.bench import plot_style
from lightning_fsdp.bench.results import (
    ArmResult,
    Results,
    kind_label,
    lost,
    mean_utilization,
    shape_label,
    unmeasured,
)
from lightning_fsdp.callbacks.memory_picture import COLORS as OWNERS

Stack = Mapping[str, float | None]
"""Lengths of a bar's parts, by label; ``None`` is not known."""
_DEVICES = {"gpu": "GPU utilization, percent", "cpu": "CPU time of a rank, percent of one core"}
_EXPOSED = "exposed (compute waits)"
_OVERLAPPED = "overlapped (hidden behind compute)"


@dataclass(frozen=True)
class _Marks:
    """What bars are held against.

    Attributes:
        label: In the legend.
        of: Where an arm's mark is, if it has one.
        marker: Of matplotlib.
    """

    label: str
    of: Callable[[ArmResult], float | None]
    marker: str = "D"


def communication(results: Results) -> Figure:
    """Calls, bytes and time of collectives per optimizer step, beside what theory demands."""
    figure, panels = _new_bars(results, "Communication per optimizer step, rank 0", 3)
    calls, payload, seconds = panels
    kinds = sorted({kind for arm in results.arms for kind in arm.data_calls() or {}})
    colors = ("#1f3b73", "#b5403f", "#6fae75", "#ecd9a0", "#a9a9a9", "#7b4f9d", "#c98a2b")
    looks = {
        kind: (colors[i % len(colors)], plot_style.HATCHES[i % len(plot_style.HATCHES)])
        for i, kind in enumerate(kinds)
    }
    unit, suffix = plot_style.byte_unit(arm.get("payload_bytes") for arm in results.arms)
    theory = "demanded by theory"
    _bars(calls, results, ArmResult.data_calls, looks, "{:g}",
          _Marks(theory, lambda arm: arm.total("theory", "collectives")))  # fmt: skip
    _bars(payload, results, lambda arm: _only("bytes sent", arm.get("payload_bytes"), unit),
          {"bytes sent": ("#777777", "")}, "{:.3g}",
          _Marks(theory, lambda arm: _per(arm.get("theory", "payload_bytes"), unit)))  # fmt: skip
    _bars(seconds, results, _waiting, {
        _EXPOSED: plot_style.PARTS["exposed"], _OVERLAPPED: ("#e8e8e8", "\\\\"),
    }, "{:.3g}", _Marks("limit: bytes over measured bandwidth",
                        lambda arm: arm.get("communication_limit_ms"), "|"))  # fmt: skip
    for axes, label in zip(
        panels,
        ("calls that move parameters and gradients", suffix, "ms (exposed + overlapped)"),
        strict=True,
    ):
        axes.set_xlabel(label)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False,
                        fontsize=plot_style.SMALL)  # fmt: skip
    lacking = [
        *unmeasured(results, "Calls", lambda arm: arm.total("collectives") is not None),
        *unmeasured(results, "Exposed time", lambda arm: _exposed(arm) is not None),
        *unmeasured(results, "Bandwidth", lambda a: a.get("communication_limit_ms") is not None),
        *unmeasured(results, "Theory", lambda arm: arm.total("theory", "collectives") is not None),
    ]
    plot_style.footnote(figure, [*lacking, *lost(results)])
    return figure


def time_breakdown(results: Results) -> Figure:
    """Where a step's time goes; the line is what one process needs for one rank's share of it."""
    figure, (axes,) = _new_bars(results, "Where an optimizer step's time goes, rank 0", 1)
    unknown = "not told apart"
    looks = {**_named_parts(plot_style.PARTS), unknown: ("#ffffff", "--")}

    def stack(arm: ArmResult) -> Stack | None:
        parts = arm.get("parts_ms")
        if not parts:
            return None
        known = {_part_label(name): parts.get(f"{name}_ms") for name in plot_style.PARTS}
        whole = parts.get("whole_ms")
        if None in known.values() and whole is not None:
            known[unknown] = max(0.0, whole - sum(v for v in known.values() if v is not None))
        return {label: v for label, v in known.items() if v is not None}

    limit = _Marks("limit: compute alone", lambda arm: arm.get("compute_limit_ms"), "|")
    _bars(axes, results, stack, looks, "{:.3g}", limit)
    for row, arm in enumerate(results.arms):
        hidden = arm.get("parts_ms", "overlapped_ms")
        if hidden:
            axes.barh(row + 0.39, hidden, height=0.14, color="#e8e8e8", edgecolor="black",
                      hatch="\\\\\\\\", linewidth=0.5,
                      label="communication hidden behind compute")  # fmt: skip
    axes.set_xlabel("ms per step (median of profiled steps)")
    lacking = [
        *unmeasured(results, "Parts of a step", lambda arm: bool(arm.get("parts_ms"))),
        *unmeasured(results, "Limit", lambda arm: arm.get("compute_limit_ms") is not None),
    ]
    plot_style.footnote(figure, [*lacking, *lost(results)])
    plot_style.legend(figure, [axes])
    return figure


def memory_at_peak(results: Results) -> Figure:
    """What rank 0's memory is for at the moment when there is most of it."""
    figure, (axes,) = _new_bars(results, "Memory at its peak by owner, rank 0", 1)
    owners = list(dict.fromkeys(o for arm in results.arms for o in _owners(arm) or {}))
    unit, suffix = plot_style.byte_unit(
        sum(v or 0 for v in (_owners(arm) or {}).values()) for arm in results.arms
    )
    looks = {
        owner: (OWNERS.get(owner, "#ffffff"), plot_style.HATCHES[i % len(plot_style.HATCHES)])
        for i, owner in enumerate(owners)
    }

    def stack(arm: ArmResult) -> Stack | None:
        found = _owners(arm)
        return None if found is None else {owner: v and v / unit for owner, v in found.items()}

    _bars(axes, results, stack, looks, "{:.3g}")
    axes.set_xlabel(suffix)
    lacking = unmeasured(results, "Memory by owner", lambda arm: bool(_owners(arm)))
    plot_style.footnote(figure, [*lacking, *lost(results)])
    plot_style.legend(figure, [axes])
    return figure


def utilization(results: Results) -> Figure:
    """Mean of all samples of all ranks and repeats: kinds down, batch shapes across.

    A heat map shows a pattern over two directions; one batch shape is shown in bars.
    """
    devices = list(dict.fromkeys(d for arm in results.arms for d in mean_utilization(arm)))
    kinds, shapes = results.kinds, results.shapes
    if len(shapes) < 2:
        return _utilization_of_one_shape(results, devices)
    height = max(1, len(devices)) * (1.6 + 0.36 * len(kinds))
    width = max(6.2, 1.6 + 0.95 * len(shapes)) + plot_style.label_inches(results)
    figure = plot_style.new_figure(width, height + 0.6, "Utilization over the timed steps")
    panels = figure.subplots(max(1, len(devices)), 1, squeeze=False)[:, 0]
    for device, axes in zip(devices or [""], panels, strict=True):
        values = [
            [mean_utilization(arm).get(device) if arm else None for arm in row]
            for row in ([results.at(kind, shape) for shape in shapes] for kind in kinds)
        ]
        top = max([100.0, *(v for row in values for v in row if v is not None)])
        grid = [[float("nan") if v is None else v for v in row] for row in values]
        image = axes.imshow(grid or [[float("nan")]], cmap="cividis", vmin=0, vmax=top,
                            aspect="auto")  # fmt: skip
        for y, kind in enumerate(kinds):
            for x, shape in enumerate(shapes):
                value, arm = values[y][x], results.at(kind, shape)
                text, dark = "?", False
                if value is not None:
                    text, dark = f"{value:.0f}", value < 0.55 * top
                elif arm is not None and arm.failure is not None:
                    text = "failed"
                axes.text(x, y, text, ha="center", va="center",
                          color="white" if dark else "black", fontsize=9)  # fmt: skip
        axes.set_xticks(range(len(shapes)), [shape_label(shape) for shape in shapes])
        axes.set_yticks(range(len(kinds)), [kind_label(kind) for kind in kinds])
        axes.set_xlabel("sequences per rank and micro-batch x micro-batches per step")
        axes.set_title(_DEVICES.get(device, "not measured"), fontsize=10)
        if device:
            figure.colorbar(image, ax=axes, label="percent")
    lacking = unmeasured(results, "Utilization", lambda arm: bool(mean_utilization(arm)))
    plot_style.footnote(figure, ["Mean of all samples of all ranks.", *lacking, *lost(results)])
    return figure


def _utilization_of_one_shape(results: Results, devices: Sequence[str]) -> Figure:
    figure, panels = _new_bars(results, "Utilization over the timed steps", max(1, len(devices)))

    def stack(device: str, arm: ArmResult) -> Stack | None:
        mean = mean_utilization(arm).get(device)
        return None if mean is None else {device: mean}

    for device, axes in zip(devices or [""], panels, strict=True):
        _bars(axes, results, partial(stack, device), {device: ("#1f3b73", "")}, "{:.0f}")
        axes.set_xlabel(_DEVICES.get(device, "not measured"))
    lacking = unmeasured(results, "Utilization", lambda arm: bool(mean_utilization(arm)))
    plot_style.footnote(figure, ["Mean of all samples of all ranks.", *lacking, *lost(results)])
    return figure


def _new_bars(results: Results, title: str, num_panels: int) -> tuple[Figure, Sequence[Any]]:
    names = [arm.name for arm in results.arms]
    width = 3.8 * num_panels + 0.075 * max((len(name) for name in names), default=0)
    figure = plot_style.new_figure(max(10.0, width), 1.8 + 0.27 * max(2, len(names)), title)
    panels = figure.subplots(1, num_panels, squeeze=False, sharey=True)[0]
    panels[0].set_yticks(range(len(names)), names, fontsize=plot_style.SMALL)
    for axes in panels:
        axes.set_ylim(max(len(names), 1) - 0.4, -0.6)  # the first arm on top
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        for number, shape in enumerate(dict.fromkeys(arm.shape for arm in results.arms)):
            rows = [row for row, arm in enumerate(results.arms) if arm.shape == shape]
            if number % 2:
                axes.axhspan(min(rows) - 0.5, max(rows) + 0.5, color="black", alpha=0.05, lw=0)
    return figure, panels


def _bars(
    axes: Any,
    results: Results,
    stack: Callable[[ArmResult], Stack | None],
    looks: Mapping[str, tuple[str, str]],
    form: str,
    marks: _Marks | None = None,
) -> None:
    """A bar of parts per arm, its length written behind it; words where there is none."""
    stacks = [stack(arm) for arm in results.arms]
    ends = [sum(v or 0.0 for v in (parts or {}).values()) for parts in stacks]
    longest = max(ends, default=0.0) or 1.0
    for label, (color, hatch) in looks.items():
        rows = [row for row, parts in enumerate(stacks) if (parts or {}).get(label) is not None]
        lefts = []
        for row in rows:
            before = list(stacks[row] or {})
            before = before[: before.index(label)]
            lefts.append(sum((stacks[row] or {})[name] or 0.0 for name in before))
        if rows:
            axes.barh(
                rows, [(stacks[row] or {})[label] for row in rows], left=lefts, height=0.62,
                color=color, hatch=hatch, label=label, edgecolor="black", linewidth=0.5,
            )  # fmt: skip
    found = [None if marks is None else marks.of(arm) for arm in results.arms]
    longest = max([longest, *(x for x in found if x is not None)])
    if marks is not None and any(x is not None for x in found):
        rows = [row for row, x in enumerate(found) if x is not None]
        axes.plot(
            [found[row] for row in rows], rows, linestyle="none", marker=marks.marker,
            color="black", markerfacecolor="white", label=marks.label, clip_on=False,
            markersize=5 if marks.marker == "D" else 11,
            markeredgewidth=1.0 if marks.marker == "D" else 1.8,
        )  # fmt: skip
    for row, (arm, parts, mark) in enumerate(zip(results.arms, stacks, found, strict=True)):
        is_known = parts is not None and None not in parts.values()
        axes.text(
            max(ends[row], mark or 0.0) + 0.03 * longest, row,
            form.format(ends[row]) if is_known else _why_not(arm),
            va="center", style="normal" if is_known else "italic", fontsize=plot_style.SMALL - 1,
        )  # fmt: skip
    axes.set_xlim(0, longest * 1.25)


def _why_not(arm: ArmResult) -> str:
    if arm.failure is None:
        return "not measured"
    return arm.failure if len(arm.failure) <= 24 else "failed"


def _waiting(arm: ArmResult) -> Stack | None:
    parts = arm.get("parts_ms")
    if not parts:
        return None
    return {
        _EXPOSED: parts.get("exposed_ms"),
        _OVERLAPPED: parts.get("overlapped_ms"),
    }


def _exposed(arm: ArmResult) -> float | None:
    found: float | None = arm.get("parts_ms", "exposed_ms")
    return found


def _owners(arm: ArmResult) -> Stack | None:
    found: Stack | None = arm.first_rank("peak_by_kind") if arm.failure is None else None
    return found or None


def _only(label: str, figure: float | None, unit: float) -> Stack | None:
    return None if figure is None else {label: figure / unit}


def _per(figure: float | None, unit: float) -> float | None:
    return None if figure is None else figure / unit


def _part_label(name: str) -> str:
    return "exposed communication" if name == "exposed" else name


def _named_parts(parts: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    return {_part_label(name): look for name, look in parts.items()}
