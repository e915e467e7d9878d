"""A loss that a module keeps (``self.aux_loss = ...``) is an output of its unit too.

A backward may enter the unit there, before it reaches the unit's outputs, or without them. Losses
kept elsewhere, as in a list, are not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lightning_fsdp.core.engine.hooks import hooks_of
from lightning_fsdp.core.engine.unit import WeakModule


class KeptLosses:
    """Finds the computed tensors that modules keep as attributes since their last call.

    Args:
        keepers: The modules to look at.
    """

    def __init__(self, keepers: list[nn.Module]) -> None:
        self._keepers = list(map(WeakModule, keepers))

    def __call__(self) -> list[Tensor]:
        """Those not returned before, as a node needs one hook only."""
        kept = []
        for keeper in self._keepers:
            module = keeper()
            for value in module.__dict__.values() if module is not None else ():
                if not isinstance(value, Tensor) or value.grad_fn is None:
                    continue
                metadata: Any = value.grad_fn.metadata  # a property, which torch types as a method
                if self not in metadata:
                    metadata[self] = None
                    kept.append(value)
        return kept


def losses_kept_in(module: nn.Module) -> KeptLosses | None:
    """What finds the losses that a sharded module, and those inside without a unit, keep."""
    keepers = list(_keepers_in(module))
    return KeptLosses(keepers) if keepers else None


def _keepers_in(module: nn.Module) -> Iterator[nn.Module]:
    """A unit's modules but for those of torch, which keep nothing that they compute."""
    if not type(module).__module__.startswith("torch.nn."):
        yield module
    for child in module.children():
        hooks = hooks_of(child)
        if hooks is None or hooks.unit is None:
            yield from _keepers_in(child)
