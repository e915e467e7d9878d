"""The simulated network for a program whose time is only counted: a clock, and nothing waits.

Who computes sets the clock forward, and so does who waits for a collective; no data moves. A
program takes the same seconds on any machine, however busy:

    issued     A  B
    network    [   A   ][   B   ]     end = max(issued, end of the one before) + modelled duration
    clock      ........|A........|B   where the program waits at once
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from lightning_fsdp.simulate.network import Cost
from lightning_fsdp.simulate.transfer import Transfer, Usage, Work


@dataclass
class Clock:
    """How far a program is.

    Attributes:
        now_s: Seconds since its beginning.
    """

    now_s: float = 0.0


class ClockedTransfers:
    """One transfer after another.

    Args:
        usage: Counts the waits.
        clock: Of the program.
    """

    def __init__(self, usage: Usage, clock: Clock) -> None:
        self.usage = usage
        self.clock = clock
        self._end_s = 0.0

    def start(self, transfer: Transfer, cost: Cost) -> Work:
        """Begin it when those before it have ended."""
        self._end_s = end_s = max(self.clock.now_s, self._end_s) + cost.duration_s
        left = replace(transfer, move=None)  # no data moves
        return Work(left, partial(self._wait, end_s), lambda: self.clock.now_s >= end_s)

    def _wait(self, end_s: float) -> None:
        waited_s = max(0.0, end_s - self.clock.now_s)
        self.usage.waited_s += waited_s
        self.clock.now_s += waited_s
