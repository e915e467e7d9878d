"""A folder of results, as tables and pictures ask for it.

Results of older versions lack fields, arms fail, and a folder may lack arms altogether. So every
figure is asked for by name and is ``None`` where there is none; :func:`unmeasured` and :func:`lost`
say which.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_MOST_NAMES = 6  # of arms in one sentence; report.md has all of them

Kind = tuple[str, int | None]
"""Engine and ZeRO stage."""
Shape = tuple[int, int]
"""Sequences per rank and micro-batch, and micro-batches per optimizer step."""
Line = tuple[list[float], list[float]]
"""Where its points are: along, and up."""


def sum_of(parts: Mapping[str, float | None] | None) -> float | None:
    """The sum of a figure's parts, if all of them are known."""
    known = [part for part in (parts or {}).values() if part is not None]
    return None if parts is None or len(known) < len(parts) else sum(known)


def slowest(step_s: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of each step, from every rank's: it lasts as long as on the slowest rank."""
    return [max(steps) for steps in zip(*step_s, strict=True)]


def step_rates(
    step_tokens: Sequence[Sequence[int]], step_s: Sequence[Sequence[float]]
) -> list[float]:
    """Tokens per second of all ranks together in each step, from every rank's tokens and time."""
    tokens = [sum(steps) for steps in zip(*step_tokens, strict=True)]
    return [num / seconds for num, seconds in zip(tokens, slowest(step_s), strict=True)]


@dataclass(frozen=True)
class ArmResult:
    """One arm.

    Attributes:
        row: Its medians.
        runs: Its repeats that measured something.
    """

    row: Mapping[str, Any]
    runs: Sequence[Mapping[str, Any]]

    @property
    def name(self) -> str:
        """As in the table."""
        return str(self.row["arm"])

    @property
    def kind(self) -> Kind:
        """What is compared."""
        return self.row["engine"], self.row["zero_stage"]

    @property
    def shape(self) -> Shape:
        """At which size."""
        return self.row["batch_size"], self.row["grad_accum"]

    @property
    def failure(self) -> str | None:
        """In a few words; the whole reason is in the row."""
        failure = self.row.get("failure")
        if failure is None:
            return None
        return self.row.get("failure_kind") or str(failure)

    def get(self, *path: str) -> Any:
        """A figure, or ``None``: not measured, or of an arm that failed.

        Args:
            path: Names, from the row inwards.
        """
        if self.failure is not None:
            return None
        found: Any = self.row
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
        return None if isinstance(found, float) and not math.isfinite(found) else found

    def total(self, *path: str) -> float | None:
        """The sum of a figure's parts, if all of them are known."""
        return sum_of(self.get(*path))

    def data_calls(self) -> Mapping[str, float] | None:
        """Collectives that move parameters and gradients, by kind; all, where nobody tells which.

        The core counts its own. Of another engine's they are the kinds that theory demands.
        """
        if (counted := self.get("data_collectives")) is not None:
            return dict(counted)
        calls: dict[str, float] | None = self.get("collectives")
        demanded = self.get("theory", "collectives")
        if calls is None or not demanded:
            return calls
        return {kind: n for kind, n in calls.items() if kind in demanded}

    def worst(self, name: str) -> float | None:
        """The largest of the figures per rank, if all ranks have one."""
        figures = self.get(name)
        return max(figures) if figures and None not in figures else None

    def first_rank(self, name: str) -> Any:
        """What rank 0 of the first repeat has under a name, or ``None``."""
        return self.runs[0]["ranks"][0].get(name) if self.runs else None


@dataclass(frozen=True)
class Results:
    """All arms of a folder.

    Attributes:
        document: All of ``results.json``.
    """

    document: Mapping[str, Any]

    @cached_property
    def arms(self) -> list[ArmResult]:
        """In the order of the table."""
        return [
            ArmResult(
                row,
                [
                    run
                    for run in self.document.get("runs", [])
                    if run["arm"] == row["arm"] and run.get("ranks")
                ],
            )
            for row in self.document["rows"]
        ]

    @property
    def kinds(self) -> list[Kind]:
        """In the order of the table."""
        return list(dict.fromkeys(arm.kind for arm in self.arms))

    @property
    def shapes(self) -> list[Shape]:
        """From small to large, by accumulation first."""
        return sorted({arm.shape for arm in self.arms}, key=lambda shape: shape[::-1])

    def at(self, kind: Kind, shape: Shape) -> ArmResult | None:
        """An arm, if the folder has it."""
        found = (arm for arm in self.arms if (arm.kind, arm.shape) == (kind, shape))
        return next(found, None)

    @property
    def num_ranks(self) -> int:
        """Of the arms that share the work."""
        given = self.document.get("workload", {}).get("num_ranks")
        return int(given or max((arm.row["num_processes"] for arm in self.arms), default=1))

    @property
    def precision(self) -> str:
        """Of the Trainer; empty where the results do not say."""
        return str(self.document.get("workload", {}).get("precision", ""))


def mean_utilization(arm: ArmResult) -> dict[str, float]:
    """Percent, by what was sampled (``gpu`` or ``cpu``)."""
    samples: dict[str, list[float]] = {}
    for rank in (rank for run in arm.runs for rank in run["ranks"]):
        found = [percent for _, percent in rank.get("utilization") or []]
        if found and arm.failure is None:
            samples.setdefault(rank.get("utilization_of") or "cpu", []).extend(found)
    return {device: statistics.fmean(found) for device, found in samples.items()}


def loss_curve(arm: ArmResult) -> Line | None:
    """Optimizer steps from 1, and the mean loss in each; of the first repeat."""
    if not arm.runs:
        return None
    _, accum = arm.shape
    ranks = [rank["losses"] for rank in arm.runs[0]["ranks"]]
    means = [
        # A loss that was no number is null in JSON, and a gap in the line.
        float("nan") if None in micro_batch else statistics.fmean(micro_batch)
        # Of ranks that have made different numbers of steps, those that all have made.
        for micro_batch in zip(*ranks, strict=False)
    ]
    steps = [statistics.fmean(means[i : i + accum]) for i in range(0, len(means), accum)]
    return list(map(float, range(1, len(steps) + 1))), steps


def kind_label(kind: Kind) -> str:
    """As in a legend."""
    engine, stage = kind
    return engine if stage is None else f"{engine} ZeRO-{stage}"


def unmeasured(
    results: Results, what: str, has: Callable[[ArmResult], bool], *, is_short: bool = True
) -> list[str]:
    """The sentence that says which arms ran but lack a figure; none if all have it.

    Args:
        results: Of the folder.
        what: The figure.
        has: Whether an arm has it.
        is_short: Name a few arms only.
    """
    ran = [arm for arm in results.arms if arm.failure is None]
    names = [arm.name for arm in ran if not has(arm)]
    if not names:
        return []
    whose = "any arm" if len(names) == len(ran) else _listed(names, is_short=is_short)
    return [f"{what}: not measured for {whose}."]


def lost(results: Results, *, is_short: bool = True) -> list[str]:
    """A sentence per reason for which arms have no figures at all: failed, or never there."""
    if not results.arms:
        return ["There are no arms in these results."]
    reasons: dict[str, list[str]] = {}
    for arm in results.arms:
        if arm.failure is not None:
            is_told = not is_short or len(arm.failure) <= 40
            reason = f"failed ({arm.failure})" if is_told else "failed"
            reasons.setdefault(reason, []).append(arm.name)
    absent = [
        f"{kind_label(kind)} at {shape_label(shape)}"
        for shape, kind in itertools.product(results.shapes, results.kinds)
        if results.at(kind, shape) is None
    ]
    if absent:
        reasons["not in these results"] = absent
    return [
        f"{reason[0].upper()}{reason[1:]}: {_listed(names, is_short=is_short)}."
        for reason, names in reasons.items()
    ]


def _listed(names: Sequence[str], *, is_short: bool) -> str:
    few = names[:_MOST_NAMES] if is_short else names
    more = f" and {len(names) - len(few)} more" if len(few) < len(names) else ""
    return f"{', '.join(few)}{more}"


def shape_label(shape: Shape) -> str:
    """Such as ``4 x 2``: sequences per micro-batch, micro-batches per step."""
    return f"{shape[0]} x {shape[1]}"
