"""When each unit is gathered, freed and reduced, and which gather is prefetched.

A pass is one outermost call into a sharded module. The schedule remembers which unit followed
which in earlier passes, and starts the gather of a unit while the one before it computes; likewise
in the backward. At most two units are whole at once: the one that computes and the next one (beside
units that enclose them, and those that ZeRO-2 keeps). The last unit of a forward stays whole if the
previous backward began with it.

    forward   compute 0 | compute 1 | compute 2      backward    compute 2 | compute 1 | compute 0
    gathers    0 -> 1   |     2     |                gathers        1      |     0     |
                                                     reductions            |     2     |  1 -> 0

The order depends on the graph alone, never on which gradients this rank has or which other graphs
are alive on it: a unit is freed, and its gradients are reduced, when a backward leaves it through
its inputs, or at the end of the backward if its inputs need no gradient. If it was called several
times, in one pass or several, its gradients are complete, and reduced, with the last of these calls
in the backward's graph; between calls in a row it stays whole. A flat parameter that several units
share is reduced with the last of them.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from lightning_fsdp.core.engine import torch_internals
from lightning_fsdp.core.engine.communicator import Communicator
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.in_flight import Gathers, Order, Reductions
from lightning_fsdp.core.engine.unit import Unit
from lightning_fsdp.core.engine.watcher import Runner, Watcher, Watchers

# Held while a schedule recovers, perhaps in a thread of autograd's, and while a gradient is set:
# two threads that use one ``.grad`` at once may crash torch.
recovering = threading.RLock()


@dataclass(eq=False)
class _Backward:
    """A run of the autograd engine."""

    # The callback at its end, which the autograd engine owns. Where an exception ends the backward,
    # the engine drops it uncalled; this reference then lets the schedule recover.
    ending: weakref.ref[Callable[[], None]]
    # The units that it has reached, in order, and whether it has left them again; ``None``: it has
    # not, nor has it reached their outputs.
    has_left: dict[Unit, bool | None] = field(default_factory=dict)
    # The unit that it left last, not finished yet: another call of it may follow.
    leaving: Unit | None = None
    # Flat parameters whose gradients are still to be reduced, or kept for the next backward.
    unsettled: dict[FlatParameter, None] = field(default_factory=dict)


class Schedule(Runner):
    """Runs the units of one sharded model.

    Args:
        communicator: The collectives of the sharding group, and of its replicas.
        new_watchers: Makes the watchers of this schedule, and those of each copy of it.

    Attributes:
        communicator: As given.
        watchers: Called at the events of this schedule.
        units: All units, in the order in which they were sharded.
        gathers: The gathers of the running pass.
        calls: By unit and module, the calls that have not returned, outermost first.
        input_nodes: By unit, the identity nodes on its inputs, of calls that no backward has left.
        flat_params: Those of all units; by each, the units that use it.
    """

    def __init__(
        self, communicator: Communicator, new_watchers: Callable[[], Sequence[Watcher]]
    ) -> None:
        self.communicator = communicator
        self._new_watchers = new_watchers
        self.watchers = Watchers(new_watchers())
        self.units: list[Unit] = []
        self.calls: list[tuple[Unit | None, nn.Module]] = []
        # Units in their forward: their modules that have not run yet.
        self._running: dict[Unit, set[nn.Module]] = {}
        self._backward: _Backward | None = None
        self.gathers, self._reductions = Gathers(self.watchers), Reductions(self.watchers)
        self._order_in_forward, self._order_in_backward = Order(), Order()
        self.input_nodes: defaultdict[Unit, weakref.WeakSet[Any]] = defaultdict(weakref.WeakSet)
        self.flat_params: defaultdict[FlatParameter, list[Unit]] = defaultdict(list)

    def __deepcopy__(self, memo: object) -> Schedule:
        # Without units: ``ShardedModule.__deepcopy__`` adds each as its module is copied.
        return Schedule(self.communicator, self._new_watchers)

    @property
    def is_busy(self) -> bool:
        """Whether a forward or a backward is running."""
        return bool(self.calls) or self._backward is not None

    def add(self, units: Iterable[Unit]) -> None:
        """Run units from now on: new ones, or those that an inner module's schedule has run."""
        for unit in units:
            self.units.append(unit)
            for flat_param in unit.flat_params:
                if flat_param not in self.flat_params:
                    flat_param.runners.make_latest(self)
                    if flat_param.state == "sharded":
                        self.watchers.on_freed(flat_param)
                self.flat_params[flat_param].append(unit)

    # -- forward ---------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit | None, module: nn.Module) -> None:
        """A call into a sharded module begins; the outermost one opens a pass.

        Args:
            unit: The module's unit, if it has one. The first of its modules makes it whole.
            module: The module.
        """
        if not self.calls:
            with recovering:  # which a thread of autograd's may be at
                if self._backward is not None:  # it failed, and such a thread still refers to it
                    self._recover()
            self._order_in_forward.begin()
            self.watchers.on_pass()
        self.calls.append((unit, module))
        if unit is None:
            return
        if unit in self._running:
            self.gathers.refresh(unit)
        else:
            self._running[unit] = set(unit.modules)
            self.gathers.make_whole(unit, then=self._order_in_forward.enter(unit))
            unit.install_leaves()
            unit.note_use()

    def post_forward(self, unit: Unit | None, module: nn.Module, *, failed: bool) -> None:
        """A call into a sharded module ends, by an exception if ``failed``.

        Args:
            unit: The module's unit, if it has one. The last of its modules releases it.
            module: The module.
            failed: Whether an exception ends it.
        """
        del self.calls[-1:]  # a slice, as it is empty after a Ctrl-C that was caught inside
        if unit is not None and (waiting_for := self._running.get(unit)) is not None:
            waiting_for.discard(module)
            if not waiting_for and not self.is_inside(unit):
                self._end_forward(unit)
        if not self.calls and failed:
            self._recover()
        elif not self.calls:
            for left in list(self._running):  # units of which not all modules ran
                self._end_forward(left)
            self.gathers.drop_prefetched()

    def interrupt(self) -> None:
        """An exception after which torch calls no forward hooks (Ctrl-C) has ended a forward."""
        # The outermost call may be over already, and its units not yet.
        if (self.calls or self._running) and torch_internals.current_backward() < 0:
            self.calls.clear()
            self._recover()

    def is_inside(self, unit: Unit) -> bool:
        """Whether a module of the unit is in its forward, so that the unit is whole."""
        return unit in map(itemgetter(0), self.calls)

    def recompute(self, unit: Unit | None) -> None:
        """A module's forward runs inside a backward, as activation checkpointing does.

        That backward takes the leaves out again and frees the copy, so no forward is opened.
        """
        backward = self._reach(unit)
        if unit is None:
            return
        backward.has_left.setdefault(unit)
        self.gathers.refresh(unit)
        if unit not in self._running:  # it is where a forward of it calls backward
            self.gathers.make_whole(unit, drops=False)  # this backward needs what is beside, too
            unit.install_leaves()

    def _end_forward(self, unit: Unit) -> None:
        """Put sharded parameters back after a unit's forward; free the whole copy, or keep it."""
        self._install_shards(unit)
        del self._running[unit]
        unit.note_use()
        # ZeRO-2 keeps the copy for the backward, or without gradients for the next forward.
        frees = unit.reshard_after_forward and not unit.is_kept_for_graph
        if frees and torch.is_grad_enabled() and self._order_in_backward.first is unit:
            self.gathers.keep(unit)  # the backward begins with it, and would gather it at once
        elif frees:
            unit.reshard()

    def _install_shards(self, unit: Unit) -> None:
        """Put a unit's sharded parameters back, but not where others that share them compute."""
        unit.install_shards()
        for user in chain(*map(self.flat_params.__getitem__, unit.flat_params)):
            if user.has_leaves_installed:
                user.install_leaves()

    # -- backward --------------------------------------------------------------------------------

    def pre_backward(self, unit: Unit | None) -> None:
        """The backward reaches a unit's outputs: make it whole, start the gather of the next.

        A module without a unit opens the backward as well: gradients of earlier ones may wait for
        the next backward, whichever units that goes through.
        """
        backward = self._reach(unit)
        if unit is None:
            return
        is_first = backward.has_left.get(unit) is None
        backward.has_left[unit] = False
        self.watchers.before_gradients(unit)
        if not unit.needs_backward_gather:
            return
        # With create_graph=True the backward is recorded, and its graph saves weights again. No
        # event tells when this graph is used for the last time.
        unit.is_kept_for_graph |= torch.is_grad_enabled()
        # Also one that is whole, kept after the forward or recomputed: the next gather is to start.
        if not unit.is_whole or (is_first and unit.reshard_after_forward):
            self.gathers.make_whole(unit, self._order_in_backward.enter(unit, is_first=is_first))
        unit.install_leaves()  # for a recomputation of modules inside the unit

    def leave(self, unit: Unit, node: Any) -> None:
        """The backward leaves a unit through the inputs of one of its calls, by their node.

        Until it has left the unit's other calls in its graph, gradients have not arrived.
        """
        backward = self._reach(unit)
        backward.leaving = unit
        self.input_nodes[unit].discard(node)
        if not any(map(torch_internals.runs_in_backward, self.input_nodes[unit])):
            backward.has_left[unit] = True
            self._reach(None)

    def _reach(self, unit: Unit | None) -> _Backward:
        """Note that the backward reaches ``unit``, or with ``None`` a place in no unit.

        The unit that it left last is finished then, unless it is ``unit`` itself.
        """
        backward = self._open_backward()
        left, backward.leaving = backward.leaving, None
        if left is not None and left is not unit:
            self._post_backward(backward, left)
        return backward

    def _post_backward(self, backward: _Backward, unit: Unit) -> None:
        """Free a unit after its backward, and reduce what no other unit has yet to add to."""
        backward.unsettled.update(dict.fromkeys(unit.flat_params))
        self._release(unit)
        # A unit that shares a flat parameter and was not reached yet may still be: that one waits.
        # So does one that another model has, too: to the end of the backward that began last.
        candidates = [f for f in unit.flat_params if len(f.runners.known) == 1]
        complete = [f for f in candidates if all(map(backward.has_left.get, self.flat_params[f]))]
        self._settle(backward, complete)

    def _release(self, unit: Unit) -> None:
        """Take a unit's leaves out of the modules after its backward, and free the whole copy."""
        if unit in self._running:  # a forward of it has called backward, and goes on
            return
        self._install_shards(unit)
        if unit.reshard_after_backward and not unit.is_kept_for_graph:
            unit.reshard()

    def note_arrival(self, flat_param: FlatParameter) -> None:
        """A local gradient arrives, perhaps before the backward has reached a unit of it."""
        backward, users = self._open_backward(), self.flat_params[flat_param]
        backward.unsettled.setdefault(flat_param)
        # If none of its units was reached before, all count as reached now. If one was, as with a
        # tied weight, the others do not: they may have no backward.
        if backward.has_left.keys().isdisjoint(users):
            backward.has_left.update(dict.fromkeys(users))

    def _settle(self, backward: _Backward, flat_params: Iterable[FlatParameter]) -> None:
        """Reduce flat parameters whose gradients are complete, or let those wait in ``.grad``."""
        synced = []
        for flat_param in flat_params:
            backward.unsettled.pop(flat_param, None)
            if (latest := flat_param.runners.latest()) is not self:  # which may have more to add
                latest.note_arrival(flat_param)
            elif self._syncs_gradients(flat_param):
                synced.append(flat_param)
            else:
                flat_param.leave_unreduced()
                self.watchers.on_unreduced(flat_param)
        if trained := [flat_param for flat_param in synced if flat_param.is_trainable]:
            self._reductions.start(trained)

    def _syncs_gradients(self, flat_param: FlatParameter) -> bool:
        return all(unit.syncs_gradients for unit in self.flat_params[flat_param])

    def _open_backward(self) -> _Backward:
        """The running backward; at its first event, it is noted here."""
        if self._backward is not None:  # one inside it (reentrant checkpointing) is a part of it
            return self._backward
        for flat_param, users in self.flat_params.items():
            if flat_param.runners.latest() is not self:
                flat_param.runners.make_latest(self)
            flat_param.stays_in_replica = not all(unit.averages_replicas for unit in users)
            # Also if this rank will have no gradients of it: all ranks must send the same dtype.
            if not self._syncs_gradients(flat_param):
                flat_param.sends_sums = True
        for unit in self._running:  # a forward of it calls backward, as a training_step may do
            unit.note_use()  # it may have thawed some
        close = functools.partial(self._close_backward)  # an object that only the engine keeps
        self._backward = _Backward(weakref.ref(close, self._recover))
        self._order_in_backward.begin()
        torch_internals.call_at_end_of_backward(close)
        factors = {f.name: f.divide_factor for f in self.flat_params if f.divide_factor is not None}
        self.watchers.before_backward(factors)
        return self._backward

    @torch_internals.skip_all_in_compiling
    def _close_backward(self) -> None:
        """End the backward: finish the units that it has not left, and let all reductions land."""
        backward = self._reach(None)
        # Units of which not all modules ran: a forward around this backward may write to them now.
        for unit in [unit for unit in self._running if not self.is_inside(unit)]:
            self._end_forward(unit)
        # Units whose inputs need no gradient are left here, in the order of the backward.
        for unit, has_left in list(backward.has_left.items()):
            if not has_left:
                backward.has_left[unit] = True
                self._post_backward(backward, unit)
            elif unit.has_leaves_installed:  # it was recomputed after it was left
                self._release(unit)
        # In one order: that in which gradients arrived may be another one on each rank.
        for flat_param in [f for f in self.flat_params if f in backward.unsettled]:
            self._settle(backward, [flat_param])
        # An earlier backward without sync may have gone through units that this one did not reach.
        waiting = [f for f in self.flat_params if f.may_take_waiting and self._syncs_gradients(f)]
        self._reduce_waiting(waiting)
        self.gathers.drop()
        self._reductions.land()
        for flat_param in self.flat_params:
            # Once in a backward that goes through two models which share it.
            flat_param.micro_batch += int(flat_param.runners.latest() is self)
        self._backward = None
        self._order_in_forward.begin()  # of a forward that goes on after a backward inside it
        self.watchers.on_backward_end()

    def reduce_waiting(self) -> None:
        """Reduce the local gradients that wait on any rank. Collective, between backwards."""
        self._reduce_waiting(self.flat_params)
        self._reductions.land()
        self.watchers.on_backward_end()

    def _reduce_waiting(self, candidates: Iterable[FlatParameter]) -> None:
        """Reduce those of ``candidates`` (the same on all ranks) that wait on any rank."""
        if flat_params := [flat_param for flat_param in candidates if flat_param.is_trainable]:
            any_rank = self.communicator.any_rank([f.has_local_gradients for f in flat_params])()
            for flat_param in compress(flat_params, any_rank):
                self._reductions.start([flat_param])

    # -- optimizer -------------------------------------------------------------------------------

    def after_optimizer_step(self, stepped: Collection[FlatParameter]) -> None:
        """Free the whole copies of parameters that were just stepped; gather those in use again.

        Args:
            stepped: The flat parameters of the optimizer's parameters; this runs some of them.
        """
        self.watchers.on_step()
        for unit in self.units:
            if unit.flat_params.keys().isdisjoint(stepped) and not unit.is_kept_for_graph:
                continue
            for flat_param in unit.flat_params:
                flat_param.end_step()
            if unit in self._running:
                self.gathers.refresh(unit)
            else:
                unit.reshard()

    def _recover(self, ending: object = None) -> None:
        """After an exception: forget what ran. A watcher ends what is in flight.

        A forward around a backward that failed goes on, as the user may catch the error there.

        Args:
            ending: That of the backward that failed, from the thread that was the last to refer to
                it; the next forward may have come before.
        """
        with recovering:
            if ending is not None and (not self._backward or self._backward.ending is not ending):
                return
            in_backward, self._backward = self._backward is not None, None
            self._running = self._running if self.calls else {}
            self.gathers, self._reductions = Gathers(self.watchers), Reductions(self.watchers)
            goes_on = {unit: unit in self._running for unit in self.units}
            self.watchers.on_failure(goes_on, in_backward=in_backward)
