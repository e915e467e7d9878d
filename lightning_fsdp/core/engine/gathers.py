"""Gathers of units: agreed on by the ranks, and one started ahead of the unit that computes."""

from __future__ import annotations

from lightning_fsdp.core.engine.unit import Unit
from lightning_fsdp.core.engine.watcher import Watchers


class Order:
    """Which unit followed which, in the passes so far."""

    def __init__(self) -> None:
        self._last: Unit | None = None
        self._follower: dict[Unit, Unit] = {}

    def begin(self) -> None:
        """What comes next follows nothing."""
        self._last = None

    def enter(self, unit: Unit, *, is_new: bool = True) -> Unit | None:
        """Note that a unit is next, and say which one followed it when it was last there.

        Args:
            unit: The next.
            is_new: False if it was there before in this pass, which says nothing of its place.
        """
        if is_new and self._last is not None and self._last is not unit:
            self._follower[self._last] = unit
        self._last = unit
        return self._follower.get(unit)


class Gathers:
    """At most two units are on their way or whole for a pass: one computes, one comes."""

    def __init__(self, watchers: Watchers) -> None:
        self._watchers = watchers
        self._ahead: Unit | None = None

    def start(self, unit: Unit) -> None:
        """Start a unit's gather, agreed on by all ranks; nothing if it is there or on its way."""
        if unit.is_held:
            return
        for call in self._watchers.before_collective:
            call("gather", unit.name)
        unit.unshard()

    def make_whole(self, unit: Unit, then: Unit | None = None) -> None:
        """Gather a unit and wait for it; start the gather of the one that follows before."""
        self.drop_ahead(expected=unit)
        self.start(unit)
        if then is not None and not then.is_held:
            self.start(then)
            self._ahead = then
        unit.wait_for_unshard()

    def refresh(self, unit: Unit) -> None:
        """Gather a unit anew, in place, if its shard was written to since."""
        if unit.is_stale:
            unit.reshard()
            self.make_whole(unit)

    def drop_ahead(self, expected: Unit | None = None) -> None:
        """Free what was gathered ahead, unless it is the unit that comes."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead is not expected:
            ahead.reshard()

    def forget(self) -> None:
        """After an exception: units end their gathers themselves."""
        self._ahead = None
