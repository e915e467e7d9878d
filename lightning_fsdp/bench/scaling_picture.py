"""Curves over the number of ranks as a picture: a row of panels per batch shape, a line per arm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_fsdp.bench import plot_style
from lightning_fsdp.bench.results import kind_label
from lightning_fsdp.bench.scaling import Point

_OF_PADDING = (
    "FSDP2 deals out rows of each parameter, and pads them to a multiple of the ranks: every rank "
    "sends a row at least. Where a parameter has fewer rows than there are ranks (a layer of width "
    "128 among 1024), most of what is sent is padding, which grows with the ranks."
)

_PANELS = (
    ("tokens_per_s_per_rank", "tokens per second and rank"),
    ("efficiency", "share of one unsharded process"),
    ("sent_mb", "MB sent per step and rank"),
)


def draw(points: Sequence[Point]) -> Any:
    """A matplotlib figure that belongs to no window.

    Args:
        points: What failed is left out of the lines and named in the legend.
    """
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys((point.batch_size, point.grad_accum) for point in points))
    figure = Figure(figsize=(13, 1.2 + 3.8 * len(shapes)), layout="constrained")
    rows = figure.subplots(len(shapes), len(_PANELS), squeeze=False)
    for (batch_size, grad_accum), panels in zip(shapes, rows, strict=True):
        mine = [p for p in points if (p.batch_size, p.grad_accum) == (batch_size, grad_accum)]
        _draw_row(panels, mine)
        panels[1].set_title(f"each rank: {grad_accum} x {batch_size} sequences per step")
    labelled = {
        label: handle
        for panels in rows
        for handle, label in zip(*panels[0].get_legend_handles_labels(), strict=True)
    }
    if any(point.engine == "fsdp2" for point in points):
        plot_style.footnote(figure, [_OF_PADDING])
    figure.legend(labelled.values(), labelled.keys(), loc="outside upper center", ncols=4)
    return figure


def _draw_row(panels: Sequence[Any], points: Sequence[Point]) -> None:
    world_sizes = sorted({point.world_size for point in points if point.engine != "single"})
    kinds = list(dict.fromkeys((p.engine, p.zero_stage) for p in points if p.engine != "single"))
    for kind in kinds:
        of_arm = [point for point in points if (point.engine, point.zero_stage) == kind]
        style = {**plot_style.line_style(kind, kinds), "label": _label(of_arm)}
        for axes, (name, _) in zip(panels, _PANELS, strict=True):
            known = [(p.world_size, _value(p, name)) for p in of_arm]
            known = [(x, y) for x, y in known if y is not None]
            axes.plot([x for x, _ in known], [y for _, y in known], **style)
    for point in points:
        if point.engine == "single" and point.tokens_per_s_per_rank is not None:
            panels[0].axhline(
                point.tokens_per_s_per_rank, color="black", lw=0.8, label="one process, unsharded"
            )
    for axes, (_, title) in zip(panels, _PANELS, strict=True):
        axes.set_xscale("log", base=2)
        axes.set_xticks(world_sizes, [str(n) for n in world_sizes])
        axes.minorticks_off()
        axes.set(xlabel="ranks (simulated)", ylabel=title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)


def _label(points: Sequence[Point]) -> str:
    first = points[0]
    name = kind_label((first.engine, first.zero_stage))
    failed = [str(point.world_size) for point in points if point.failure is not None]
    return name + (f" (failed at {', '.join(failed)})" if failed else "")


def _value(point: Point, name: str) -> float | None:
    if name == "sent_mb":
        return None if point.sent_bytes is None else point.sent_bytes / 1e6
    value: float | None = getattr(point, name)
    return value
