"""The face of access to gradients and weights, the same for every engine.

:mod:`lightning_fsdp.engines.gradients` has it for the project's own core; the engines over
torch give what they can through it, and :class:`~lightning_fsdp.GradientUnavailable` for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from lightning_fsdp.engines.gradients import (
    GradientFunction,
    GradientSet,
    GradientState,
    MicroBatchMode,
)


class Removable(Protocol):
    """What takes a hook off again."""

    def remove(self) -> None:
        """Stop calling the function."""


class OneGradient(Protocol):
    """The gradient of one parameter; see :class:`lightning_fsdp.engines.gradients.Gradient`."""

    name: str

    @property
    def state(self) -> GradientState:
        """``none``, ``local`` or ``reduced``."""

    def local(self) -> Tensor:
        """This rank's own, not reduced, original shape."""

    @property
    def shard(self) -> Tensor:
        """This rank's piece of the reduced gradient, ``(n,)``; may be empty."""

    def full(self, micro_batch: int | None = None) -> Tensor:
        """The reduced gradient, original shape. Collective."""


class OneWeight(Protocol):
    """One parameter; see :class:`lightning_fsdp.engines.gradients.Weight`."""

    name: str

    @property
    def shard(self) -> Tensor:
        """This rank's piece, ``(n,)``; may be empty."""

    def full(self) -> Tensor:
        """Whole, original shape. Collective."""


class GradientAccess(Protocol):
    """Gradients by original name; see :class:`lightning_fsdp.engines.gradients.Gradients`."""

    def names(self) -> list[str]:
        """Original names of all trainable parameters."""

    def __getitem__(self, name: str) -> OneGradient: ...

    def full(self, micro_batch: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """Name and whole reduced gradient, one unit at a time. Collective."""

    def shards(self, micro_batch: int | None = None) -> dict[str, Tensor]:
        """This rank's pieces by name."""

    def on_local(self, function: GradientFunction, *, edits: bool = True) -> Removable:
        """See each local gradient on arrival; without ``edits``, it is not to be written to."""

    def on_reduced(self, function: GradientFunction) -> Removable:
        """See each reduced gradient when it lands."""

    def micro_batches(self, mode: MicroBatchMode) -> AbstractContextManager[None]:
        """Choose how the backwards inside accumulate."""

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """Of all reduced gradients as one vector. Collective."""

    def dot(self, a: GradientSet, b: GradientSet = None) -> Tensor:
        """Inner product of two sets of gradients. Collective."""


class WeightAccess(Protocol):
    """Parameters by original name; see :class:`lightning_fsdp.engines.gradients.Weights`."""

    def names(self) -> list[str]:
        """Original names."""

    def __getitem__(self, name: str) -> OneWeight: ...

    def items(self) -> Iterable[tuple[str, OneWeight]]:
        """Name and parameter, of all."""

    def full(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole value, one unit at a time. Collective."""
