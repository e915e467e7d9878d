"""Where a parameter or a buffer is registered."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Site:
    """A place in a module: ``module._parameters[name]``, or ``module._buffers[name]``."""

    module: nn.Module
    name: str

    def put(self, parameter: Tensor) -> None:
        """Register ``parameter`` here."""
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.name] = parameter  # type: ignore[assignment]
        else:  # modules that keep lists of their weights (nn.RNNBase) watch their attributes
            setattr(self.module, self.name, parameter)
