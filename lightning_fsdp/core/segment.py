"""Parameters of one dtype laid end to end: the shard that stays, the whole copy that does not.

A :class:`Segment` is the sharded side. A :class:`WholeSegment` is what one unit sees of it: the
gathered copy, the leaves that stand in the modules while they compute, and the gradients that they
get. Weights tied across units are one segment that several units use:
each gathers it for itself, and all gradients end in the one shard.

                     main dtype                        compute dtype
    optimizer <-> parameters (ShardedTensor)      leaves (nn.Parameter) <-> module's forward
                     |  slices of                      |  views of
                  segment.shard  --- all-gather --->  whole.buffer
                     ^  slices of                      |  post-accumulate hook moves
                  parameter.grad <-- reduce-scatter -- whole.local_gradients
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_fsdp.config import PrecisionPolicy
from lightning_fsdp.core.flat_buffer import FlatBuffer
from lightning_fsdp.core.layout import SegmentLayout
from lightning_fsdp.core.local_gradients import LocalGradients
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
        local_gradients: What the unit's backward leaves here, in the reduce dtype.
    """

    def __init__(
        self,
        segment: Segment,
        sites: Sequence[Sequence[Site]],
        policy: PrecisionPolicy,
        *,
        in_pieces: bool,
    ) -> None:
        main = segment.shard
        self.segment = segment
        self.sites = sites
        self.buffer = FlatBuffer(
            segment.layout.numel, policy.param_dtype or main.dtype, main.device
        )
        self.leaves: list[nn.Parameter | None] = [
            nn.Parameter(self.buffer.view(slot), requires_grad=False) if places else None
            for slot, places in zip(segment.layout.slots, sites, strict=True)
        ]
        self.buffer.free()
        self.local_gradients = LocalGradients(
            segment.layout,
            segment.parameters,
            policy.reduce_dtype or self.buffer.flat.dtype,
            main.device,
            in_pieces=in_pieces,
        )
        self.hooked: set[int] = set()  # slots whose leaf has its gradient hook

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
