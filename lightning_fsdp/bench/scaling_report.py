"""Points of a scaling study as files: a table to read, CSV, JSON, and curves as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lightning_fsdp.bench import documents, plot_style
from lightning_fsdp.bench.arms import OF_UNFUSED, has_unfused_references
from lightning_fsdp.bench.records import Kind, listed
from lightning_fsdp.bench.results import kind_label
from lightning_fsdp.bench.scaling import Point
from lightning_fsdp.harness.environment import describe
from lightning_fsdp.harness.tables import number, table_of
from lightning_fsdp.simulate.network import Network

_NOTED_LATE_SHARE = 0.05  # of a step
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
_REMEDY = "Simulate again, or name another folder."


@dataclass
class _Study:
    points: list[Point]


def write_scaling(
    out: Path, points: Sequence[Point], largest: Network, document: dict[str, Any]
) -> None:
    """Write ``scaling.csv``, ``scaling.json``, ``scaling.md`` and the picture, in two forms."""
    out.mkdir(parents=True, exist_ok=True)
    documents.write_csv(out / "scaling.csv", points)
    assumptions = largest.assumptions(document["workload"]["accelerator"])
    found = {"network": largest, "assumptions": assumptions, "points": points}
    documents.write(out / "scaling.json", {**document, **found}, indent=1)
    sections = [
        describe(document),
        format_points(points),
        *([OF_UNFUSED] if has_unfused_references(document["workload"]["precision"]) else []),
        "Simulated; this is assumed:",
        "\n".join(f"* {assumption}" for assumption in assumptions),
    ]
    (out / "scaling.md").write_text("\n\n".join(sections) + "\n")
    plot_style.save(draw(points), out, "scaling", dpi=150)


def redraw_scaling(folder: Path) -> None:
    """Make the picture of a ``scaling.json`` again.

    Raises:
        ValueError: It cannot be read, or is damaged.
    """
    path, expected = folder / "scaling.json", "a scaling study"
    points = documents.read(_Study, path, expected=expected, remedy=_REMEDY).points
    if not points:
        raise ValueError(f"{path}: expected {expected}, got no points. {_REMEDY}")
    plot_style.save(draw(points), folder, "scaling", dpi=150)


def format_points(points: Sequence[Point]) -> str:
    """The table that a person reads, in Markdown."""
    columns: dict[str, Callable[[Point], str]] = {
        "arm": lambda point: point.arm,
        "ranks": lambda point: str(point.world_size),
        "tokens/s per rank": lambda point: number(point.tokens_per_s_per_rank, ",.0f"),
        "efficiency": lambda point: number(point.efficiency, ".0%"),
        "step ms": _step,
        "exposed ms": lambda point: number(point.exposed_ms, ".1f"),
        "on network ms": lambda point: number(point.busy_ms, ".1f"),
        "collectives per step": lambda point: listed(point.calls or {}),
        "MB sent per step": lambda point: number(point.sent_bytes or 0, ".1f", unit=1e6),
    }
    return table_of(points, columns, has_failed=lambda point: point.step_ms is None, num_names=2)


def _step(point: Point) -> str:
    is_late = (point.late_ms or 0.0) > _NOTED_LATE_SHARE * (point.step_ms or 0.0)
    return number(point.step_ms, ".0f") + (" (bound by this machine)" if is_late else "")


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
