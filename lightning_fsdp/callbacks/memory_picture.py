"""The memory of one optimizer step as a picture: bytes by owner, operation by operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

COLORS = {  # from dark to light, so that a print in grey can be read
    "parameters": "#1f3b73",
    "gradients": "#b5403f",
    "optimizer": "#6fae75",
    "activations": "#ecd9a0",
}
_NARROW = 0.08  # of the width: a phase whose name would not fit
_MOST_POINTS = 1000


def draw(
    moments: Sequence[Mapping[str, int]],
    phases: Sequence[tuple[str, int, int]],
    peaks: Sequence[int],
    title: str,
) -> Any:
    """A matplotlib figure that belongs to no window; whoever gets it need not close it.

    Args:
        moments: Bytes by owner after each operation.
        phases: Name, first and last index into ``moments``.
        peaks: Bytes, of each rank.
        title: Above the picture.
    """
    from matplotlib.figure import Figure

    totals = [(i, sum(of_owners.values())) for i, of_owners in enumerate(moments)]
    xs = [i for i, _ in thinned(totals, _MOST_POINTS)]
    unit, name = _unit(max(peaks))
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.stackplot(
        xs,
        [[moments[x][owner] / unit for x in xs] for owner in COLORS],
        labels=list(COLORS),
        colors=list(COLORS.values()),
        step="post",
        linewidth=0,
    )
    for rank, peak in enumerate(peaks):
        axes.axhline(
            peak / unit,
            color="black",
            linestyle=(0, (4, 2 + rank % 8)),
            linewidth=0.8,
            label=f"peak of rank {rank}: {peak / unit:.3g} {name}" if rank < 8 else None,
        )
    axes.set_ylim(0, max(peaks) / unit * 1.12)
    axes.set_xlim(0, len(moments) - 1)
    for index, (phase, start, stop) in enumerate(phases):
        axes.axvspan(start, stop, color="black", alpha=0.05 if index % 2 else 0.0, linewidth=0)
        is_narrow = stop - start < _NARROW * len(moments)
        axes.text(
            (start + stop) / 2,
            max(peaks) / unit * (0.97 if is_narrow else 1.05),
            phase,
            ha="center",
            va="top" if is_narrow else "bottom",
            rotation=90 if is_narrow else 0,
            fontsize=9,
        )
    axes.set(title=title, xlabel="operation", ylabel=name)
    figure.legend(loc="outside right upper", fontsize=9, frameon=False)
    return figure


def thinned(line: Sequence[tuple[T, int]], most: int) -> list[tuple[T, int]]:
    """Of each stretch of points its highest, so that the highest of all stays.

    Args:
        line: Where, bytes; in order.
        most: Points that are left at most.
    """
    width = max(1, -(-len(line) // most))
    return [
        max(line[start : start + width], key=lambda point: point[1])
        for start in range(0, len(line), width)
    ]


def _unit(nbytes: int) -> tuple[int, str]:
    for power, name in ((30, "GiB"), (20, "MiB")):
        if nbytes >= 2**power:
            return 2**power, name
    return 2**10, "KiB"
