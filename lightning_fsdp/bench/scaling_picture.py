"""Curves over the number of ranks as a picture: a row of panels per batch shape, a line per arm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure

from lightning_fsdp.bench import plot_style
from lightning_fsdp.bench.records import Kind
from lightning_fsdp.bench.results import kind_label
from lightning_fsdp.bench.scaling import Point

_OF_PADDING = (
    "FSDP2 deals out rows of each parameter, and pads them to a multiple of the ranks: every rank "
    "sends a row at least. Where a parameter has fewer rows than there are ranks (a layer of width "
    "128 among 1024), most of what is sent is padding, which grows with the ranks."
)

_PANELS: dict[str, Callable[[Point], float | None]] = {
    "tokens per second and rank": lambda point: point.tokens_per_s_per_rank,
    "share of one unsharded process": lambda point: point.efficiency,
    "MB sent per step and rank": lambda point: (
        None if point.sent_bytes is None else point.sent_bytes / 1e6
    ),
}


def draw(points: Sequence[Point]) -> Figure:
    """A figure that belongs to no window.

    Args:
        points: What failed is left out of the lines and named in the legend.
    """
    shapes = list(dict.fromkeys(point.shape for point in points))
    figure = Figure(figsize=(13, 1.2 + 3.8 * len(shapes)), layout="constrained")
    rows = figure.subplots(len(shapes), len(_PANELS), squeeze=False)
    for shape, panels in zip(shapes, rows, strict=True):
        _draw_row(panels, [point for point in points if point.shape == shape])
        panels[1].set_title(f"each rank: {shape[1]} x {shape[0]} sequences per step")
    if any(point.engine == "fsdp2" for point in points):
        plot_style.footnote(figure, [_OF_PADDING])
    plot_style.legend(figure, rows[:, 0], loc="outside upper center", ncols=4)
    return figure


def _draw_row(panels: Sequence[Any], points: Sequence[Point]) -> None:
    of_kind: dict[Kind, list[Point]] = {}
    for point in points:
        if point.engine != "single":
            of_kind.setdefault(point.kind, []).append(point)
        elif point.tokens_per_s_per_rank is not None:
            label = "one process, unsharded"
            panels[0].axhline(point.tokens_per_s_per_rank, color="black", lw=0.8, label=label)
    world_sizes = sorted({point.world_size for of in of_kind.values() for point in of})
    for axes, (title, value) in zip(panels, _PANELS.items(), strict=True):
        for kind, of in of_kind.items():
            known = [(p.world_size, y) for p in of if (y := value(p)) is not None]
            failed = [str(point.world_size) for point in of if point.failure is not None]
            label = kind_label(kind) + (f" (failed at {', '.join(failed)})" if failed else "")
            style = {**plot_style.line_style(kind, list(of_kind)), "label": label}
            axes.plot([x for x, _ in known], [y for _, y in known], **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(world_sizes, [str(n) for n in world_sizes])
        axes.minorticks_off()
        axes.set(xlabel="ranks (simulated)", ylabel=title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
