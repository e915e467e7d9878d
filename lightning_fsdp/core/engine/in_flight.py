"""What is in flight while the model computes: gathers, one of them prefetched, and reductions.

Ranks agree on the order of gathers; a unit's gather is started while the unit before it computes. A
reduction is a chain of stages (over the shards, over the replicas, to the host) that ends in
``.grad``. Its next stage starts when the next reduction starts, or at the end of the backward, so
that stages start in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.unit import Unit
from lightning_fsdp.core.engine.watcher import Watcher


class Order:
    """Which unit followed which in earlier passes: what to prefetch.

    Attributes:
        first: The first unit of the last pass that had any.
    """

    def __init__(self) -> None:
        self.first: Unit | None = None
        self._last: Unit | None = None
        self._follower: dict[Unit, Unit] = {}

    def begin(self) -> None:
        """Begin a pass: the next unit follows none."""
        self._last = None

    def enter(self, unit: Unit, *, is_first: bool = True) -> Unit | None:
        """Note that a unit is next, and return the one that followed it the last time, if any.

        Args:
            unit: The next one.
            is_first: False if it was entered in this pass before; it is then not noted as what
                follows the unit before it.
        """
        if self._last is None:
            self.first = unit
        elif is_first and self._last is not unit:
            self._follower[self._last] = unit
        self._last = unit
        return self._follower.get(unit)


class Gathers:
    """Gathers the units of a pass. At most two are whole or in flight: one and one ahead.

    Attributes:
        ahead: The unit that is whole, or in flight, before it is used: the next one, prefetched; or
            the last one of a forward, kept for the backward, which needs it first.
    """

    def __init__(self, watchers: Watcher) -> None:
        self.ahead: Unit | None = None
        self._watchers = watchers
        self._is_prefetched = True  # whether ``ahead`` was; else it was kept

    def start(self, unit: Unit) -> bool:
        """Start a unit's gather, as all ranks do; ``False`` if it is whole or in flight already.

        A copy is gathered again if a shard was written to since.
        """
        if unit.is_held and not unit.is_stale:
            return False
        # An event of its own: the gather of a stale unit then begins with one between hosts.
        refills_parts = unit.communicator.keeps_parts and any(f.is_stale for f in unit.flat_params)
        self._watchers.before_collective("gather anew" if refills_parts else "gather", unit.name)
        unit.unshard()
        return True

    def make_whole(self, unit: Unit, then: Unit | None = None, *, drops: bool = True) -> None:
        """Gather a unit and wait for it; before the wait, start the gather of ``then``.

        Args:
            unit: The unit.
            then: The one that follows it, as far as is known.
            drops: Whether another unit that is ahead is freed, instead of being whole as a third.
        """
        if drops or self.ahead is unit:
            self.drop(expected=unit)  # a prefetch that missed: else three would be whole
        self.start(unit)
        if then is not None and self.start(then):
            self.ahead, self._is_prefetched = then, True
        unit.wait_for_unshard()

    def refresh(self, unit: Unit) -> None:
        """Gather a unit again if a shard was written to since its gather."""
        if unit.is_stale:
            self.make_whole(unit)

    def keep(self, unit: Unit) -> None:
        """Leave a unit whole after its forward; free it if another one is ahead."""
        if self.ahead is None:
            self.ahead, self._is_prefetched = unit, False
        else:
            unit.reshard()

    def drop_prefetched(self) -> None:
        """Free the unit that was prefetched; one that is kept stays."""
        if self._is_prefetched:
            self.drop()

    def drop(self, expected: Unit | None = None) -> None:
        """Free the unit that is ahead, unless it is ``expected``."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None and ahead is not expected:
            ahead.reshard()


class Reductions:
    """The reductions of one schedule that are in flight."""

    def __init__(self, watchers: Watcher) -> None:
        self._watchers = watchers
        self._in_flight: list[FlatParameter] = []  # in the order of their start

    def start(self, flat_params: Sequence[FlatParameter]) -> None:
        """Start the reductions of flat parameters whose gradients are complete."""
        for flat_param in flat_params:
            # The dtype is part of the event: ranks that sent different ones would mix up bytes.
            event = f"reduce {flat_param.sent_dtype} gradients of {flat_param.trained} in"
            self._watchers.before_collective(event, flat_param.name)
        self._advance()  # so that the memory they read is freed before more is taken
        for flat_param in flat_params:
            if has_one := flat_param.reduce():
                self._watchers.on_reduce(flat_param, has_one)
        self._in_flight += flat_params

    def land(self) -> None:
        """Wait for all; then their results are in ``.grad``."""
        self._watchers.before_landing()
        while self._in_flight:
            self._advance()
        self._watchers.on_landed()

    def _advance(self) -> None:
        """Start the next stage of each; those that have none left land."""
        # All stages start before any reduction lands, so that a slow network is not idle meanwhile.
        landing = [flat_param for flat_param in self._in_flight if not flat_param.advance()]
        for flat_param in landing:
            flat_param.land()
        self._in_flight = [f for f in self._in_flight if f not in landing]
