"""Points of a scaling study as files: a table to read, CSV, JSON, a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fsdp.bench import documents, plot_style, scaling_picture
from lightning_fsdp.bench.arms import OF_UNFUSED, has_unfused_references
from lightning_fsdp.bench.records import listed
from lightning_fsdp.bench.scaling import Point
from lightning_fsdp.harness.environment import describe
from lightning_fsdp.harness.tables import number, table_of
from lightning_fsdp.simulate.network import Network

_NOTED_LATE_SHARE = 0.05  # of a step
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
    plot_style.save(scaling_picture.draw(points), out, "scaling", dpi=150)


def redraw_scaling(folder: Path) -> None:
    """Make the picture of a ``scaling.json`` again.

    Raises:
        ValueError: It cannot be read, or is damaged.
    """
    path, expected = folder / "scaling.json", "a scaling study"
    points = documents.read(_Study, path, expected=expected, remedy=_REMEDY).points
    if not points:
        raise ValueError(f"{path}: expected {expected}, got no points. {_REMEDY}")
    plot_style.save(scaling_picture.draw(points), folder, "scaling", dpi=150)


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
