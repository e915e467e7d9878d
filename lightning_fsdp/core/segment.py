"""Parameters of one dtype laid end to end: the shard that stays, the whole copy that does not.

A :class:`Segment` is the sharded side. A :class:`WholeSegment` is what one unit sees of it: the
gathered copy, the leaves that stand in the modules while they compute, and the region in which
local gradients are collected. Weights tied across units are one segment that several units use:
each gathers it for itself, and all gradients end in the one shard.

                     main dtype                        compute dtype
    optimizer <-> parameters (ShardedTensor)      leaves (nn.Parameter) <-> module's forward
                     |  slices of                      |  views of
                  segment.shard  --- all-gather --->  whole.buffer
                     ^  slices of                      |  post-accumulate hook copies
                  parameter.grad <-- reduce-scatter -- whole.region
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_fsdp.config import PrecisionPolicy
from lightning_fsdp.core.flat_buffer import FlatBuffer
from lightning_fsdp.core.layout import SegmentLayout
from lightning_fsdp.core.sharded_tensor import ShardedTensor
from lightning_fsdp.core.unreduced_gradient import UnreducedGradient


@dataclass(frozen=True)
class Site:
    """Where a parameter is registered: ``module._parameters[name]``."""

    module: nn.Module
    name: str

    def put(self, parameter: Tensor) -> None:
        """Register ``parameter`` here."""
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.name] = parameter  # type: ignore[assignment]
        else:  # modules that keep lists of their weights (nn.RNNBase) watch their attributes
            setattr(self.module, self.name, parameter)


@dataclass(eq=False)
class Segment:
    """Parameters of one dtype in one flat region, of which this rank owns one shard.

    Attributes:
        layout: Their places in the region.
        shard: ``(layout.shard_numel,)``, main dtype; padding holds zeros.
        parameters: The user's own ``nn.Parameter`` objects, one per slot; slices of ``shard``.
    """

    layout: SegmentLayout
    shard: Tensor
    parameters: list[ShardedTensor]


class WholeSegment:
    """A segment as one unit sees it: the whole copy, its leaves, its local gradients.

    Attributes:
        segment: The sharded side.
        sites: Per slot, where the unit's modules register the parameter; empty: not used here.
        buffer: ``(layout.numel,)``, compute dtype.
        leaves: Per slot, the permanent autograd leaf, a view of ``buffer``; ``None``: not used.
        region: ``(layout.numel,)``, reduce dtype: local gradients, or ``None``. Between an unsynced
            backward and the next, only the stand-ins in ``.grad`` keep it alive.
    """

    def __init__(
        self, segment: Segment, sites: Sequence[Sequence[Site]], policy: PrecisionPolicy
    ) -> None:
        main = segment.shard
        self.segment = segment
        self.sites = sites
        self.buffer = FlatBuffer(
            segment.layout.numel, policy.param_dtype or main.dtype, main.device
        )
        self._reduce_dtype = policy.reduce_dtype or self.buffer.flat.dtype
        self.leaves: list[nn.Parameter | None] = [
            nn.Parameter(self.buffer.view(slot), requires_grad=False) if places else None
            for slot, places in zip(segment.layout.slots, sites, strict=True)
        ]
        self.buffer.free()
        self.region: Tensor | None = None
        self.hooked: set[int] = set()  # slots whose leaf has its gradient hook
        self._arrived: set[int] = set()  # slots whose part of ``region`` holds a gradient
        self._region_between: weakref.ref[Tensor] | None = None
        self._stand_ins: dict[int, weakref.ref[UnreducedGradient]] = {}

    def uses(self) -> Iterator[tuple[int, ShardedTensor, nn.Parameter]]:
        """Slot, sharded parameter and leaf of each parameter that the unit uses."""
        for index, leaf in enumerate(self.leaves):
            if leaf is not None:
                yield index, self.segment.parameters[index], leaf

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter used here requires a gradient now."""
        return any(leaf.requires_grad for _, _, leaf in self.uses())

    def fill_own_slot(self, rank: int) -> None:
        """Copy the shard into its slot of the buffer, casting on the way."""
        start, stop = self.segment.layout.shard_range(rank)
        with torch.no_grad():
            self.buffer.flat[start:stop].copy_(self.segment.shard)

    def add_gradient(self, index: int, gradient: Tensor) -> None:
        """Take in one parameter's local gradient, casting on the way.

        Args:
            index: The parameter's slot.
            gradient: Original shape, compute dtype; owned by this call, which may keep it.
        """
        if self._fills_region(gradient):
            self.region = gradient.view(-1)
            self._arrived, self._stand_ins = {index}, {}
            return
        self._open_region()
        assert self.region is not None, "_open_region makes it"
        slot = self.segment.layout.slots[index]
        part = self.region.narrow(0, slot.offset, slot.numel).view(slot.shape)
        if index in self._arrived:
            part.add_(gradient)
        else:
            part.copy_(gradient)
            self._arrived.add(index)

    def seal_region(self) -> list[bool]:
        """Make the region ready to be reduced: zeros wherever no gradient is.

        Returns:
            Per slot, whether it holds a gradient.
        """
        self._open_region()
        assert self.region is not None, "_open_region makes it"
        for index, slot in enumerate(self.segment.layout.slots):
            if index not in self._arrived:
                self.region.narrow(0, slot.offset, slot.numel).zero_()
        return [index in self._arrived for index in range(len(self.leaves))]

    def take_region(self) -> Tensor:
        """Hand over the sealed region; this side forgets it, and ``.grad`` its stand-ins."""
        assert self.region is not None, "seal_region comes first"
        region, self.region = self.region, None
        for index in self._stand_ins:
            stand_in = self._stand_in_of(index)
            if stand_in is None:
                continue
            # Another unit that uses the same parameter may hold a region of its own here.
            stand_in.regions = [held for held in stand_in.regions if held is not region]
            if not stand_in.regions:
                self.segment.parameters[index].grad = stand_in.prior
        self._arrived, self._stand_ins = set(), {}
        return region

    def leave_unreduced(self) -> None:
        """End a backward without reduction: stand-ins in ``.grad`` now own the region."""
        if self.region is None:
            return
        for index in self._arrived:
            parameter = self.segment.parameters[index]
            stand_in = parameter.grad
            if not isinstance(stand_in, UnreducedGradient) or stand_in.is_cleared:
                prior = None if isinstance(stand_in, UnreducedGradient) else stand_in
                stand_in = UnreducedGradient(parameter.spec, parameter.to_local(), prior)  # type: ignore[arg-type]
                parameter.grad = stand_in
            if not any(held is self.region for held in stand_in.regions):
                stand_in.regions.append(self.region)
            self._stand_ins[index] = weakref.ref(stand_in)
        self._region_between = weakref.ref(self.region)
        self.region = None

    @property
    def has_local_gradients(self) -> bool:
        """Whether gradients wait here that were not reduced and not dropped."""
        return bool(self._arrived if self.region is not None else self._held_slots())

    def drop_gradients(self) -> None:
        """Forget local gradients of a step that failed."""
        self.region = None
        self._arrived, self._stand_ins, self._region_between = set(), {}, None

    def _fills_region(self, gradient: Tensor) -> bool:
        """Whether a gradient is laid out as the whole region would be, so that none is needed."""
        return (
            self.region is None
            and not self._held_slots()
            and gradient.numel() == self.segment.layout.numel
            and gradient.dtype == self._reduce_dtype
            and gradient.is_contiguous()
        )

    def _open_region(self) -> None:
        if self.region is not None:
            return
        self._arrived = self._held_slots()
        if self._arrived:
            assert self._region_between is not None, "stand-ins own a region"
            self.region = self._region_between()
            return
        self._stand_ins = {}
        layout = self.segment.layout
        self.region = torch.empty(
            layout.numel, dtype=self._reduce_dtype, device=self.buffer.flat.device
        )
        for start, stop in layout.padding():
            self.region[start:stop].zero_()

    def _held_slots(self) -> set[int]:
        # ``.grad`` is the one truth: what was set to None or zeroed there is gone here too.
        return {index for index in self._stand_ins if self._stand_in_of(index) is not None}

    def _stand_in_of(self, index: int) -> UnreducedGradient | None:
        stand_in = self._stand_ins[index]()
        if stand_in is None or stand_in.is_cleared:
            return None
        return stand_in if self.segment.parameters[index].grad is stand_in else None


def accumulate(parameter: ShardedTensor, gradient: ShardedTensor) -> None:
    """Add a reduced gradient to ``parameter.grad``, beside local gradients that may wait there."""
    present = parameter.grad
    if isinstance(present, UnreducedGradient) and not present.is_cleared:
        if present.prior is None:
            present.prior = gradient
        else:
            present.prior.add_(gradient)
    elif present is None or isinstance(present, UnreducedGradient):
        parameter.grad = gradient
    else:
        present.add_(gradient)
