"""When each unit is gathered, freed and reduced, and which gather is started ahead.

A pass is one outermost call into a sharded module. The schedule remembers which unit followed
which in the last pass, and starts that unit's gather while its predecessor computes; likewise in
backward. At most two units are whole at once: the one that computes and the one that comes (beside
those that enclose them, and beside what ZeRO-2 keeps).

    forward   compute 0 | compute 1 | compute 2      backward    compute 2 | compute 1 | compute 0
    gathers    0 -> 1   |     2     |                gathers      2 -> 1   |     0     |
                                                     reductions            |     2     |  1 -> 0

What happens when depends on the graph alone, never on which gradients this rank happens to have: a
unit's gradients are reduced when the backward leaves it through its inputs, or at the end of the
backward where its inputs need no gradient. A flat parameter that several units share waits for the
last.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import nn

from lightning_fsdp.core.engine import torch_internals
from lightning_fsdp.core.engine.communicator import Communicator
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.lifecycle import Gradients
from lightning_fsdp.core.engine.unit import Unit
from lightning_fsdp.core.engine.watcher import Watchers

_log = logging.getLogger(__name__)


class Call:
    """One call of a unit's module whose graph is alive. The graph owns it."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit


@dataclass
class _Running:
    """A unit in its forward: modules that have not run, and calls that have not returned."""

    waiting_for: set[nn.Module]
    was_whole: bool  # before it
    depth: int = 0


@dataclass(eq=False)
class _Forward:
    """A pass."""

    depth: int = 0  # calls into sharded modules that have not returned
    last: Unit | None = None
    running: dict[Unit, _Running] = field(default_factory=dict)


class _Progress(Enum):
    """How far a backward has come in a unit."""

    TOUCHED = "touched"  # a gradient came, or it was recomputed, before its outputs were reached
    ENTERED = "entered"
    FINISHED = "finished"


@dataclass(eq=False)
class _Backward:
    """A run of the autograd engine."""

    ending: weakref.ref[Callable[[], None]]  # what is called at its end
    last: Unit | None = None
    progress: dict[Unit, _Progress] = field(default_factory=dict)  # in the backward's order
    entered: set[Unit] = field(default_factory=set)  # at their outputs, and perhaps left again
    # With gradients to reduce, or to keep.
    unsettled: dict[FlatParameter, None] = field(default_factory=dict)

    def touch(self, unit: Unit, progress: _Progress) -> None:
        """Note how far it has come in a unit, whose gradients are to be settled."""
        self.progress[unit] = progress
        for flat_param in unit.sites:
            self.unsettled.setdefault(flat_param)

    @property
    def is_alive(self) -> bool:
        """Whether no exception ended it.

        Nothing tells of that. But a backward owns what it is to call at its end: once that is gone,
        so is the backward.
        """
        return self.ending() is not None


class Schedule:
    """Runs the units of one sharded model.

    Attributes:
        communicator: The sharding group and its replicas.
        watchers: What hangs on it.
        units: All units, in the order in which they were sharded.
    """

    def __init__(self, communicator: Communicator, watchers: Watchers) -> None:
        self.communicator = communicator
        self.watchers = watchers
        self.units: list[Unit] = []
        self._forward = _Forward()
        self._backward: _Backward | None = None
        self._prefetched: Unit | None = None
        self._reducing: list[FlatParameter] = []  # in flight, the last at the end
        self._follower_in_forward: dict[Unit, Unit] = {}
        self._follower_in_backward: dict[Unit, Unit] = {}
        self._calls: defaultdict[Unit, weakref.WeakSet[Call]] = defaultdict(weakref.WeakSet)
        self._users: defaultdict[FlatParameter, list[Unit]] = defaultdict(list)

    def __deepcopy__(self, memo: object) -> Schedule:
        # Units are added as they are copied.
        return Schedule(self.communicator, self.watchers.anew())

    @property
    def is_busy(self) -> bool:
        """Whether a forward or a backward is running."""
        return self._forward.depth > 0 or self._backward is not None

    @property
    def flat_params(self) -> Iterable[FlatParameter]:
        """Of all units, each once."""
        return self._users.keys()

    def add(self, units: Iterable[Unit]) -> None:
        """Take units over, from their making or from the schedule of an inner module."""
        for unit in units:
            self.units.append(unit)
            for flat_param in unit.flat_params:
                if flat_param not in self._users:
                    flat_param.watch(self.watchers, self._note_arrival)
                self._users[flat_param].append(unit)

    # -- forward ---------------------------------------------------------------------------------

    def enter_call(self) -> None:
        """A call into a sharded module begins; the outermost one opens a pass."""
        if self._forward.depth == 0:
            if self._backward is not None:
                self._recover("a backward")
            self._forward.last = None
            for call in self.watchers.on_pass:
                call()
        self._forward.depth += 1

    def leave_call(self, failed: bool) -> None:
        """A call into a sharded module ends, by an exception if ``failed``."""
        forward = self._forward
        forward.depth = max(forward.depth - 1, 0)
        if forward.depth > 0:
            return
        if failed:
            self._recover("a forward")
            return
        for unit in list(forward.running):  # of its modules, only some ran
            self._end_forward(unit)
        self._drop_prefetched(expected=None)

    def interrupt(self) -> None:
        """What no hook tells ended a forward (``KeyboardInterrupt``, ``SystemExit``)."""
        if self._forward.depth > 0 and not torch_internals.is_in_backward():
            self._recover("a forward")

    def enter_module(self, unit: Unit, module: nn.Module) -> None:
        """A unit's module begins its forward: the first one makes the unit whole."""
        forward = self._forward
        running = forward.running.get(unit)
        if running is not None:
            self._refresh(unit)
        else:
            if unit.is_stale:
                unit.reshard()
            running = forward.running[unit] = _Running(set(unit.modules), unit.is_whole)
            if forward.last is not None and forward.last is not unit:
                self._follower_in_forward[forward.last] = unit
            forward.last = unit
            self._make_whole(unit, then=self._follower_in_forward.get(unit))
            unit.install_leaves()
        running.depth += 1

    def leave_module(self, unit: Unit, module: nn.Module) -> None:
        """A unit's module ends its forward: the last one releases the unit."""
        running = self._forward.running.get(unit)
        if running is None:
            return
        running.depth -= 1
        running.waiting_for.discard(module)
        if running.depth <= 0 and not running.waiting_for:
            self._end_forward(unit)

    def recompute(self, unit: Unit | None) -> bool:
        """A module runs again inside of a backward, which ends what begins here.

        Returns:
            Whether that is the unit's own backward, running or coming. Reentrant activation
            checkpointing repeats a forward that had no graph, and then runs a backward through the
            repetition, inside of the one that is running.
        """
        backward = self._open_backward()
        if unit is None:
            return True
        backward.progress.setdefault(unit, _Progress.TOUCHED)
        self._refresh(unit)
        if unit not in self._forward.running:  # as in a training step that calls backward itself
            self._make_whole(unit)
            unit.install_leaves()
        return unit in backward.entered or bool(self._calls[unit])

    def open_call(self, unit: Unit) -> Call:
        """Note a call whose backward will leave the unit through the call's inputs."""
        call = Call(unit)
        self._calls[unit].add(call)
        return call

    def _end_forward(self, unit: Unit) -> None:
        running = self._forward.running.pop(unit)
        unit.install_shards()
        # ZeRO-2 keeps the copy for a backward. Where none follows, the unit ends as it began.
        frees = unit.reshard_after_forward and not unit.is_kept_for_graph
        if frees or (not torch.is_grad_enabled() and not running.was_whole):
            unit.reshard()

    # -- backward --------------------------------------------------------------------------------

    def before_backward(self, unit: Unit | None) -> None:
        """The backward reaches a unit's outputs: make it whole, start the gather of the next.

        One through a module without a unit is a backward, too: gradients of earlier ones may wait
        for it, whatever units it leaves out.
        """
        backward = self._open_backward()
        if unit is None:
            return
        is_first = unit not in backward.entered
        backward.entered.add(unit)
        backward.touch(unit, _Progress.ENTERED)
        if not unit.needs_backward_gather:
            return
        # With create_graph=True the backward is recorded, and what it saves are weights again. When
        # that graph is read, and when for the last time, is known to nobody.
        unit.is_kept_for_graph |= torch.is_grad_enabled()
        if not unit.is_whole:
            if is_first and backward.last is not None:
                self._follower_in_backward[backward.last] = unit
            backward.last = unit
            self._make_whole(unit, then=self._follower_in_backward.get(unit))
        unit.install_leaves()  # for a recomputation of modules inside the unit

    def close_call(self, call: Call) -> None:
        """The backward leaves a unit through the inputs of a call; the last call finishes it."""
        backward, calls = self._open_backward(), self._calls[call.unit]
        calls.discard(call)
        if not calls:
            self._finish(backward, call.unit)

    def _finish(self, backward: _Backward, unit: Unit) -> None:
        backward.touch(unit, _Progress.FINISHED)
        self._release(unit)
        finished = backward.progress.get
        self._settle(
            backward,
            [
                flat_param
                for flat_param in unit.flat_params
                if all(finished(user) is _Progress.FINISHED for user in self._users[flat_param])
            ],
        )

    def _release(self, unit: Unit) -> None:
        """Take the whole copy that a backward needed out of the modules, and free it."""
        if unit in self._forward.running:  # as in a training step that calls backward itself
            return
        unit.install_shards()
        if unit.reshard_after_backward and not unit.is_kept_for_graph:
            unit.reshard()

    def _note_arrival(self, flat_param: FlatParameter) -> None:
        backward, users = self._open_backward(), self._users[flat_param]
        backward.unsettled.setdefault(flat_param)
        # Of a tied weight's users, one was entered on every rank; others may have no backward.
        if backward.progress.keys().isdisjoint(users):
            backward.progress.update(dict.fromkeys(users, _Progress.TOUCHED))

    def _settle(self, backward: _Backward, flat_params: Iterable[FlatParameter]) -> None:
        """Reduce what is complete in this backward, or keep it for the next."""
        synced = []
        for flat_param in flat_params:
            backward.unsettled.pop(flat_param, None)
            if self._syncs_gradients(flat_param):
                synced.append(flat_param)
            else:
                flat_param.leave_unreduced()
        self._reduce([flat_param for flat_param in synced if flat_param.is_trainable])

    def _syncs_gradients(self, flat_param: FlatParameter) -> bool:
        return all(unit.syncs_gradients for unit in self._users[flat_param])

    def _open_backward(self) -> _Backward:
        # One that is alive runs, or a node of it runs another one (reentrant checkpointing).
        if self._backward is not None and self._backward.is_alive:
            return self._backward
        if self._backward is not None:
            self._recover("a backward")
        for flat_param in self._users:
            # Whether or not this rank has gradients of it: all ranks must send the same dtype.
            if not self._syncs_gradients(flat_param):
                flat_param.sends_sums = True
        close = functools.partial(self._close_backward)
        self._backward = _Backward(weakref.ref(close))
        torch_internals.call_at_end_of_backward(close)
        return self._backward

    def _close_backward(self) -> None:
        backward = self._open_backward()
        # What no call announced (inputs that need no gradient) ends here, in the backward's order.
        for unit, progress in list(backward.progress.items()):
            if progress is not _Progress.FINISHED:
                self._finish(backward, unit)
            elif unit.has_leaves_installed:  # recomputed since, for a result that has no backward
                self._release(unit)
        for flat_param in list(backward.unsettled):
            self._settle(backward, [flat_param])
        # An earlier, unsynced backward may have gone through units that this one did not enter.
        self._reduce_waiting(s for s in self._users if s.sends_sums and self._syncs_gradients(s))
        self._drop_prefetched(expected=None)
        self._land_reductions()
        for flat_param in self._users:
            flat_param.micro_batch += 1
        self._backward = None
        self._forward.last = None  # a forward around it goes on; what follows is no follower
        for call in self.watchers.on_backward_end:
            call()

    def reduce_waiting(self) -> None:
        """Reduce the local gradients that wait on any rank. Collective, between backwards."""
        self._reduce_waiting(self._users)
        self._land_reductions()
        for call in self.watchers.on_backward_end:
            call()

    def _reduce_waiting(self, candidates: Iterable[FlatParameter]) -> None:
        """Reduce those of ``candidates``, the same on every rank, that wait on any rank."""
        flat_params = [flat_param for flat_param in candidates if flat_param.is_trainable]
        if not flat_params:
            return
        waiting = [flat_param.has_local_gradients for flat_param in flat_params]
        any_rank = self.communicator.any_rank(waiting)()
        for flat_param, is_waiting in zip(flat_params, any_rank, strict=True):
            if is_waiting:
                self._reduce([flat_param])

    # -- optimizer -------------------------------------------------------------------------------

    def after_optimizer_step(self, stepped: set[int]) -> None:
        """Free the whole copies of parameters that were just stepped, or renew those in use.

        Args:
            stepped: ``id`` of each parameter of the optimizer.
        """
        is_stepped = {u: any(id(p) in stepped for p in u.parameters()) for u in self.units}
        if not any(is_stepped.values()):
            return
        for call in self.watchers.on_step:
            call()
        for unit in self.units:
            if not is_stepped[unit] and not unit.is_kept_for_graph:
                continue
            for flat_param in unit.flat_params:
                flat_param.micro_batch = 0
            if unit in self._forward.running:
                self._refresh(unit)
            else:
                unit.reshard()

    # -- collectives -----------------------------------------------------------------------------

    def gather(self, unit: Unit) -> None:
        """Start a unit's gather, agreed on by all ranks."""
        if not unit.is_held:
            self._announce("gather", unit.name)
            unit.unshard()

    def reshard(self, unit: Unit) -> None:
        """Free a unit's whole copy at the user's wish.

        Raises:
            RuntimeError: The unit is in its forward and computes with it.
        """
        if unit in self._forward.running:
            raise RuntimeError(
                f"unit {unit.name!r} (rank {self.communicator.mesh_rank}): expected reshard() "
                "between forwards, got it inside of the unit's own, which uses the parameters. "
                "Call it after the forward."
            )
        unit.reshard()

    def _refresh(self, unit: Unit) -> None:
        """Gather a unit anew, in place, if its shard was written to since."""
        if unit.is_stale:
            unit.reshard()
            self._make_whole(unit)

    def _make_whole(self, unit: Unit, then: Unit | None = None) -> None:
        """Gather a unit and wait for it; start the gather of the one that follows before."""
        self._drop_prefetched(expected=unit)
        self.gather(unit)
        if then is not None and not then.is_held:
            self.gather(then)
            self._prefetched = then
        unit.wait_for_unshard()

    def _drop_prefetched(self, expected: Unit | None) -> None:
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched is not expected:
            prefetched.reshard()

    def _reduce(self, flat_params: list[FlatParameter]) -> None:
        if not flat_params:
            return
        for flat_param in flat_params:
            self._announce(f"reduce {flat_param.sent_dtype} gradients of", flat_param.name)
        self._advance_reductions()  # what they read is freed before more is started
        for flat_param in flat_params:
            has_one = flat_param.reduce()
            for call in self.watchers.on_reduce:
                call(flat_param, has_one)
        self._reducing += flat_params

    def _advance_reductions(self) -> None:
        """Let each reduction go one stage on; after its last it lands."""
        for flat_param in self._reducing:
            if not flat_param.advance():
                flat_param.land()
        self._reducing = [s for s in self._reducing if s.gradients is Gradients.REDUCING]

    def _land_reductions(self) -> None:
        for call in self.watchers.before_landing:
            call()
        reducing, self._reducing = self._reducing, []
        advanced = reducing
        while advanced:  # all are under way before one is waited for
            advanced = [flat_param for flat_param in advanced if flat_param.advance()]
        for flat_param in reducing:
            flat_param.land()
        for call in self.watchers.on_landed:
            call()

    def _announce(self, event: str, unit_name: str) -> None:
        for call in self.watchers.before_collective:
            call(event, unit_name)

    def _recover(self, what: str) -> None:
        """After an exception: wait for what is in flight, free what is whole, go on."""
        in_backward = self._backward is not None
        _log.warning(
            "%s ended by an exception%s; the next call starts from the sharded parameters",
            what,
            " (gradients of this step are dropped)" if in_backward else "",
        )
        self._forward, self._backward, self._prefetched = _Forward(), None, None
        self._reducing = []
        for unit in self.units:
            unit.abandon(drops_gradients=in_backward)
        for call in self.watchers.on_recovery:
            call()
