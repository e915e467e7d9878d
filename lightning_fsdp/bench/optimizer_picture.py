"""Memory of each arm over time as a picture: a panel per engine, a line per arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_fsdp.bench.optimizer_outcome import ENGINES, Phase, engine_of

_MOST_POINTS = 300  # per phase
_DASHES = ("-", "--", "-.", ":")  # so that a print in grey can be read


def draw(phases_of: Mapping[str, Sequence[Phase]]) -> Any:
    """A matplotlib figure that belongs to no window.

    Arms issue different numbers of operations in a phase; each phase is as wide as the others, so
    that what is compared stands above each other.

    Args:
        phases_of: Of one rank, by arm.
    """
    from matplotlib.figure import Figure

    engines = [engine for engine in ENGINES if any(engine_of(arm) == engine for arm in phases_of)]
    figure = Figure(figsize=(9, 3.4 * len(engines)), layout="constrained")
    panels = figure.subplots(len(engines), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    for engine, axes in zip(engines, panels, strict=True):
        arms = [arm for arm in phases_of if engine_of(arm) == engine]
        names = [phase.name for phase in phases_of[arms[0]]]
        for index, arm in enumerate(arms):
            xs, ys = _line(phases_of[arm])
            # Arms that do the same lie on each other: the first are wide, the last are thin.
            axes.plot(
                xs, ys, label=arm.removeprefix(f"{engine}_"), alpha=0.8,
                linestyle=_DASHES[index % len(_DASHES)],
                linewidth=1.0 + 1.1 * (len(arms) - 1 - index), drawstyle="steps-post",
            )  # fmt: skip
        for index in range(0, len(names), 2):
            axes.axvspan(index, index + 1, color="black", alpha=0.04, linewidth=0)
        axes.set_xticks([i + 0.5 for i in range(len(names))], names)
        axes.set_xlim(0, len(names))
        axes.set_ylim(bottom=0)
        axes.tick_params(axis="x", length=0, labelbottom=True)
        axes.set(title=f"{engine}: bytes of tensors on rank 0", ylabel="MB")
        axes.legend(title="optimizer", fontsize=9, frameon=False, loc="center left",
                    bbox_to_anchor=(1.0, 0.5))  # fmt: skip
    return figure


def _line(phases: Sequence[Phase]) -> tuple[list[float], list[float]]:
    """Where and how high: of each stretch of operations its highest moment."""
    xs, ys = [], []
    for index, phase in enumerate(phases):
        live = phase.live_bytes
        width = max(1, -(-len(live) // _MOST_POINTS))
        for start in range(0, len(live), width):
            xs.append(index + start / len(live))
            ys.append(max(live[start : start + width]) / 1e6)
    return xs, ys
