"""A loss that a module keeps (``self.aux_loss = ...``) is an output of its unit too.

A backward may enter the unit there, before its outputs or without them. What is kept elsewhere is
not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lightning_fsdp.core.engine.hooks import hooks_of
from lightning_fsdp.core.engine.unit import WeakModule


class KeptLosses:
    """What modules keep as attributes since their last call, and was computed."""

    def __init__(self, keepers: list[nn.Module]) -> None:
        self._keepers = list(map(WeakModule, keepers))

    def __call__(self) -> list[Tensor]:
        """Each of them once, also those that stay."""
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
    """Of a module that was sharded, as all inside of it: what it and its unit's modules keep."""
    keepers = list(_keepers_in(module))
    return KeptLosses(keepers) if keepers else None


def _keepers_in(module: nn.Module) -> Iterator[nn.Module]:
    """A unit's modules of other classes than torch's, which keep nothing that they compute."""
    if not type(module).__module__.startswith("torch.nn."):
        yield module
    for child in module.children():
        hooks = hooks_of(child)
        if hooks is None or hooks.unit is None:
            yield from _keepers_in(child)
