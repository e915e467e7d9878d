"""Sharded parameters as a step over whole tensors sees them: which ranks hold and step what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_fsdp.core.engine.communicator import Communicator
from lightning_fsdp.core.engine.sharded import ShardSpec
from lightning_fsdp.core.optimizers.blocks import Blocks, blocks_of
from lightning_fsdp.core.optimizers.fingerprints import Fingerprint
from lightning_fsdp.core.optimizers.owners import Cut
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor, check_gradients
from lightning_fsdp.core.torch_internals import has_values

NOBODY = -1


class Sharding:
    """How this core shards parameters. Engines over torch's FSDPs derive classes for theirs."""

    def is_sharded(self, parameter: Tensor) -> bool:
        """Whether a parameter is sharded; every rank has and steps the others."""
        return isinstance(parameter, ShardedTensor)

    def cut(self, parameter: Any) -> tuple[str, Communicator, Cut]:
        """A parameter's name, the ranks that it is sharded over, and which of them holds what."""
        spec: ShardSpec = parameter.spec
        slices = [spec.layout.slice_of(spec.slot, r) for r in range(spec.layout.shard_world_size)]
        ranges = tuple((each.start, each.stop) for each in slices)
        return spec.name, spec.communicator, Cut(tuple(parameter.shape), ranges)

    def local(self, tensor: Any) -> Tensor:
        """What this rank holds of a parameter, or of its gradient, ``(n,)``, sharing memory."""
        local: Tensor = tensor.to_local()
        return local

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """This rank's slice of a parameter's reduced gradient, ``(n,)``; ``None`` without one."""
        return None if parameter.grad is None else self.local(parameter.grad)

    def sharded(self, parameter: Any, local: Tensor) -> Tensor:
        """State of a parameter as a sharded tensor, of which this rank has ``local``, ``(n,)``."""
        return ShardedTensor(local, parameter.spec)

    def unsharded(self, value: Any) -> Any:
        """What this rank has of a sharded tensor, ``(n,)``; any other value as it is."""
        return value.to_local() if isinstance(value, ShardedTensor) else value

    def check(self, parameters: Sequence[Any]) -> None:
        """Raise on every rank if a gradient on any is not reduced. Collective."""
        check_gradients(parameters, "an optimizer step")


@dataclass(eq=False)
class Owned:
    """A sharded parameter of an optimizer, and who steps it.

    Attributes:
        parameter: The user's parameter.
        name: As in ``named_parameters()``.
        cut: Which rank holds what.
        communicator: The ranks that it is cut over.
        owner: The rank that steps it; where each rank steps its slice, this rank.
        local: This rank's elements, ``(n,)``.
        is_slice: Whether each rank steps its slice, instead of one the whole.
        blocks: The blocks of the whole that are stepped one by one; ``None``: the whole.
        whole: What the owner steps, original shape: a view of ``local`` if the owner holds all
            elements, else a copy. ``None`` on other ranks. Where slices are stepped, the slice.
        stepped: What is stepped: ``whole``, or its blocks, sharing its memory.
        seen: Fingerprint of ``local`` when ``whole`` had the same values.
    """

    parameter: Tensor
    name: str
    cut: Cut
    communicator: Communicator
    owner: int
    local: Tensor
    is_slice: bool = False
    blocks: Blocks | None = None
    whole: Tensor | None = None
    stepped: tuple[nn.Parameter, ...] = ()
    seen: Fingerprint | None = None

    def allocate(self) -> None:
        """Allocate ``whole``, on the owner."""
        flat = self.local.new_empty(self.cut.numel) if self.is_cut else self.local.detach()
        self.whole = flat.view(self.cut.shape)
        self.stepped = tuple(map(nn.Parameter, self._places()))

    def set_gradient(self, gradient: Tensor | None) -> None:
        """Set ``.grad`` of what is stepped.

        Args:
            gradient: The gradient of the whole, original shape; ``None`` clears it.
        """
        parts = [None] * len(self.stepped) if gradient is None else blocks_of(gradient, self.blocks)
        for parameter, part in zip(self.stepped, parts, strict=True):
            parameter.grad = part

    def settle(self) -> None:
        """Copy results back into ``whole`` where the step has assigned to ``parameter.data``."""
        for parameter, place in zip(self.stepped, self._places(), strict=False):
            if has_values(place) and parameter.data_ptr() != place.data_ptr():
                place.copy_(parameter.detach())
                parameter.data = place

    def _places(self) -> Sequence[Tensor]:
        return [] if self.whole is None else blocks_of(self.whole, self.blocks)

    @property
    def is_here(self) -> bool:
        """Whether this rank is the owner."""
        return self.owner == self.communicator.rank

    @property
    def is_cut(self) -> bool:
        """Whether ranks other than the owner hold elements."""
        return self.cut.num_held(self.owner) < self.cut.numel
