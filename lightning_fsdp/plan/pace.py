"""How long a planned step takes: operations at a stated speed, collectives on a modelled network.

The dry run's operations and collectives are the engine's own, in its order. Each operation of which
torch counts floating-point operations (products of matrices, attention) sets a clock forward, and
so does a wait for a collective that has not ended. All other operations take no time, so the stated
speed is what a rank reaches in training, not what its device could.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

from lightning_fsdp.simulate.groups import find_usage
from lightning_fsdp.simulate.network import Network
from lightning_fsdp.simulate.transfers_on_clock import Clock


@dataclass(frozen=True)
class Timing:
    """Of one optimizer step, as modelled.

    Attributes:
        step_s: From its beginning to its end.
        compute_s: Of these, for which the rank computes.
        waited_s: Of these, for which it waits for the network.
        sent_bytes: By the rank.
    """

    step_s: float
    compute_s: float
    waited_s: float
    sent_bytes: float

    def __add__(self, other: Timing) -> Timing:
        return Timing(*map(operator.add, astuple(self), astuple(other)))

    def __mul__(self, times: float) -> Timing:
        return Timing(*(times * value for value in astuple(self)))

    def __sub__(self, other: Timing) -> Timing:
        return self + other * -1


class Pace:
    """A speed, a network, and the clock that both move.

    Args:
        network: Between the ranks.
        flops_per_s: That a rank reaches.
    """

    def __init__(self, network: Network, flops_per_s: float) -> None:
        from lightning_fsdp.callbacks.throughput import flop_counter  # imports Lightning

        self.network = network
        self.flops_per_s = flops_per_s
        self.clock = Clock()
        self._compute_s = 0.0
        self._times = 1.0
        self._formulas = flop_counter().flop_registry

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """An operation was made."""
        formula = self._formulas.get(func.overloadpacket)
        if formula is not None:
            seconds = self._times * formula(*args, **kwargs, out_val=out) / self.flops_per_s
            self._compute_s += seconds
            self.clock.now_s += seconds

    @contextmanager
    def standing_for(self, times: float) -> Iterator[None]:
        """Inside, an operation stands for so many."""
        before, self._times = self._times, times
        yield
        self._times = before

    def now(self) -> Timing:
        """Since the beginning."""
        usage = find_usage()
        assert usage is not None, "a group is open"
        return Timing(self.clock.now_s, self._compute_s, usage.waited_s, float(usage.sent_bytes))
