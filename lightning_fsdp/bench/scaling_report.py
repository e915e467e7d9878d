"""Points of a scaling study as files: a table to read, CSV, JSON, a picture."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from lightning_fsdp.bench import scaling_picture
from lightning_fsdp.bench.arms import OF_UNFUSED, has_unfused_references
from lightning_fsdp.bench.scaling import Point
from lightning_fsdp.bench.schema import Schema, find_misfit, schema_of
from lightning_fsdp.harness.environment import describe
from lightning_fsdp.harness.tables import markdown_table
from lightning_fsdp.simulate.network import Network

_NOTED_LATE_SHARE = 0.05  # of a step
_Point: Any = schema_of(
    Point, needed=("arm", "engine", "zero_stage", "batch_size", "grad_accum", "world_size")
)


class _Study(Schema):
    points: list[_Point]


def write_scaling(
    out: Path, points: Sequence[Point], largest: Network, document: dict[str, Any]
) -> None:
    """Write ``scaling.csv``, ``scaling.json``, ``scaling.md`` and the picture, in two forms."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "scaling.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(asdict(points[0])))
        writer.writeheader()
        for point in points:
            calls = None if point.calls is None else json.dumps(point.calls)
            writer.writerow({**asdict(point), "calls": calls})
    assumptions = largest.assumptions(document["workload"]["accelerator"])
    results = {
        **document,
        "network": asdict(largest),
        "assumptions": assumptions,
        "points": [asdict(point) for point in points],
    }
    (out / "scaling.json").write_text(json.dumps(results, indent=1))
    sections = [
        describe(document),
        format_points(points),
        *([OF_UNFUSED] if has_unfused_references(document["workload"]["precision"]) else []),
        "Simulated; this is assumed:",
        "\n".join(f"* {assumption}" for assumption in assumptions),
    ]
    (out / "scaling.md").write_text("\n\n".join(sections) + "\n")
    _draw(out, points)


def redraw_scaling(folder: Path) -> None:
    """Make the picture of a ``scaling.json`` again.

    Raises:
        ValueError: It cannot be read, or is damaged.
    """
    path = folder / "scaling.json"
    try:
        text = path.read_text()
        document = json.loads(text)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: expected JSON, got: {error}. Simulate again, or name another folder."
        ) from error
    wrong = find_misfit(text, _Study)
    if wrong is None and not document["points"]:
        wrong = "no points"
    if wrong is not None:
        raise ValueError(
            f"{path}: expected a scaling study, got {wrong}. Simulate again, or name another "
            f"folder."
        )
    names = {field.name for field in fields(Point)}
    points = [
        Point(**{name: value for name, value in point.items() if name in names})
        for point in document["points"]
    ]
    _draw(folder, points)


def _draw(folder: Path, points: Sequence[Point]) -> None:
    figure = scaling_picture.draw(points)
    for ending in ("png", "svg"):
        figure.savefig(folder / f"scaling.{ending}", dpi=150)


def format_points(points: Sequence[Point]) -> str:
    """The table that a person reads, in Markdown."""
    head = [
        "arm", "ranks", "tokens/s per rank", "efficiency", "step ms", "exposed ms", "on network ms",
        "collectives per step", "MB sent per step",
    ]  # fmt: skip
    return markdown_table(head, [_cells(point) for point in points])


def _cells(point: Point) -> list[str]:
    first = [point.arm, str(point.world_size)]
    if point.step_ms is None:
        return [*first, "FAILED", *[""] * 6]
    is_late = (point.late_ms or 0) > _NOTED_LATE_SHARE * point.step_ms
    calls = ", ".join(f"{n:g} {kind}" for kind, n in (point.calls or {}).items())
    return [
        *first,
        f"{point.tokens_per_s_per_rank:,.0f}",
        "?" if point.efficiency is None else f"{point.efficiency:.0%}",
        f"{point.step_ms:.0f}" + (" (bound by this machine)" if is_late else ""),
        "?" if point.exposed_ms is None else f"{point.exposed_ms:.1f}",
        "?" if point.busy_ms is None else f"{point.busy_ms:.1f}",
        calls or "none",
        f"{(point.sent_bytes or 0) / 1e6:.1f}",
    ]
