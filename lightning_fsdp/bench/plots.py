"""All pictures of a folder of results, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from lightning_fsdp.bench import plot_style, plots_by_arm, plots_of_lines
from lightning_fsdp.bench.results import Results

PICTURES: dict[str, Callable[[Results], Figure]] = {
    "tokens_per_s": plots_of_lines.tokens_per_s,
    "memory": plots_of_lines.memory,
    "communication": plots_by_arm.communication,
    "utilization": plots_by_arm.utilization,
    "time_breakdown": plots_by_arm.time_breakdown,
    "memory_at_peak": plots_by_arm.memory_at_peak,
    "memory_over_time": plots_of_lines.memory_over_time,
    "losses": plots_of_lines.losses,
}


def draw(results: Results) -> dict[str, Figure]:
    """Every picture, whatever the results lack; each says what that is."""
    return {name: picture(results) for name, picture in PICTURES.items()}


def save(figures: dict[str, Figure], folder: Path) -> None:
    """Write ``NAME.png`` and ``NAME.svg`` of each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        plot_style.save(figure, folder, name)
