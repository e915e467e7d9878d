"""Access to gradients and weights, the same for every engine.

:mod:`lightning_fsdp.engines.gradients` has it for the project's own core; the engines over
torch give what they can through it, and :class:`~lightning_fsdp.GradientUnavailable` for the rest.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

from lightning_fsdp.engines.by_name import Weights
from lightning_fsdp.engines.gradients import Gradients
from lightning_fsdp.engines.native_access import NativeGradients, NativeWeights

GradientAccess: TypeAlias = Gradients | NativeGradients
WeightAccess: TypeAlias = Weights | NativeWeights


class Removable(Protocol):
    """What takes a hook off again."""

    def remove(self) -> None:
        """Stop calling the function."""
