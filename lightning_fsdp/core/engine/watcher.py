"""The events of the engine. Features beside it hang on these; the engine imports none of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from lightning_fsdp.core.engine.flat_parameter import FlatParameter
    from lightning_fsdp.core.engine.sharded import Sharded
    from lightning_fsdp.core.engine.unit import Unit


class Watcher:
    """Told of what happens to the units of one schedule, in the same order on every rank.

    Each method is an event, and does nothing here.
    """

    def on_pass(self) -> None:
        """A pass begins: an outermost call into a sharded module."""

    def before_collective(self, event: str, unit_name: str) -> None:
        """A gather or a reduction is about to start; all ranks should start the same one.

        Args:
            event: What is about to start, in words.
            unit_name: The unit.
        """

    def before_whole(self, flat_param: FlatParameter) -> None:
        """The whole copy is about to be allocated."""

    def on_freed(self, flat_param: FlatParameter) -> None:
        """The whole copy was freed."""

    def before_backward(self, factors: Mapping[str, float]) -> None:
        """A backward begins.

        Args:
            factors: By flat parameter, the divide factor of the sum of its gradients, where it is
                not the number of ranks; all ranks should have the same.
        """

    def before_gradients(self, unit: Unit) -> None:
        """A backward reaches the outputs of a unit's module: it is about to make gradients."""

    def on_reduce(self, flat_param: FlatParameter, has_one: Sequence[bool]) -> None:
        """A reduction has started; ``has_one``: per slot, whether this rank has a gradient."""

    def on_unreduced(self, flat_param: FlatParameter) -> None:
        """A backward without communication has ended: its gradients wait for the next one."""

    def before_landing(self) -> None:
        """All reductions of a backward are in flight, or have landed."""

    def on_landed(self) -> None:
        """All reductions have landed: ``.grad`` holds their results."""

    def on_backward_end(self) -> None:
        """The backward is over, and the schedule idle: an optimizer may step."""

    def on_step(self) -> None:
        """An optimizer has stepped some of the parameters."""

    def on_failure(self, units: Mapping[Unit, bool], *, in_backward: bool) -> None:
        """An exception ended a forward or a backward; the schedule has forgotten it.

        Args:
            units: By unit, whether it computes in a forward around the backward, which goes on.
            in_backward: Whether it was a backward that ended.
        """


class Watchers(Watcher):
    """Several watchers as one. An event calls, in order, those that have a method of their own."""

    def __init__(self, each: Sequence[Watcher]) -> None:
        for event in [name for name in vars(Watcher) if not name.startswith("_")]:
            nothing = getattr(Watcher, event)
            calls = [getattr(w, event) for w in each if getattr(type(w), event) is not nothing]
            if calls:  # a single one takes the place of the event: no call in between
                setattr(self, event, calls[0] if len(calls) == 1 else partial(_call_each, calls))


def _call_each(calls: Sequence[Callable[..., None]], *args: Any, **kwargs: Any) -> None:
    for call in calls:
        call(*args, **kwargs)


class Runner:
    """The side of a schedule that flat parameters see. This one does nothing.

    Attributes:
        watchers: Called at the events of the schedule.
    """

    watchers = Watcher()

    def note_arrival(self, flat_param: FlatParameter) -> None:
        """A local gradient arrives."""

    def after_optimizer_step(self, stepped: Collection[FlatParameter]) -> None:
        """An optimizer has stepped parameters of these."""


class Runners:
    """The schedules that run one flat parameter, the latest first.

    Models that share a weight but were sharded separately have one each. References are weak, as
    schedules own flat parameters, and either model may be deleted.

    Attributes:
        known: These, the latest last.
        latest: Returns that whose backward began last, which is told of what happens and reduces.
    """

    def __init__(self) -> None:
        self.known: list[weakref.ref[Runner]] = []
        self.latest: Callable[[], Any] = Runner

    def __iter__(self) -> Iterator[Runner]:
        return filter(None, map(weakref.ref.__call__, reversed(self.known)))

    def make_latest(self, runner: Runner) -> None:
        """Let a schedule, new or known, be the latest."""
        for known in [known for known in self.known if known() is runner]:
            self._forget(known)
        self.known.append(weakref.ref(runner, self._forget))
        self.latest = self.known[-1]

    def _forget(self, known: weakref.ref[Runner]) -> None:
        self.known.remove(known)
        self.latest = self.known[-1] if self.known else Runner


class GradientWatcher:
    """Told of the gradients of one flat parameter, by slot. Each method does nothing here."""

    def on_local(self, flat_param: FlatParameter, slot: int, gradient: Tensor) -> Tensor:
        """This rank's own gradient, original shape, compute dtype. Returns the one to go on with.

        It must not be written to: it may be a view of memory that autograd still needs.
        """
        return gradient

    def on_reduced(self, flat_param: FlatParameter, slot: int, shard: Tensor) -> None:
        """This rank's slice of the mean over ranks, ``(n,)``, main dtype; may be edited in place.

        It is called before the slice is added to ``.grad``.
        """

    def on_added(
        self, flat_param: FlatParameter, slot: int, gradient: Sharded, total: Sharded
    ) -> None:
        """The mean was added to ``total``; that is ``gradient`` itself if there was none before."""
