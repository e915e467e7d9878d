"""What is measured, as it is written down: by a rank, of a run, of an arm over all its runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from pydantic_core import PydanticCustomError

from lightning_fsdp.bench.documents import Count, Figure, Listed, Loss, PerStep, Steps
from lightning_fsdp.bench.parts import Parts
from lightning_fsdp.bench.theory import Demand, UnitFacts
from lightning_fsdp.simulate.transfer import StepUsage

T = TypeVar("T", int, float)
R = TypeVar("R")
Kind = tuple[str, int | None]
"""Engine and ZeRO stage."""
Shape = tuple[int, int]
"""Sequences per rank and micro-batch, and micro-batches per optimizer step."""
FailureKind = Literal[
    "out of memory", "error", "timed out", "no measurement", "wrong losses", "wrong gradients"
]
"""Why a run gave nothing."""
PER_RANK = (
    *("peak_bytes", "mean_bytes", "resting_bytes", "peak_rss_bytes"),
    *("cuda_peak_allocated_bytes", "cuda_peak_reserved_bytes"),
)
"""What a rank measures of memory, and a row has of all ranks."""


@dataclass(kw_only=True)
class Observed:
    """What a rank finds out of an optimizer step, and a row has of rank 0.

    Attributes:
        grad_norm: Of the first step's gradients before they are clipped; ``None`` without warm-up.
        utilization_of: ``gpu``, or ``cpu``: CPU seconds of this process per second.
        peak_by_kind: Bytes by owner, when there are most of them; ``None`` where something is
            compiled.
        flops_per_token: Of forward and backward; what is recomputed counts once.
        collectives: Calls per observed optimizer step, by kind, as torch's dispatcher sees them.
        collective_bytes: Bytes that the rank passed to them, by kind.
        payload_bytes: Of all kinds together; engines that hand over more may send less.
        data_collectives: Calls that move parameters or gradients, a set of pairs as the one
            collective that it stands for; only of this project's core.
        comm: How data moves: ``direct`` (ranks read each other's memory), ``pairs``, or by the
            collectives of a backend, by its name; ``None``: one rank.
    """

    grad_norm: Figure = None
    utilization_of: str | None = None
    peak_by_kind: dict[str, int] | None = None
    flops_per_token: Figure = None
    collectives: dict[str, PerStep] | None = None
    collective_bytes: dict[str, PerStep] | None = None
    payload_bytes: PerStep | None = None
    data_collectives: dict[str, PerStep] | None = None
    comm: str | None = None

    def take_over(self, seen: Observed) -> None:
        """Of another rank or row, all of this."""
        for of in fields(Observed):
            setattr(self, of.name, getattr(seen, of.name))


@dataclass
class RankMeasurement(Observed):
    """What one rank measured of a run.

    Attributes:
        losses: Training loss of every micro-batch, from the first on.
        step_s: Seconds per timed optimizer step, data loading and logging included.
        step_tokens: Tokens of this rank per timed optimizer step; padding is not counted.
        host_s: Seconds of CPU that this process used per timed optimizer step.
        fit_s: From the moment before the model is built to the end of the timed steps.
        resting_bytes: Parameters, gradients, buffers and optimizer state between two steps.
        peak_bytes: Most bytes of tensors alive at once on the device, resting ones included.
            ``None``, as the next three, where something is compiled: watched, it runs uncompiled.
        mean_bytes: Bytes of tensors over an observed step, each for as long as it was alive.
        timeline: Seconds since the start of an observed step, bytes alive.
        peak_rss_bytes: Most bytes that the process had in memory, from its start to the end of the
            timed steps.
        cuda_peak_allocated_bytes: Over the timed steps, by torch's allocator.
        cuda_peak_reserved_bytes: What that took from the device.
        utilization: Seconds since the first timed step's start, percent.
        parts: Of each profiled optimizer step.
        units: Of the module; ``None`` where an engine has sharded it.
        simulated: On a simulated network, what a timed step took of it. The collectives above are
            real ones only.
    """

    rank: int
    world_size: int
    losses: list[Loss]
    step_s: Steps
    step_tokens: list[int]
    host_s: Listed[float] = field(default_factory=list)
    fit_s: float | None = None
    resting_bytes: int | None = None
    peak_bytes: int | None = None
    mean_bytes: PerStep | None = None
    timeline: list[tuple[float, int]] | None = None
    peak_rss_bytes: int | None = None
    cuda_peak_allocated_bytes: int | None = None
    cuda_peak_reserved_bytes: int | None = None
    utilization: list[tuple[float, float]] | None = None
    parts: list[Parts] = field(default_factory=list)
    units: list[UnitFacts] | None = None
    simulated: StepUsage | None = None


@dataclass
class Run:
    """One run of one arm.

    Attributes:
        arm: Its name.
        wall_s: From start to end of the processes.
        log: File with everything that the processes printed.
        ranks: What each rank measured; empty if the run failed.
        failure: Why there is nothing to show, or ``None``.
        failure_kind: By the type of what a rank raised; ``None`` without a failure.
        config: All options of the recipe, given or not; ``None`` where it did not come to them.
    """

    arm: str
    repeat: int = 0
    wall_s: float = 0.0
    log: Annotated[Path | None, Field(exclude=True)] = None
    ranks: list[RankMeasurement] = field(default_factory=list)
    failure: str | None = None
    failure_kind: FailureKind | None = None
    config: Annotated[dict[str, Any] | None, Field(exclude=True)] = None

    def __post_init__(self) -> None:
        lengths = [len(steps) for rank in self.ranks for steps in (rank.step_s, rank.step_tokens)]
        if len(set(lengths)) > 1:
            says = f"step_s and step_tokens of all ranks are equally many, got {lengths}"
            raise PydanticCustomError("missing", says)

    @property
    def slowest_s(self) -> list[float]:
        """Seconds of each step: it lasts as long as on the slowest rank."""
        return [max(steps) for steps in zip(*(rank.step_s for rank in self.ranks), strict=True)]

    @property
    def rates(self) -> list[float]:
        """Tokens per second of all ranks together in each step."""
        tokens = zip(*(rank.step_tokens for rank in self.ranks), strict=True)
        return [sum(n) / second for n, second in zip(tokens, self.slowest_s, strict=True)]

    @property
    def mean_losses(self) -> list[float]:
        """Over the ranks; where they have made different numbers of steps, those that all made."""
        return [fmean(losses) for losses in zip(*(r.losses for r in self.ranks), strict=False)]

    @property
    def peak_bytes(self) -> int | None:
        """Of the rank that takes most; ``None`` if any of them was not measured."""
        return worst([rank.peak_bytes for rank in self.ranks])


@dataclass
class OfArm:
    """A line of a table: an arm.

    Attributes:
        arm: Its name.
        batch_size: Sequences per rank and micro-batch.
        grad_accum: Micro-batches per optimizer step.
    """

    arm: str
    engine: str
    zero_stage: int | None
    batch_size: Count
    grad_accum: Count

    @property
    def kind(self) -> Kind:
        """What is compared."""
        return self.engine, self.zero_stage

    @property
    def shape(self) -> Shape:
        """At which size."""
        return self.batch_size, self.grad_accum


@dataclass
class Row(Observed, OfArm):
    """One arm over all its repeats. Times are medians; bytes are exact, the most of the repeats.

    Attributes:
        loss_first: Mean over ranks of the first micro-batch's loss.
        loss_last: Likewise of the last one's.
        loss_gap: Largest difference of a mean loss from that of the reference arm.
        tokens_per_s: Median of the steps, of all ranks together.
        step_ms: Median seconds of an optimizer step, in milliseconds.
        step_ms_q1: First quartile.
        step_ms_q3: Third quartile.
        peak_bytes: Per rank.
        mean_bytes: Per rank, over a step.
        resting_bytes: Per rank, between two optimizer steps.
        sent_bytes: Bytes that have to leave rank 0 for them; what tables and pictures show.
        theory: What the stage and the engine demand; ``None``: nobody says.
        parts_ms: Medians of rank 0's profiled steps, in milliseconds; ``None`` in it: not
            measurable.
        host_ms: Median CPU time of rank 0's process per step.
        peak_flops: Assumed of one process, per second.
        mfu: ``flops_per_token * tokens_per_s / (peak_flops * num_processes)``.
        peak_rss_bytes: Per rank, of the process.
        cuda_peak_allocated_bytes: Likewise, of torch's allocator.
        cuda_peak_reserved_bytes: Likewise, what that took from the device.
        utilization_percent: Mean of all samples of all ranks.
        end_to_end_s: Median seconds from building the model to the end of the timed steps.
        compute_limit_ms: The single process's step, divided by the ranks.
        communication_limit_ms: Bytes over measured bandwidth.
        times_limit: The step over the larger of the two limits, if both are known: 1 cannot be
            beaten.
        failure: Why the other fields are empty, or wrong.
        failure_kind: In a word; see :data:`FailureKind`.
        runs: Its repeats that measured something; not written with it.
    """

    num_processes: int
    loss_first: Figure = None
    loss_last: Figure = None
    loss_gap: Figure = None
    tokens_per_s: Figure = None
    step_ms: Figure = None
    step_ms_q1: Figure = None
    step_ms_q3: Figure = None
    peak_bytes: Listed[int | None] = field(default_factory=list)
    mean_bytes: Listed[PerStep | None] = field(default_factory=list)
    resting_bytes: Listed[int | None] = field(default_factory=list)
    sent_bytes: PerStep | None = None
    theory: Demand | None = None
    parts_ms: dict[str, float | None] | None = None
    host_ms: Figure = None
    peak_flops: Figure = None
    mfu: Figure = None
    peak_rss_bytes: Listed[int | None] = field(default_factory=list)
    cuda_peak_allocated_bytes: Listed[int | None] = field(default_factory=list)
    cuda_peak_reserved_bytes: Listed[int | None] = field(default_factory=list)
    utilization_percent: Figure = None
    end_to_end_s: Figure = None
    compute_limit_ms: Figure = None
    communication_limit_ms: Figure = None
    times_limit: Figure = None
    failure: str | None = None
    failure_kind: str | None = None
    runs: Annotated[Listed[Run], Field(exclude=True)] = field(default_factory=list)

    @property
    def demanded(self) -> Demand:
        """As far as anybody says."""
        return self.theory or Demand()

    @property
    def timeline(self) -> Sequence[tuple[float, int]]:
        """Of rank 0 in the first repeat, of an arm that did not fail: seconds, bytes."""
        runs = self.runs if self.failure is None else ()
        return next((run.ranks[0].timeline or [] for run in runs), [])

    @property
    def utilization(self) -> dict[str, float]:
        """Mean percent of all samples of all ranks, by what was sampled (``gpu`` or ``cpu``)."""
        samples = defaultdict[str, list[float]](list)
        for rank in (rank for run in self.runs for rank in run.ranks if self.failure is None):
            found = [percent for _, percent in rank.utilization or ()]
            samples[rank.utilization_of or "cpu"] += found
        return {device: fmean(found) for device, found in samples.items() if found}

    @property
    def step_losses(self) -> list[float]:
        """The mean loss of each optimizer step, of the first repeat; empty without one."""
        losses, accum = self.runs[0].mean_losses if self.runs else [], self.grad_accum
        return [fmean(losses[i : i + accum]) for i in range(0, len(losses), accum)]

    def part_ms(self, name: str) -> float | None:
        """Of :class:`~lightning_fsdp.bench.parts.Parts`, as far as it is known."""
        return (self.parts_ms or {}).get(f"{name}_ms")

    @property
    def data_calls(self) -> dict[str, float] | None:
        """Collectives that move parameters and gradients, by kind; all, where nobody tells which.

        The core counts its own. Of another engine's they are the kinds that theory demands.
        """
        demanded = self.demanded.collectives
        if self.data_collectives is not None or self.collectives is None or not demanded:
            return self.collectives if self.data_collectives is None else self.data_collectives
        return {kind: n for kind, n in self.collectives.items() if kind in demanded}


def of_all(function: Callable[[list[T]], R], figures: Iterable[T | None]) -> R | None:
    """A function of some figures, if there are any and none of them is missing."""
    every = list(figures)
    known = [figure for figure in every if figure is not None]
    return function(known) if known and len(known) == len(every) else None


def in_ms(function: Callable[[list[float]], float], seconds: Iterable[float | None]) -> Figure:
    """A function of some times in milliseconds, if there are any and none of them is missing."""
    return of_all(lambda known: 1e3 * function(known), seconds)


def worst(figures: Iterable[T | None]) -> T | None:
    """The largest of the figures per rank, if all ranks have one."""
    return of_all(max, figures)


def sum_of(parts: Mapping[str, float | None] | None) -> float | None:
    """The sum of a figure's parts, if all of them are known; of no parts 0."""
    return None if parts is None else of_all(sum, [0, *parts.values()])


def listed(calls: Mapping[str, float]) -> str:
    """Collectives by kind, in words."""
    return ", ".join(f"{n:g} {kind}" for kind, n in calls.items()) or "none"
