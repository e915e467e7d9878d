"""How pictures look: one style per engine and stage everywhere, readable in grey.

Engines differ in colour, brightness and marker, stages in dashes, parts of a bar in hatches. What a
picture lacks stands below it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from lightning_fsdp.bench.records import Kind
from lightning_fsdp.bench.results import Results, kind_label, missing

_ENGINES = {  # from dark to light: colour, marker
    "single": ("#000000", "x"),
    "scratch": ("#1f3b73", "o"),
    "fsdp1": ("#b5403f", "s"),
    "fsdp2": ("#6fae75", "^"),
    "ddp": ("#a9a9a9", "D"),
}
_STAGES = {2: (0, (4, 2)), 3: "-", None: (0, (1, 1.5))}
_OTHER = ("#7b4f9d", "v")  # of whatever name

PARTS = {  # of a stacked bar: colour, hatch
    "data": ("#d9d9d9", "..."),
    "compute": ("#1f3b73", ""),
    "exposed": ("#b5403f", "///"),
    "optimizer": ("#6fae75", "xx"),
    "other": ("#ecd9a0", ""),
}
HATCHES = ("", "///", "...", "xx", "\\\\\\", "++", "oo", "--")
SMALL = 8
"""Points, of what is read last."""


def line_style(kind: Kind) -> dict[str, Any]:
    """Colour, marker and dashes of an engine at a stage."""
    engine, stage = kind
    color, marker = _ENGINES.get(engine, _OTHER)
    # Stage 2 is hollow, so that the stages differ even where there is no line.
    face = "white" if stage == 2 and marker != "x" else color
    return {
        "color": color, "marker": marker, "markersize": 5, "markerfacecolor": face,
        "linestyle": _STAGES.get(stage, "-"), "label": kind_label(kind),
    }  # fmt: skip


def byte_unit(figures: Iterable[float | None]) -> tuple[float, str]:
    """What to divide bytes by, and its name; MB as in the table, GB for large ones."""
    largest = max((figure for figure in figures if figure is not None), default=0.0)
    return (1e9, "GB") if largest >= 1e10 else (1e6, "MB")


def in_unit(figure: float | None, unit: float) -> float | None:
    """A figure in a unit, if it is known."""
    return None if figure is None else figure / unit


def new_figure(
    title: str, size: tuple[float, float], shape: tuple[int, int], grid: str = "both", **shared: Any
) -> tuple[Figure, Any]:
    """A figure that belongs to no window, whoever gets it need not close it; and its panels.

    Args:
        title: Above all.
        size: In inches.
        shape: Rows and columns of panels.
        grid: Of which axis there are fine lines behind what is drawn: ``x``, ``y``, ``both``;
            or none.
        **shared: Of ``subplots``.
    """
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    panels = figure.subplots(*shape, squeeze=False, **shared)
    for axes in panels.flat if grid else ():
        axes.grid(axis=grid, color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, panels


def label_inches(results: Results) -> float:
    """Room for the names of all engines and stages."""
    return 0.8 + 0.085 * max((len(kind_label(kind)) for kind in results.kinds), default=0)


def say(axes: Any, words: str, **options: Any) -> None:
    """In place of what would be drawn."""
    axes.text(0.5, 0.5, words, ha="center", va="center", transform=axes.transAxes, **options)


def legend(figure: Figure, axes: Iterable[Any], **options: Any) -> None:
    """One entry per label of all the axes, beside them."""
    entries: dict[str, Any] = {}
    for each in axes:
        handles, labels = each.get_legend_handles_labels()
        entries |= zip(labels, handles, strict=True)
    look = {"loc": "outside right upper", "fontsize": SMALL + 1, "handlelength": 3.2, **options}
    if entries:
        figure.legend(list(entries.values()), list(entries), frameon=False, **look)


def finish(
    figure: Figure, results: Results, names: Iterable[str], *, note: str = "", named: Any = ()
) -> Figure:
    """What stands below a picture and beside it.

    Args:
        figure: With all that is drawn.
        results: Of the folder.
        names: Of what it shows; see :func:`~lightning_fsdp.bench.results.missing`.
        note: Before what is missing.
        named: Axes with a legend.
    """
    footnote(figure, [note, *missing(results, names)])
    legend(figure, named)
    return figure


def footnote(figure: Figure, sentences: Sequence[str]) -> None:
    """Below the picture, in as many lines as it takes."""
    width = int(figure.get_figwidth() * 15)
    lines = [line for sentence in sentences for line in textwrap.wrap(sentence, width)]
    if lines:
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=SMALL)


def save(figure: Figure, folder: Path, name: str, *, dpi: int = 120) -> None:
    """As PNG and SVG; the same figures give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(folder / f"{name}.png", dpi=dpi)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
