"""What a benchmark leaves behind: first the results, then all that can be made of them again.

DIR/results.json         every repeat and the configuration; the source of the rest
DIR/comparison.csv       a line per arm
DIR/report.md            table, limits, failures, what is missing
DIR/plots/               pictures as PNG and SVG
DIR/tensorboard/         a run per arm, and one with the pictures
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_fsdp.bench import plots, tensorboard
from lightning_fsdp.bench.reading import read
from lightning_fsdp.bench.report import Row
from lightning_fsdp.bench.report_page import page
from lightning_fsdp.bench.results import Results
from lightning_fsdp.bench.runner import Run
from lightning_fsdp.bench.scaling_report import redraw_scaling

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
    if not sources:
        found = "only largest_batch.json, of which there is no picture" if has_largest else "none"
        wanted = " or ".join(redrawn)
        wrong = f"{folder}: expected {wanted} of the benchmark, got {found}. Name another folder."
        print(f"error: {wrong}", file=sys.stderr)
        return 1
    code = 0
    for name in sources:
        make, made = redrawn[name]
        try:
            make(folder)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            code = 1
        else:
            print(f"Written to {folder}/ from {name}: {made}")
    if has_largest:
        print("Nothing is made of largest_batch.json; its table is largest_batch.md.")
    return code


def write(out: Path, rows: Sequence[Row], runs: Sequence[Run], document: dict[str, Any]) -> None:
    """Write everything.

    Args:
        out: The folder.
        rows: One per arm, failed ones included.
        runs: All repeats.
        document: Command, workload, environment.
    """
    out.mkdir(parents=True, exist_ok=True)
    results = {
        **document,
        "rows": [asdict(row) for row in rows],
        "runs": [
            {
                **{
                    k: v for k, v in vars(run).items() if k not in ("arm", "log", "ranks", "config")
                },
                "arm": run.arm.name,
                "ranks": [vars(rank) for rank in run.ranks],
            }
            for run in runs
        ],
    }
    text = json.dumps(_without_nan(results), indent=1, allow_nan=False)
    (out / "results.json").write_text(text)
    derive(out)


def derive(out: Path) -> None:
    """Make everything else of the folder's ``results.json``.

    Raises:
        ValueError: There are no results in it, or they are damaged.
    """
    results = read(out)
    _write_csv(out / "comparison.csv", results)
    (out / "report.md").write_text(page(results))
    figures = plots.draw(results)
    plots.save(figures, out / "plots")
    tensorboard.write_runs(out / "tensorboard", results, figures)


def _write_csv(path: Path, results: Results) -> None:
    columns = list(dict.fromkeys(name for arm in results.arms for name in arm.row))
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, restval="")
        writer.writeheader()
        for arm in results.arms:
            writer.writerow({name: _csv_cell(value) for name, value in arm.row.items()})


def _csv_cell(value: Any) -> Any:
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, (list, tuple)):
        return " ".join("" if v is None else str(v) for v in value)
    return value


def _without_nan(value: Any) -> Any:
    """JSON has no NaN; a loss that is none is null, and its row says why it failed."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(each) for each in value]
    return value
