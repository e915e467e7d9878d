"""What hangs on the essential path sees it through these events, and is imported by none of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from lightning_fsdp.core.engine.flat_parameter import FlatParameter
    from lightning_fsdp.core.engine.sharded import Sharded
    from lightning_fsdp.core.engine.unit import Unit


class Watcher:
    """Sees what happens to the units of one schedule, in one order on every rank.

    Each method does nothing here.
    """

    def on_pass(self) -> None:
        """An outermost call into a sharded module begins."""

    def before_collective(self, event: str, unit_name: str) -> None:
        """A gather or a reduction is about to start, on every rank or by mistake."""

    def before_whole(self, flat_param: FlatParameter) -> None:
        """The whole copy is about to be allocated."""

    def on_freed(self, flat_param: FlatParameter) -> None:
        """The whole copy was freed."""

    def before_gradients(self, unit: Unit) -> None:
        """A backward reaches a unit, or a further one of its modules."""

    def on_reduce(self, flat_param: FlatParameter, has_one: Sequence[bool]) -> None:
        """A reduction has started; per slot, whether this rank has a gradient."""

    def on_unreduced(self, flat_param: FlatParameter) -> None:
        """A backward has left its gradients here, to be added to by the next."""

    def before_landing(self) -> None:
        """All reductions of a backward are in flight, or have landed."""

    def on_landed(self) -> None:
        """All have landed: ``.grad`` holds what they gave."""

    def on_backward_end(self) -> None:
        """The backward is over, and the schedule idle: an optimizer may step."""

    def on_step(self) -> None:
        """An optimizer has stepped some of the parameters."""

    def on_failure(self, units: Sequence[Unit], what: str, *, in_backward: bool) -> None:
        """An exception ended a forward or a backward; the schedule has forgotten it."""


class Watchers:
    """The watchers of a schedule by event: those that do nothing at an event are not called.

    Attributes:
        each: All of them.
    """

    def __init__(self, each: Sequence[Watcher] = ()) -> None:
        self.each = tuple(each)
        self.on_pass = [w.on_pass for w in self._of("on_pass")]
        self.before_collective = [w.before_collective for w in self._of("before_collective")]
        self.before_whole = [w.before_whole for w in self._of("before_whole")]
        self.on_freed = [w.on_freed for w in self._of("on_freed")]
        self.before_gradients = [w.before_gradients for w in self._of("before_gradients")]
        self.on_reduce = [w.on_reduce for w in self._of("on_reduce")]
        self.on_unreduced = [w.on_unreduced for w in self._of("on_unreduced")]
        self.before_landing = [w.before_landing for w in self._of("before_landing")]
        self.on_landed = [w.on_landed for w in self._of("on_landed")]
        self.on_backward_end = [w.on_backward_end for w in self._of("on_backward_end")]
        self.on_step = [w.on_step for w in self._of("on_step")]
        self.on_failure = [w.on_failure for w in self._of("on_failure")]

    def _of(self, event: str) -> list[Watcher]:
        return [w for w in self.each if getattr(type(w), event) is not getattr(Watcher, event)]


class Owner:
    """A schedule, as its flat parameters know it. This one is nobody's, and not watched.

    Attributes:
        watchers: What hangs on it.
    """

    watchers = Watchers()

    def note_arrival(self, flat_param: FlatParameter) -> None:
        """A local gradient arrives."""


class GradientWatcher:
    """Sees the gradients of one flat parameter's parameters. Each method does nothing here."""

    def on_local(self, flat_param: FlatParameter, slot: int, gradient: Tensor) -> None:
        """This rank's own has arrived: original shape, compute dtype. It may be edited in place."""

    def on_reduced(self, flat_param: FlatParameter, slot: int, shard: Tensor) -> None:
        """The mean over ranks has landed: this rank's slice, main dtype; likewise."""

    def on_added(
        self, flat_param: FlatParameter, slot: int, gradient: Sharded, total: Sharded
    ) -> None:
        """It was added to ``total``; which is the same object where there was none before."""
