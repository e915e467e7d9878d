"""Sharded parameters as an optimizer over whole tensors sees them: who holds and steps what."""

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
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor
from lightning_fsdp.core.torch_internals import has_values

NOBODY = -1


class Slices:
    """How parameters are cut: by this core. Engines over torch's FSDPs derive their own way."""

    def is_sharded(self, parameter: Tensor) -> bool:
        """Others stay as they are: every rank has and steps them."""
        return isinstance(parameter, ShardedTensor)

    def cut(self, parameter: Any) -> tuple[str, Communicator, Cut]:
        """Its name in ``named_parameters()``, over which ranks it is cut, and who holds what."""
        spec: ShardSpec = parameter.spec
        slices = [spec.layout.slice_of(spec.slot, r) for r in range(spec.layout.shard_world_size)]
        ranges = tuple((piece.start, piece.stop) for piece in slices)
        return spec.name, spec.communicator, Cut(tuple(parameter.shape), ranges)

    def local(self, tensor: Any) -> Tensor:
        """``(n,)``, what this rank holds of a parameter or its gradient, sharing memory."""
        local: Tensor = tensor.to_local()
        return local

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """The reduced gradient."""
        return parameter.grad

    def sharded(self, parameter: Any, local: Tensor) -> Tensor:
        """What stands for state of a parameter of which this rank has ``local``, ``(n,)``."""
        return ShardedTensor(local, parameter.spec)

    def unsharded(self, value: Any) -> Any:
        """``(n,)``, what this rank has of such state; anything else is returned."""
        return value.to_local() if isinstance(value, ShardedTensor) else value

    def check(self, parameters: Sequence[Tensor]) -> None:
        """Raise if a gradient is not reduced. Here, whoever watches the optimizer does."""


@dataclass(eq=False)
class Piece:
    """A parameter of the optimizer, sharded.

    Attributes:
        parameter: The user's.
        name: As in ``named_parameters()``.
        cut: Who holds what.
        communicator: The ranks that it is cut over.
        owner: The rank that steps it; of a slice that each rank steps by itself, this one.
        local: ``(n,)``, this rank's elements.
        is_slice: Each rank steps its own.
        blocks: Where in the whole the tensors are that are stepped; ``None``: it is one.
        whole: The owner's, of the original shape: over ``local``, if that is all of it. Of a slice,
            that.
        stepped: What is stepped: the whole, or its blocks, sharing its memory.
        seen: Of ``local``, when the whole was the same.
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
        """Let the owner have the whole."""
        flat = self.local.new_empty(self.cut.numel) if self.is_cut else self.local.detach()
        self.whole = flat.view(self.cut.shape)
        self.stepped = tuple(map(nn.Parameter, self._places()))

    def set_gradient(self, gradient: Tensor | None) -> None:
        """Of what is stepped; the whole's, of the original shape."""
        parts = [None] * len(self.stepped) if gradient is None else blocks_of(gradient, self.blocks)
        for parameter, part in zip(self.stepped, parts, strict=True):
            parameter.grad = part

    def settle(self) -> None:
        """Bring what the step made back to its place, where it set ``parameter.data``."""
        for parameter, place in zip(self.stepped, self._places(), strict=False):
            if has_values(place) and parameter.data_ptr() != place.data_ptr():
                place.copy_(parameter.detach())
                parameter.data = place

    def _places(self) -> Sequence[Tensor]:
        return [] if self.whole is None else blocks_of(self.whole, self.blocks)

    @property
    def is_here(self) -> bool:
        """Whether this rank owns it."""
        return self.owner == self.communicator.rank

    @property
    def is_cut(self) -> bool:
        """Whether others than the owner hold elements."""
        return self.cut.num_held(self.owner) < self.cut.numel
