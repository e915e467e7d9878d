"""Faults to put into the core on purpose, so that one can see whether the tests notice.

``pytest --fault=NAME`` runs with one of them in every rank process; the pytest process itself,
where most references are computed, stays sound. Each is as narrow as it can be: all ranks go on
alike, nothing hangs, and only a value or a number of bytes or runs is wrong.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import checkpoint as torch_checkpoint

from lightning_fsdp.core.engine import torch_internals
from lightning_fsdp.core.engine.communicator import Communicator, LocalRegion, Pending
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.home import FlatBuffer
from lightning_fsdp.core.engine.unit import Unit
from lightning_fsdp.core.host_memory import OffloadedHome
from lightning_fsdp.core.optimizers import optimizer_guard
from lightning_fsdp.core.sharded_module import ShardedModule
from tests.support import late_copies
from tests.support.breaking import (
    after_reductions_start,
    change_new_flat_params,
    change_reduced,
    fill_padding,
    forget_waits_for,
    has_sharded,
    parameters_of,
    replace_gathers_of_backward,
)

FAULTS: dict[str, Callable[[], None]] = {}


def inject(name: str) -> None:
    """Break the core in this process, for the rest of its life."""
    FAULTS[name]()


def _fault(function: Callable[[], None]) -> Callable[[], None]:
    FAULTS[function.__name__] = function
    return function


@_fault
def none() -> None:
    """Breaks nothing; shows that the way in which faults are put in does not fail by itself."""


# --- values of gradients ---


@_fault
def no_division_by_world_size() -> None:
    """Reduced gradients are sums over the ranks, not means."""
    change_reduced(lambda flat_param, shard: shard.mul_(flat_param.communicator.world_size))


@_fault
def gradients_times_3() -> None:
    """Reduced gradients are three times too large; Adam's steps hide it."""
    change_reduced(lambda flat_param, shard: shard.mul_(3))


@_fault
def reduction_without_communication() -> None:
    """Each rank takes its own gradients for the mean; right where ranks have the same data."""

    def reduce(self: Communicator, region: LocalRegion) -> Pending:
        start, stop = region.layout.shard_range(self.rank)
        shard = region.pack()[start:stop].to(region.dtype, copy=True)
        return Pending("a reduction that asks nobody", (), lambda: shard)

    Communicator.reduce = reduce


@_fault
def gradient_padding_of_ones() -> None:
    """The padding between reduced gradients holds ones, not zeros."""

    def fill(flat_param: FlatParameter, shard: Tensor) -> Tensor:
        fill_padding(flat_param, shard)
        return shard

    change_reduced(fill)


# --- values of parameters ---


@_fault
def gather_repeats_the_own_shard() -> None:
    """A gather puts this rank's own shard into every rank's slot."""

    def gather(self: Communicator, whole: Tensor, unit_name: str) -> Pending:
        slots = whole.view(self.world_size, -1)
        slots.copy_(slots[self.rank].clone())
        return Pending("a gather that asks nobody", (), lambda: whole)

    Communicator.gather = gather


@_fault
def every_rank_keeps_shard_0() -> None:
    """Sharding leaves every rank with the values of rank 0's shard."""

    def fill(flat_param: FlatParameter, wholes: list[Tensor]) -> None:
        region = torch.zeros(flat_param.layout.numel, dtype=flat_param.shard.dtype)
        for slot, whole in zip(flat_param.layout.slots, wholes, strict=True):
            region[slot.offset : slot.offset + slot.numel] = whole.reshape(-1)
        flat_param.shard.copy_(region[: flat_param.layout.shard_numel])

    change_new_flat_params(fill)


@_fault
def padding_of_ones() -> None:
    """The padding between parameters holds ones, not zeros."""
    change_new_flat_params(lambda flat_param, wholes: fill_padding(flat_param, flat_param.shard))


@_fault
def backward_without_gather() -> None:
    """A backward finds the memory of its parameters, but zeros in all slots except its own."""

    def fill(communicator: Communicator, whole: Tensor) -> None:
        slots = whole.view(communicator.world_size, -1)
        mine = slots[communicator.rank].clone()
        slots.zero_()
        slots[communicator.rank] = mine

    replace_gathers_of_backward(fill)


@_fault
def backward_on_the_copy_of_forward() -> None:
    """A backward computes with what its forward gathered; right while nobody writes in between."""
    free = FlatBuffer.free

    def free_in_backward(self: FlatBuffer) -> None:
        if torch_internals.current_backward() >= 0:
            free(self)

    FlatBuffer.free = free_in_backward
    replace_gathers_of_backward(lambda communicator, whole: None)


# --- collectives in flight; over the groups of tests/support/worst_case.py only ---


@_fault
def gathers_are_not_waited_for() -> None:
    """A forward computes with a whole copy that is still on its way."""
    forget_waits_for("gather")


@_fault
def reductions_are_used_on_arrival() -> None:
    """A reduced gradient is divided and handed out while it is still on its way."""
    forget_waits_for("reduction")


@_fault
def means_over_replicas_are_used_on_arrival() -> None:
    """What comes out of the mean over replicas is handed out while it is still on its way."""
    forget_waits_for("mean over replicas")


@_fault
def dropped_gathers_are_not_waited_for() -> None:
    """A gather that was started ahead and is not needed writes into memory that was freed."""

    original = Unit.reshard

    def reshard(self: Unit) -> None:
        for flat_param in self.flat_params:
            flat_param._gather.works = ()
        original(self)

    Unit.reshard = reshard


@_fault
def gradients_are_freed_while_they_travel() -> None:
    """The region of local gradients loses its memory as soon as its reduction was started."""
    after_reductions_start(lambda region: region.untyped_storage().resize_(0))


@_fault
def gradients_are_written_while_they_travel() -> None:
    """The region of local gradients is cleared as soon as its reduction was started."""
    after_reductions_start(lambda region: region.zero_())


@_fault
def arrivals_on_the_host_are_not_waited_for() -> None:
    """A gradient that comes to the host is handed out while it is still on its way."""
    late_copies.Event.synchronize = lambda self: None


@_fault
def shards_travel_without_staging() -> None:
    """A copy to the device reads the shard itself, which the host may write to meanwhile."""

    def to_device(self: OffloadedHome, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    OffloadedHome.to_device = to_device


# --- memory ---


@_fault
def nothing_is_freed() -> None:
    """Whole copies stay allocated for ever."""
    FlatBuffer.free = lambda self: None


@_fault
def checkpoint_does_nothing() -> None:
    """Activation checkpointing is a plain call: everything is stored, nothing computed again."""

    # One level below ``checkpoint``, which test modules have imported by name before this runs.
    def plain(*args: Any, **kwargs: Any) -> Any:
        yield

    class Plain:
        @staticmethod
        def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
            return function(*args)

    name = "_checkpoint_without_reentrant_generator"
    for inner in (name, f"{name}_impl"):  # torch 2.15 calls the second
        if hasattr(torch_checkpoint, inner):
            setattr(torch_checkpoint, inner, plain)
    torch_checkpoint.CheckpointFunction = Plain


# --- what surrounds a step ---


@_fault
def optimizer_steps_once() -> None:
    """Each optimizer of sharded parameters takes its first step; the later ones do nothing."""
    have_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def only_once(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def wrapped(self: Optimizer, closure: Any = None) -> Any:
            on_slices = isinstance(self, optimizer_guard.OnSlices)
            optimizer = self._optimizer if on_slices else self  # else another at every step
            if optimizer in have_stepped:
                return None
            if has_sharded(parameters_of(optimizer)):
                have_stepped.add(optimizer)
            return step(self, closure)

        return wrapped

    for cls in (torch.optim.SGD, torch.optim.Adam):  # AdamW inherits Adam's
        cls.step = only_once(cls.step)


@_fault
def zero_grad_does_nothing() -> None:
    """``zero_grad`` of optimizers and modules leaves the gradients of sharded parameters."""

    def keep_sharded(original: Any, parameters_in: Callable[[Any], list[Tensor]]) -> Any:
        def zero_grad(self: Any, set_to_none: bool = True) -> None:
            if not has_sharded(parameters_in(self)):
                original(self, set_to_none)

        return zero_grad

    Optimizer.zero_grad = keep_sharded(Optimizer.zero_grad, parameters_of)
    nn.Module.zero_grad = keep_sharded(nn.Module.zero_grad, lambda module: [*module.parameters()])


@_fault
def loading_does_nothing() -> None:
    """A state dict is taken for loaded, and the sharded parameters stay as they are."""

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        return nn.Module().load_state_dict({})  # no key missing, none unexpected

    ShardedModule.load_state_dict = load_state_dict


@_fault
def loading_an_optimizer_does_nothing() -> None:
    """A state dict is taken for loaded, and the optimizer of sharded parameters starts anew."""
    original = Optimizer.load_state_dict

    def load_state_dict(self: Optimizer, state_dict: Any) -> None:
        if not has_sharded(parameters_of(self)):
            original(self, state_dict)

    Optimizer.load_state_dict = load_state_dict
