"""What one rank measured of a run: one JSON file, written by the rank and read by the command."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RankMeasurement:
    """What one rank writes.

    Attributes:
        losses: Training loss of every micro-batch, from the first on.
        grad_norm: Of the first step's gradients before they are clipped; ``None`` without warm-up.
        step_s: Seconds per timed optimizer step, data loading and logging included.
        step_tokens: Tokens of this rank per timed optimizer step; padding is not counted.
        host_s: Seconds of CPU that this process used per timed optimizer step.
        fit_s: From the moment before the model is built to the end of the timed steps.
        resting_bytes: Parameters, gradients, buffers and optimizer state between two steps.
        peak_bytes: Most bytes of tensors alive at once on the device, resting ones included.
            ``None``, as the next three, where something is compiled: watched, it runs uncompiled.
        peak_by_kind: Those by owner.
        mean_bytes: Bytes of tensors over an observed step, each for as long as it was alive.
        timeline: Seconds since the start of an observed step, bytes alive.
        peak_rss_bytes: Most bytes that the process had in memory, from its start to the end of the
            timed steps.
        cuda_peak_allocated_bytes: Over the timed steps, by torch's allocator.
        cuda_peak_reserved_bytes: What that took from the device.
        utilization: Seconds since the first timed step's start, percent.
        utilization_of: ``gpu``, or ``cpu``: CPU seconds of this process per second.
        parts: Of each profiled optimizer step; see :class:`~lightning_fsdp.bench.parts.Parts`.
        flops_per_token: Of forward and backward; what is recomputed counts once.
        collectives: Calls per observed optimizer step, by kind, as torch's dispatcher sees them.
        collective_bytes: Bytes that this rank passed to them, by kind.
        payload_bytes: Of all kinds together.
        data_collectives: Calls that move parameters or gradients, a set of pairs as the one
            collective that it stands for.
        units: See :func:`~lightning_fsdp.bench.theory.model_units`; ``None`` where an engine has
            sharded the module.
        simulated: On a simulated network, what a timed step took of it; see ``simulate/usage.py``.
            The collectives above are real ones only.
    """

    rank: int
    world_size: int
    losses: list[float] = field(default_factory=list)
    grad_norm: float | None = None
    step_s: list[float] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    fit_s: float | None = None
    resting_bytes: int | None = None
    peak_bytes: int | None = None
    peak_by_kind: dict[str, int] | None = None
    mean_bytes: float | None = None
    timeline: list[tuple[float, int]] | None = None
    peak_rss_bytes: int | None = None
    cuda_peak_allocated_bytes: int | None = None
    cuda_peak_reserved_bytes: int | None = None
    utilization: list[tuple[float, float]] = field(default_factory=list)
    utilization_of: str | None = None
    parts: list[dict[str, float | None]] = field(default_factory=list)
    flops_per_token: float | None = None
    collectives: dict[str, float] = field(default_factory=dict)
    collective_bytes: dict[str, float] = field(default_factory=dict)
    payload_bytes: float | None = None
    data_collectives: dict[str, float] | None = None
    units: list[tuple[int, str, int, int]] | None = None
    simulated: dict[str, Any] | None = None
