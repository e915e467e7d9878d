"""Parameters of one dtype laid end to end: a shard that stays, a whole copy that comes and goes.

                     main dtype                        compute dtype
    optimizer <-> parameters (Sharded)            leaves (nn.Parameter) <-> module's forward
                     |  slices of                      |  views of
                     shard  ------ all-gather ------>  buffer
                     ^  slices of                      |  post-accumulate hook moves
                  parameter.grad <-- reduce-scatter -- local gradients

With offload, the left side is on the host and the right side on the device that computes.

The whole copy and the gradients have a state each:

    copy         sharded --unshard--> gathering --wait--> unsharded --reshard--> sharded
    gradients    none --arrive--> local --reduce--> reducing --land--> none (they are in ``.grad``)

Being in flight is a state of its own: in ``gathering`` the buffer is allocated, its content is not
there yet, and somebody has to wait for it. A gather whose result is not wanted any more (a prefetch
that missed) is waited for before its buffer is freed: no transition skips the wait. The state of
the gradients is not stored; it follows from which there are.

A flat parameter belongs to one unit, or to several that share its weights. Those share the whole
copy and the leaves too, so autograd sums the gradients of all uses, and the sum is reduced once.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fsdp.config import PrecisionPolicy
from lightning_fsdp.core.engine import torch_internals
from lightning_fsdp.core.engine.communicator import LocalRegion, Pending, Stage
from lightning_fsdp.core.engine.home import FlatBuffer
from lightning_fsdp.core.engine.sharded import MakeWaiting, Sharded, let_wait, waiting_gradient
from lightning_fsdp.core.engine.watcher import GradientWatcher, Runners


@dataclass(eq=False)
class FlatParameter:
    """Parameters of one dtype in one flat region, of which this rank owns one shard.

    Attributes:
        name: Name of the first unit that uses it, for messages.
        shard: ``(layout.shard_numel,)``, main dtype, on the device of ``home``; padding holds
            zeros.
        parameters: The user's own ``nn.Parameter`` objects, one per slot; slices of ``shard``.
        policy: The dtypes of compute and reduction.
        layout: Where each parameter lies in the region.
        communicator: The collectives of the sharding group.
        home: Where the shard lives, and how data gets there and back.
        make_waiting: Makes the object that stands in ``.grad`` while a gradient waits to be
            reduced.
        buffer: ``(layout.numel,)``, compute dtype; allocated while there is a whole copy.
        holders: Who needs the whole copy; it is freed when nobody does.
        divide_factor: What the sum over all ranks is divided by; ``None``: their number.
        leaves: Per slot, the permanent autograd leaf, a view of ``buffer``.
        sends_sums: Whether the next reduction may take sums over several backwards. Set by the
            schedule, to the same on all ranks.
        stays_in_replica: Whether reductions leave out the mean over replicas, if there are any.
            Set by the schedule, to the same on all ranks.
        waits_for_mean: Whether the last reduction left it out, so that its result waits.
        micro_batch: Number of the running or next backward since the last step, counted by the
            schedule.
        state: State of the whole copy. ``sharded``: there is none, its storage has 0 bytes;
            ``gathering``: allocated, and the all-gather is in flight; ``unsharded``: readable.
        gradient_watchers: By the id of the handle that removes each.
        runners: The schedules that run this: one for each model that has it.
    """

    name: str
    shard: Tensor
    parameters: tuple[Sharded, ...]
    policy: PrecisionPolicy
    make_waiting: MakeWaiting
    divide_factor: float | None = None
    # With init=False, a deepcopy starts with fresh ones instead of sharing these.
    micro_batch: int = field(default=0, init=False)
    gradient_watchers: OrderedDict[int, GradientWatcher] = field(
        default_factory=OrderedDict, init=False
    )
    runners: Runners = field(default_factory=Runners, init=False)

    def __post_init__(self) -> None:
        spec = self.parameters[0].spec
        self.layout, self.communicator, self.home = spec.layout, spec.communicator, spec.home
        self.take_in(self.shard)

    def take_in(self, shard: Tensor) -> None:
        """Set up the state around a shard: at first, and again when the main dtype changes.

        Nobody may hold the whole copy, and no gradient may wait to be reduced.

        Args:
            shard: ``(layout.shard_numel,)``; the parameters are slices of it already.
        """
        layout, home, self.shard = self.layout, self.home, shard
        self.buffer = FlatBuffer(layout.numel, self.policy.param_dtype or shard.dtype, home)
        # This rank's slot of the buffer: the input of an in-place all-gather.
        self._own = self.buffer.flat[slice(*layout.shard_range(self.communicator.rank))]
        self.leaves = tuple(self._make_leaf(slot) for slot in range(len(self.parameters)))
        self.state: Literal["sharded", "gathering", "unsharded"] = "unsharded"
        self._gathered_version = -1
        self._gather = Pending("no gather", (), lambda: shard)
        self._free()  # the buffer was allocated for making its views
        self.sends_sums = self.stays_in_replica = self.waits_for_mean = False
        self._reduce_dtype = self.policy.reduce_dtype or self.buffer.flat.dtype
        self._arrived: dict[int, Tensor] = {}  # by slot, in this backward
        # Per slot: ``requires_grad`` when the leaf was last used, and whether it was true in any
        # use since the last reduction.
        self._trains = [leaf.requires_grad for leaf in self.leaves]
        self._trained = [False] * len(self.leaves)
        self.holders: set[object] = set()
        self._reduction: Pending | None = None
        self._stages: list[tuple[str, Stage]] = []  # still to follow it, each with its name

    def __repr__(self) -> str:
        return f"FlatParameter({self.name!r}, {self.state}, gradients {self.gradients})"

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParameter:
        """A copy of the shard and parameters, without whole copy, gradients and hooks."""
        parameters = copy.deepcopy(self.parameters, memo)
        with torch.inference_mode(False):
            shard = self.home.new_shard(self.shard.numel(), self.shard.dtype).copy_(self.shard)
        for parameter in parameters:
            parameter._local = parameter.spec.part_of(shard)
        return replace(self, shard=shard, parameters=parameters)

    # -- the whole copy --------------------------------------------------------------------------

    def unshard(self, holder: object) -> None:
        """Note that ``holder`` needs the whole copy, and gather it unless one is up to date."""
        if self.state != "sharded" and self.is_stale:
            self._free()
        self.holders.add(holder)
        if self.state != "sharded":
            return
        self.state = "gathering"
        try:
            self.runners.latest().watchers.before_whole(self)
            self.buffer.allocate()
            self.home.to_device(self.shard, self._own)  # casts on the way
            self._gather = self.communicator.regather(self.buffer.flat, self.name, self.is_stale)
        except BaseException:  # out of memory, or a rank is gone: as if it had not begun
            self.holders.discard(holder)
            self.state = "unsharded"  # so that freeing waits for nothing
            self._free()
            raise
        self._gathered_version = self.shard._version

    def wait_for_unshard(self) -> None:
        """Make the compute stream wait for the all-gather, if one is in flight."""
        if self.state != "gathering":
            return
        try:
            self._gather.wait()
        except BaseException:  # perhaps a Ctrl-C that came before the wait
            self._gathered_version = -1
            self.communicator.break_off()
            raise
        finally:  # whether or not it succeeded, nothing is in flight any more
            # gloo cancels a receive whose handle is dropped; otherwise it would write into memory
            # that is freed by then. No variable may hold a handle either: the traceback of an
            # exception keeps frames alive, and their variables with them.
            self._gather.works = ()
            self.state = "unsharded"

    def reshard(self, holder: object, *, is_stale: bool = False) -> None:
        """``holder`` is done with the whole copy; the last one to say so frees it.

        Args:
            holder: Who needed it.
            is_stale: The shard may have been written to without a change of its version counter.
        """
        self.holders.discard(holder)
        self._gathered_version = -1 if is_stale else self._gathered_version
        if not self.holders and self.state != "sharded":
            self._free()

    @property
    def is_stale(self) -> bool:
        """Whether the shard was written to after it was gathered."""
        return self._gathered_version != self.shard._version

    def end_step(self) -> None:
        """An optimizer has stepped: the whole copy is stale, whatever the version counter says.

        Not every kernel that optimizers use counts its writes.
        """
        self.micro_batch = 0
        self._gathered_version = -1 if self.is_trainable else self._gathered_version

    def note_use(self, slots: Iterable[int]) -> None:
        """See :meth:`Unit.note_use`."""
        for slot in slots:
            trains = self.leaves[slot].requires_grad  # set with the parameter's, or in the forward
            if trains != self._trains[slot]:
                self._trains[slot] = trains
                self.parameters[slot].requires_grad_(trains)
            self._trained[slot] |= trains

    # -- gradients -------------------------------------------------------------------------------

    @property
    def is_trainable(self) -> bool:
        """Whether a parameter required a gradient in its last use, or since the last reduction.

        One that was frozen in the meantime keeps the gradient that it has, as in torch.
        """
        return any(self._trained)

    @property
    def trained(self) -> str:
        """Names of the parameters that :attr:`is_trainable` is about; ranks agree on them.

        Made for every reduction: if these are all parameters, as a rule, it names only the first.
        """
        if all(self._trained):
            return f"{self.parameters[0].spec.name!r} and all beside it"
        return str([p.spec.name for slot, p in enumerate(self.parameters) if self._trained[slot]])

    @property
    def has_local_gradients(self) -> bool:
        """Whether gradients wait here that were neither reduced over all ranks nor dropped."""
        return bool(self._arrived) or any(waiting_gradient(p) is not None for p in self.parameters)

    @property
    def may_take_waiting(self) -> bool:
        """Whether ranks may have gradients that the next reduction takes; the same on all ranks."""
        return self.sends_sums or (self.waits_for_mean and not self.stays_in_replica)

    @property
    def sent_dtype(self) -> torch.dtype:
        """The dtype in which the next reduction sends gradients; their sum has the reduce dtype.

        Gradients of a narrower dtype are widened by the receiver, which loses nothing. Sums over
        several backwards are wide already, and are sent so. A single rank sends nothing.
        """
        made, wide = self.buffer.flat.dtype, self._reduce_dtype  # by autograd; for sums
        is_wide = self.sends_sums or self.communicator.world_size == 1
        return wide if is_wide or torch.promote_types(made, wide) != wide else made

    @property
    def gradients(self) -> Literal["none", "local", "reducing"]:
        """The state of the gradients that are not in ``.grad`` yet.

        ``local``: this rank's own, full shape; ``reducing``: the reduction, or a stage that follows
        it, is in flight.
        """
        return "reducing" if self._reduction else "local" if self.has_local_gradients else "none"

    def receive(self, slot: int, gradient: Tensor) -> None:
        """Take in one parameter's local gradient.

        Args:
            slot: The parameter's.
            gradient: Original shape, compute dtype; not used by the caller any more.

        Raises:
            RuntimeError: It is sparse.
        """
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"unit {self.name!r} (rank {self.communicator.mesh_rank}): expected a dense "
                f"gradient of {self.parameters[slot].spec.name!r}, got {gradient.layout}. Build "
                "the embedding with sparse=False, or pass the parameter in ignored_params."
            )
        self.runners.latest().note_arrival(self)
        for watcher in tuple(self.gradient_watchers.values()):
            with torch_internals.unrecorded():  # with create_graph=True, gradients are on
                gradient = watcher.on_local(self, slot, gradient)
        # A reduction may be in flight, as a path through the graph may end after it began. It must
        # not be waited for here: its stages start in the same order on all ranks, and which
        # gradients arrive may differ by rank.
        waiting = waiting_gradient(self.parameters[slot])
        if waiting is not None and waiting.own is not None:  # from earlier backwards
            waiting.own.add_(gradient)
        elif slot in self._arrived:
            self._arrived[slot] = self._arrived[slot].to(self._reduce_dtype) + gradient
        else:
            self._arrived[slot] = gradient  # as autograd made it, neither copied nor widened

    def reduce(self) -> list[bool]:
        """Start the reduction.

        Returns:
            Per slot, whether this rank has a gradient; empty where a later reduction takes the
            mean over all ranks.
        """
        self.land()  # an earlier one: there is at most one at a time
        with torch_internals.profiled("reduce", self.name):
            gradients = self._take_local()
            has_one = [slot in gradients for slot in range(len(self.parameters))]
            dtypes = self.sent_dtype, self._reduce_dtype
            region = LocalRegion(gradients, self.layout, self.name, self.home.empty, *dtypes)
            self._reduction = self.communicator.reduce(region)
        self._stages = [*self.communicator.after_reduction, *self.home.after_reduction]
        self.sends_sums = False
        return has_one

    def advance(self) -> bool:
        """Start the next stage of a reduction in flight; ``False`` if none is left."""
        if self._reduction is None or not self._stages:
            return False
        name, stage = self._stages.pop(0)
        with torch_internals.profiled(name, self.name):
            self._reduction = stage(self._reduction.wait(), self.name)
        return True

    def land(self) -> None:
        """Wait for the reduction, and add its result to the parameters' ``.grad``."""
        while self.advance():
            pass
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            return
        with torch_internals.profiled("wait_for_reduce", self.name), torch_internals.unrecorded():
            shard = reduction.wait()
            if self.divide_factor is not None:  # it has been divided by the number of ranks
                shard.mul_(self.communicator.mesh_size / self.divide_factor)
            shard = shard.to(self.shard.dtype)
            del reduction  # and with it the buffers that its result was computed from
            for slot, has_trained in enumerate(self._trained):
                if has_trained:
                    self._add(slot, self.parameters[slot].spec.part_of(shard))
        self._trained = list(self._trains)

    def leave_unreduced(self) -> None:
        """End a backward without communication: its gradients wait in ``.grad``, added up."""
        while self._arrived:
            slot, own = self._arrived.popitem()
            let_wait(self.parameters[slot], self.make_waiting).own = own.to(self._reduce_dtype)

    def abandon(self, holder: object, *, drops_gradients: bool) -> None:
        """After an exception: wait for what is in flight, and free the whole copy.

        Args:
            holder: Who does not need it any more; others may.
            drops_gradients: Whether gradients that wait to be reduced are dropped.

        Raises:
            RuntimeError: What was in flight has failed; everything is freed all the same.
        """
        if drops_gradients:
            self._take_local()
            for leaf in self.leaves:  # a Ctrl-C may have come before the hook that takes it over
                leaf.grad = None
        reduction, self._reduction, self._stages = self._reduction, None, []
        try:
            if reduction is not None:
                reduction.join()
        finally:
            self.reshard(holder)

    def _take_local(self) -> dict[int, Tensor]:
        """Take this rank's own gradients, by slot, out of here and out of ``.grad``."""
        gradients, self._arrived = self._arrived, {}
        for slot, parameter in enumerate(self.parameters):
            waiting = waiting_gradient(parameter)
            if waiting is not None and waiting.own is not None:
                gradients[slot], waiting.own = waiting.own, None
                if waiting.of_replica is None:  # else that goes on waiting in it
                    parameter.grad = waiting.prior
        return gradients

    def _make_leaf(self, slot: int) -> nn.Parameter:
        """A view of the parameter's slot in the buffer, original shape."""
        leaf = nn.Parameter(self.buffer.view(self.layout.slots[slot]))
        # Registered before the leaf may be frozen: torch refuses hooks on frozen tensors. It refers
        # to this weakly, as this owns the leaf, which owns the hook.
        hook = functools.partial(_take_over, weakref.ref(self), slot)
        leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self.parameters[slot].spec.flat_param = weakref.ref(self)
        leaf.requires_grad = self.parameters[slot].requires_grad
        return leaf

    def _free(self) -> None:
        try:
            self.wait_for_unshard()  # a gather in flight writes into the memory
        finally:
            if self.state == "unsharded":  # not if Ctrl-C came before the wait
                self.state = "sharded"
                self.buffer.free()
                self.runners.latest().watchers.on_freed(self)

    def _add(self, slot: int, shard: Tensor) -> None:
        """Add a reduced gradient to ``.grad``, where local ones may wait beside it."""
        watchers, parameter = tuple(self.gradient_watchers.values()), self.parameters[slot]
        for watcher in watchers:
            watcher.on_reduced(self, slot, shard)
        gradient, waiting = type(parameter)(shard, parameter.spec), waiting_gradient(parameter)
        total: Any = parameter.grad if waiting is None else waiting.prior
        if total is not None:
            total.add_(gradient)
        elif waiting is None:
            total = parameter.grad = gradient
        else:
            total = waiting.prior = gradient
        for watcher in watchers:
            watcher.on_added(self, slot, gradient, total)


@torch_internals.skip_all_in_compiling
def _take_over(flat_param: weakref.ref[FlatParameter], slot: int, leaf: Tensor) -> None:
    """Move a leaf's gradient out of its ``.grad`` as soon as autograd has summed it up."""
    owner, gradient, leaf.grad = flat_param(), leaf.grad, None
    if owner is not None and gradient is not None:
        # With create_graph=True it has a graph, which the reduction would keep alive.
        owner.receive(slot, gradient.detach() if gradient.requires_grad else gradient)
