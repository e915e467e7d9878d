"""A folder of results, as tables and pictures ask for it.

Results of older versions lack figures, arms fail, and a folder may lack arms altogether. What is
not there is ``None`` or empty; :func:`missing` says what.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Required

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from lightning_fsdp.bench import documents
from lightning_fsdp.bench.limits import Limits
from lightning_fsdp.bench.records import Kind, Row, Run, Shape, sum_of, worst

_with_others = with_config(ConfigDict(extra="allow"))  # names that a later version has
_MOST_NAMES = 6  # of arms in one sentence; report.md has all of them


@_with_others
class Versions(TypedDict):
    """Of what was used."""

    torch: str
    lightning: str


@_with_others
class Machine(TypedDict, total=False):
    """That computed."""

    processor: Required[str]
    cores: Required[int | None]
    gpus: list[str]


@_with_others
class WorkloadFacts(TypedDict, total=False):
    """What every arm did; see :class:`~lightning_fsdp.bench.arms.Workload`."""

    num_ranks: int | None
    precision: str
    warmup_steps: int


@dataclass(kw_only=True)
class Results:
    """All of ``results.json``: every repeat, what it was made with, and a row per arm."""

    command: str
    date: str
    commit: str | None = None
    interrupted: str | None = None
    versions: Versions
    machine: Machine
    workload: WorkloadFacts = field(default_factory=WorkloadFacts)
    config: dict[str, Any] | None = None
    limits: Limits | None = None
    peak_flops_from: str | None = None
    rows: list[Row]
    runs: list[Run] = field(default_factory=list)

    @cached_property
    def arms(self) -> list[Row]:
        """The rows with their runs; of arms that failed, without what was measured."""
        for row in self.rows:
            row.runs = [run for run in self.runs if run.ranks and run.arm == row.arm]
        return [row if row.failure is None else _without_figures(row) for row in self.rows]

    @property
    def kinds(self) -> list[Kind]:
        """In the order of the table."""
        return list(dict.fromkeys(row.kind for row in self.rows))

    @property
    def shapes(self) -> list[Shape]:
        """From small to large, by accumulation first."""
        return sorted({row.shape for row in self.rows}, key=lambda shape: shape[::-1])

    def at(self, kind: Kind, shape: Shape) -> Row:
        """An arm; one that the folder lacks has no name and no figures."""
        found = (arm for arm in self.arms if (arm.kind, arm.shape) == (kind, shape))
        return next(found, Row("", *kind, *shape, num_processes=1))

    @property
    def num_ranks(self) -> int:
        """Of the arms that share the work."""
        most = max((row.num_processes for row in self.rows), default=1)
        return self.workload.get("num_ranks") or most


def _without_figures(row: Row) -> Row:
    """A failure without a kind, as of older versions, is an error."""
    kept = {name: getattr(row, name) for name in ("num_processes", "failure", "runs")}
    failure_kind = row.failure_kind or "error"
    return Row(row.arm, *row.kind, *row.shape, **kept, failure_kind=failure_kind)


def read(out: Path) -> Results:
    """The results in a folder.

    Raises:
        ValueError: They cannot be read, or are damaged.
    """
    return documents.read(
        Results,
        out / "results.json",
        expected="the results of `python -m lightning_fsdp.bench`",
        remedy="Measure again, or name another folder.",
        failures="those of `make bench-optimizer`: its picture is memory.png. Name another.",
    )


def kind_label(kind: Kind) -> str:
    """As in a legend."""
    engine, stage = kind
    return engine if stage is None else f"{engine} ZeRO-{stage}"


MEMORY: dict[str, Callable[[Row], float | None]] = {
    "Peak of tensors": lambda arm: worst(arm.peak_bytes),
    "Tensors between steps": lambda arm: worst(arm.resting_bytes),
    "Peak of the process (RSS)": lambda arm: worst(arm.peak_rss_bytes),
    "CUDA peak, allocated": lambda arm: worst(arm.cuda_peak_allocated_bytes),
    "CUDA peak, reserved": lambda arm: worst(arm.cuda_peak_reserved_bytes),
}
"""Memory of the rank that takes most, in bytes."""
FIGURES: dict[str, Callable[[Row], object]] = {
    **MEMORY,
    "Mean of tensors": lambda arm: worst(arm.mean_bytes),
    "Memory by owner": lambda arm: arm.peak_by_kind,
    "Memory over time": lambda arm: arm.timeline,
    "Tokens/s": lambda arm: arm.tokens_per_s,
    "Losses": lambda arm: arm.step_losses,
    "Parts of a step": lambda arm: arm.parts_ms,
    "Exposed communication": lambda arm: arm.part_ms("exposed"),
    "Utilization": lambda arm: arm.utilization,
    "Host time": lambda arm: arm.host_ms,
    "End-to-end time": lambda arm: arm.end_to_end_s,
    "MFU": lambda arm: arm.mfu,
    "Limit of compute": lambda arm: arm.compute_limit_ms,
    "Limit of communication": lambda arm: arm.communication_limit_ms,
    "Calls": lambda arm: sum_of(arm.collectives),
    "Calls demanded by theory": lambda arm: sum_of(arm.demanded.collectives),
    "Bytes sent": lambda arm: arm.sent_bytes,
}
"""All that an arm may lack, by name; ``None`` or empty where it does."""


def missing(
    results: Results, names: Iterable[str] = FIGURES, *, is_short: bool = True
) -> list[str]:
    """Sentences about what is not there; none if all of it is.

    Args:
        results: Of the folder.
        names: Of :data:`FIGURES`.
        is_short: Name a few arms only.
    """
    if not results.arms:
        return ["There are no arms in these results."]
    ran = [arm for arm in results.arms if arm.failure is None]
    sentences = []
    for name in names:
        lacking = [arm.arm for arm in ran if FIGURES[name](arm) in (None, {}, [])]
        whose = "any arm" if len(lacking) == len(ran) else _listed(lacking, is_short=is_short)
        if lacking:
            sentences.append(f"{name}: not measured for {whose}.")
    reasons = defaultdict[str, list[str]](list)
    for arm in results.arms:
        if arm.failure is not None:
            reasons[f"Failed ({arm.failure_kind})"].append(arm.arm)
    for shape, kind in itertools.product(results.shapes, results.kinds):
        if not results.at(kind, shape).arm:
            place = f"{kind_label(kind)} at {shape_label(shape)}"
            reasons["Not in these results"].append(place)
    if results.interrupted is not None:
        sentences.append(f"Interrupted: {results.interrupted.partition(';')[0]}.")
    told = (f"{reason}: {_listed(of, is_short=is_short)}." for reason, of in reasons.items())
    return [*sentences, *told]


def _listed(names: Sequence[str], *, is_short: bool) -> str:
    few = names[:_MOST_NAMES] if is_short else names
    more = f" and {len(names) - len(few)} more" if len(few) < len(names) else ""
    return f"{', '.join(few)}{more}"


def shape_label(shape: Shape) -> str:
    """Such as ``4 x 2``: sequences per micro-batch, micro-batches per step."""
    return f"{shape[0]} x {shape[1]}"
