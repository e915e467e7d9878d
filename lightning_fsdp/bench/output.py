"""What a benchmark leaves behind: first the results, then all that can be made of them again.

DIR/results.json         every repeat and the configuration; the source of the rest
DIR/comparison.csv       a line per arm
DIR/report.md            table, limits, failures, what is missing
DIR/plots/               pictures as PNG and SVG
DIR/tensorboard/         a run per arm, and one with the pictures
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from lightning_fsdp.bench import documents, plot_style, plots_by_arm, plots_of_lines, tensorboard
from lightning_fsdp.bench.report_page import page
from lightning_fsdp.bench.results import Results, read
from lightning_fsdp.bench.scaling import redraw_scaling
from lightning_fsdp.harness.command_line import end

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
WRITTEN = (
    "report.md, comparison.csv, results.json (every repeat), plots/, tensorboard/, "
    "runs/ (a log per run)"
)


def redraw(folder: Path) -> int:
    """Make all again that can be made of a folder's results, and tell what.

    Args:
        folder: The ``--out`` of a benchmark.

    Returns:
        Exit code: 0 if all that the folder holds was made again.
    """
    redrawn = {
        "results.json": (derive, "report.md, comparison.csv, plots/, tensorboard/"),
        "scaling.json": (redraw_scaling, "scaling.png, .svg"),
    }
    sources = [name for name in redrawn if (folder / name).exists()]
    has_largest = (folder / "largest_batch.json").exists()
    errors = []
    for name in sources:
        make, made = redrawn[name]
        try:
            make(folder)
            print(f"Written to {folder}/ from {name}: {made}")
        except ValueError as error:
            errors.append(str(error))
    if not sources:
        found = "only largest_batch.json, of which there is no picture" if has_largest else "none"
        wanted = f"{' or '.join(redrawn)} of the benchmark"
        errors.append(f"{folder}: expected {wanted}, got {found}. Name another folder.")
    elif has_largest:
        print("Nothing is made of largest_batch.json; its table is largest_batch.md.")
    return end(None, errors)


def write(out: Path, results: Results) -> None:
    """Write everything."""
    documents.write(out / "results.json", results, indent=1)
    derive(out)


def derive(out: Path) -> None:
    """Make everything else of the folder's ``results.json``.

    Raises:
        ValueError: There are no results in it, or they are damaged.
    """
    results = read(out)
    documents.write_csv(out / "comparison.csv", results.rows)
    (out / "report.md").write_text(page(results, PICTURES))
    figures = draw(results)
    for name, figure in figures.items():
        plot_style.save(figure, out / "plots", name)
    tensorboard.write_runs(out / "tensorboard", results, figures)


def draw(results: Results) -> dict[str, Figure]:
    """Every picture, whatever the results lack; each says what that is."""
    return {name: picture(results) for name, picture in PICTURES.items()}
