"""A tensor of which this rank holds one slice: a parameter, its gradient, its optimizer state.

The engine knows where the slice lies and what it belongs to. What a user may do with such a tensor
is up to the subclass in ``tensors/sharded_tensor.py``.

Note: gradients that wait
While a gradient waits to be reduced over all ranks, ``.grad`` holds a :class:`WaitingGradient`:

    own           this rank's own, from backwards that did not communicate
    of_replica    the mean over this rank's replica, from reductions that left out the others

They are kept nowhere else: setting ``.grad`` to ``None``, or zeroing it, drops what waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from lightning_fsdp.core.engine import torch_internals
from lightning_fsdp.core.engine.communicator import Communicator
from lightning_fsdp.core.engine.home import Home
from lightning_fsdp.core.engine.layout import FlatLayout, FlatSlice, Slot


@dataclass(eq=False)
class ShardSpec:
    """Which slice of which region a sharded tensor is. One per parameter, shared by its gradient.

    Attributes:
        name: Original name of the parameter; kept up to date when an outer module is sharded.
        index: Number of the parameter's slot in its flat parameter.
        layout: The layout of the flat parameter's region.
        communicator: The collectives of the sharding group.
        home: Where shards live, and how data gets there and back.
        slot: The parameter's place in the region.
        slice: The elements of the parameter that this rank owns.
        start: First element of this rank's shard, in the region.
        flat_param: Returns the ``FlatParameter`` that it is a part of, or ``None``.
    """

    name: str
    index: int
    layout: FlatLayout
    communicator: Communicator = field(repr=False)
    home: Home = field(repr=False)
    slot: Slot = field(init=False)
    slice: FlatSlice = field(init=False)
    start: int = field(init=False)
    flat_param: Callable[[], Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.slot = self.layout.slots[self.index]
        self.start = self.layout.shard_range(self.communicator.rank)[0]
        self.slice = self.layout.slice_of(self.slot, self.communicator.rank)
        self.flat_param = lambda: None

    def slice_of(self, whole: Tensor) -> Tensor:
        """This rank's ``(slice.numel,)`` elements of a whole tensor of the original shape."""
        return whole.detach().reshape(-1)[self.slice.start : self.slice.stop]

    def part_of(self, shard: Tensor) -> Tensor:
        """The parameter's elements in this rank's shard, ``(slice.numel,)``, sharing memory.

        Args:
            shard: The shard; or, where a reduction goes on between hosts (``ranks/hosts.py``),
                neighbouring shards end to end. So it begins at a multiple of its own length.
        """
        numel = max(shard.numel(), 1)
        offset = self.slot.offset - self.start // numel * numel
        return shard[max(offset, 0) : max(offset + self.slot.numel, 0)]


class Sharded(Tensor):
    """A tensor that shows the shape of the whole, and holds this rank's slice."""

    _local: Tensor  # (slice.numel,), this tensor's dtype and device; a view of the shard
    spec: ShardSpec

    @staticmethod
    def __new__(cls, local: Tensor, spec: ShardSpec, *, requires_grad: bool = False) -> Self:  # noqa: D102
        sharded: Self = torch_internals.wrap_without_storage(  # type: ignore[assignment]
            cls, spec.slot.shape, local, requires_grad
        )
        sharded._local, sharded.spec = local, spec
        return sharded


class WaitingGradient(Sharded):
    """The gradient of one parameter that waits to be reduced. It is empty when it is made.

    To users it is the ``UnreducedGradient`` of ``tensors/unreduced_gradient.py``.
    """

    own: Tensor | None = None  # sum of this rank's own: original shape, reduce dtype
    of_replica: Tensor | None = None  # sum of means over the replica: (n,), reduce dtype
    is_used: bool = False  # whether this rank had gradients in ``of_replica``
    prior: Sharded | None  # reduced gradient of earlier micro-batches, which the rest is added to


MakeWaiting = Callable[[Sharded], WaitingGradient]


def waiting_gradient(parameter: Sharded) -> WaitingGradient | None:
    """The gradient that waits in ``.grad`` to be reduced, if one does."""
    present = parameter.grad
    return present if isinstance(present, WaitingGradient) else None


def let_wait(parameter: Sharded, make: MakeWaiting) -> WaitingGradient:
    """The gradient that waits in ``.grad``, made and put there if none does."""
    if (waiting := waiting_gradient(parameter)) is None:
        parameter.grad = waiting = make(parameter)
    return waiting
