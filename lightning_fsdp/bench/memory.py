"""The observed steps: every storage and every collective, by operation; exact, and slow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import lightning as L
from torch.utils.flop_counter import FlopCounterMode

from lightning_fsdp.callbacks.memory import OWNERS, tell_owners
from lightning_fsdp.callbacks.plain_access import close, gradients_of
from lightning_fsdp.callbacks.storages import Ledger, Observation
from lightning_fsdp.callbacks.throughput import flop_counter

MOST_POINTS = 500
"""Of a time line."""


@dataclass(frozen=True)
class Observed:
    """What observed steps have shown.

    Attributes:
        seen: Of all steps together.
        num_steps: How many there were.
        peak_by_kind: Bytes by owner at the moment with most bytes.
        timeline: Of the last step: seconds since its start, bytes alive. Tracking stretches it.
        mean_bytes: Over that step.
        flops: Of the first micro-batch's forward and backward, on this rank.
    """

    seen: Observation
    num_steps: int
    peak_by_kind: dict[str, int]
    timeline: list[tuple[float, int]]
    mean_bytes: float
    flops: float


class StepObserver:
    """Watches this thread from its creation until :meth:`stop`."""

    def __init__(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self._access = gradients_of(trainer, module)
        self._ledger = Ledger(trainer.strategy.root_device)
        self._num_steps = 0
        self._step = (0, 0)  # clock at the beginning and the end of the last whole one
        self._flops = 0.0
        self._tell()
        self._ledger.start()
        self._next_start = self._ledger.num_operations
        self._counter: FlopCounterMode | None = flop_counter()
        self._counter.__enter__()  # type: ignore[no-untyped-call]

    def after_backward(self) -> None:
        """A micro-batch's gradients are there."""
        self._stop_counting()
        self._tell()

    def end_step(self) -> None:
        """An optimizer step is through."""
        self._tell()
        self._num_steps += 1
        self._step = (self._next_start, self._ledger.num_operations)
        self._next_start = self._ledger.num_operations

    def stop(self) -> Observed:
        """Watch no more."""
        self._stop_counting()
        seen = self._ledger.stop()
        close(self._access)
        moments = self._ledger.moments(OWNERS)
        start, stop = self._step
        origin = self._ledger.times_s[start]
        line = [
            (self._ledger.times_s[i] - origin, sum(moments[i].values()))
            for i in range(start, stop + 1)
        ]
        highest = max(moments, key=lambda of_owners: sum(of_owners.values()))
        return Observed(
            seen, self._num_steps, highest, thinned(line), mean_over_time(line), self._flops
        )

    def _tell(self) -> None:
        self._ledger.settle()
        tell_owners(self._ledger, self._access, self._trainer, self._module)

    def _stop_counting(self) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._flops, self._counter = float(self._counter.get_total_flops()), None


def mean_over_time(line: Sequence[tuple[float, int]]) -> float:
    """Bytes, each for as long as they were alive.

    Args:
        line: Seconds, bytes from then on; by seconds, from the first to the last of which it goes.
    """
    held = sum(n * (until - since) for (since, n), (until, _) in itertools.pairwise(line))
    seconds = line[-1][0] - line[0][0]
    return held / seconds if seconds else float(line[0][1])


def thinned(line: Sequence[tuple[float, int]], most: int = MOST_POINTS) -> list[tuple[float, int]]:
    """Of each stretch of points its highest, so that the highest of all stays.

    Args:
        line: Seconds, bytes; by seconds.
        most: Points that are left at most.
    """
    width = max(1, -(-len(line) // most))
    return [
        max(line[start : start + width], key=lambda point: point[1])
        for start in range(0, len(line), width)
    ]
