"""What moves while something else computes: gathers, one of them ahead, and reductions.

A gather is agreed on by the ranks, and one is started ahead of the unit that computes. A reduction
is a chain of stages (over the shards, over the replicas, to the host) until it is in ``.grad``.
Each stage starts in the same order on all ranks: when the next reduction does, or at the backward's
end.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.lifecycle import Gradients
from lightning_fsdp.core.engine.unit import Unit
from lightning_fsdp.core.engine.watcher import Watchers


class Order:
    """Which unit followed which, in the passes so far.

    Attributes:
        first: Which one was first in the last pass that had any.
    """

    def __init__(self) -> None:
        self.first: Unit | None = None
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
        if self._last is None:
            self.first = unit
        elif is_new and self._last is not unit:
            self._follower[self._last] = unit
        self._last = unit
        return self._follower.get(unit)


class Gathers:
    """At most two units are on their way or whole for a pass: one computes, one comes.

    Attributes:
        kept: The last one of a forward, while it waits for the backward that needs it first.
    """

    def __init__(self, watchers: Watchers) -> None:
        self.kept: Unit | None = None
        self._watchers = watchers
        self._ahead: Unit | None = None

    def start(self, unit: Unit) -> bool:
        """Start a unit's gather, agreed on by all ranks; false if it is there or on its way."""
        if unit.is_held:
            return False
        is_new = unit.communicator.keeps_parts and any(f.is_stale for f in unit.flat_params)
        for call in self._watchers.before_collective:
            call("gather anew" if is_new else "gather", unit.name)
        unit.unshard()
        return True

    def make_whole(self, unit: Unit, then: Unit | None = None) -> None:
        """Gather a unit and wait for it; start the gather of the one that follows before."""
        self.drop(expected=unit)
        self.start(unit)
        if then is not None and self.start(then):
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

    def keep(self, unit: Unit) -> None:
        """Leave a unit whole after its forward; free it if another one was to follow, or follows.

        So it takes the place of the one that comes: not more than two are whole.
        """
        if self._ahead is None and self.kept is None:
            self.kept = unit
        else:
            unit.reshard()

    def drop(self, expected: Unit | None = None) -> None:
        """Free what was gathered ahead, and what was kept, unless it is the unit that comes."""
        self.drop_ahead(expected)
        kept, self.kept = self.kept, None
        if kept is not None and kept is not expected:
            kept.reshard()


class Reductions:
    """Those of one schedule that are in flight."""

    def __init__(self, watchers: Watchers) -> None:
        self._watchers = watchers
        self._in_flight: list[FlatParameter] = []  # the last started at the end

    def start(self, flat_params: Sequence[FlatParameter]) -> None:
        """Start those of flat parameters whose gradients are complete."""
        if not flat_params:
            return
        for flat_param in flat_params:
            for call in self._watchers.before_collective:
                call(f"reduce {flat_param.sent_dtype} gradients of", flat_param.name)
        self._advance()  # what they read is freed before more is started
        for flat_param in flat_params:
            if has_one := flat_param.reduce():
                for note in self._watchers.on_reduce:
                    note(flat_param, has_one)
        self._in_flight += flat_params

    def land(self) -> None:
        """Let all end: ``.grad`` holds what they gave."""
        for call in self._watchers.before_landing:
            call()
        while self._in_flight:
            self._advance()
        for call in self._watchers.on_landed:
            call()

    def _advance(self) -> None:
        """Let each in flight go one stage on; after its last it lands."""
        # All start before one is waited for: so a slow line between hosts never rests between two.
        for flat_param in [f for f in self._in_flight if not f.advance()]:
            flat_param.land()
        self._in_flight = [f for f in self._in_flight if f.gradients is Gradients.REDUCING]
