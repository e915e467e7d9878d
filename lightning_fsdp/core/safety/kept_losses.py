"""A loss that a module keeps (``self.aux_loss = ...``) is an output of its unit too.

A backward may enter the unit there, before it reaches the unit's outputs, or without them. Losses
kept elsewhere, as in a list, are not seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from lightning_fsdp.core.engine.hooks import hooks_of
from lightning_fsdp.core.engine.unit import WeakModule


def losses_kept_in(module: nn.Module) -> Callable[[], list[Tensor]]:
    """What finds the losses that a sharded module, and those inside without a unit, keep."""
    keepers = list(map(WeakModule, _keepers_in(module)))
    return functools.partial(_kept_by, keepers) if keepers else list


def _kept_by(keepers: Sequence[WeakModule]) -> list[Tensor]:
    """The tensors with a graph that modules have as attributes now, of earlier calls as well."""
    modules = [module for keeper in keepers if (module := keeper()) is not None]
    values = (value for module in modules for value in module.__dict__.values())
    return [v for v in values if isinstance(v, Tensor) and v.grad_fn is not None]


def _keepers_in(module: nn.Module) -> Iterator[nn.Module]:
    """A unit's modules but for those of torch, which keep nothing that they compute."""
    if not type(module).__module__.startswith("torch.nn."):
        yield module
    for child in module.children():
        hooks = hooks_of(child)
        if hooks is None or hooks.unit is None:
            yield from _keepers_in(child)
