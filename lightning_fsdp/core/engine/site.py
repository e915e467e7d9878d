"""Where a parameter or a buffer is registered."""

from __future__ import annotations

import copy
import weakref
from typing import Any

from torch import Tensor, nn


class Site:
    """A place in a module: ``module._parameters[name]``, or ``module._buffers[name]``.

    It refers to the module weakly: what a module owns may refer to it, and goes with it.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = weakref.ref(module)
        self.name = name

    def __deepcopy__(self, memo: dict[int, Any]) -> Site:
        copied = copy.copy(self)
        if not self.is_gone:
            copied._module = weakref.ref(copy.deepcopy(self.module, memo))
        return copied

    @property
    def module(self) -> nn.Module:
        """The module, which is alive."""
        module = self._module()
        assert module is not None, "whoever asks has it"
        return module

    @property
    def is_gone(self) -> bool:
        """Whether the module was deleted."""
        return self._module() is None

    def get(self) -> Tensor | None:
        """The parameter that is registered here, if there is one."""
        return None if self.is_gone else self.module._parameters.get(self.name)

    def replace(self, old: Tensor, new: Tensor) -> bool:
        """Register ``new`` in the place of ``old``; ``False`` if something else is there."""
        module = self._module()
        if module is None or module._parameters.get(self.name) is not old:
            return False
        self.put(new)
        return True

    def put(self, parameter: Tensor) -> None:
        """Register ``parameter`` here."""
        module = self.module
        if type(module).__setattr__ is nn.Module.__setattr__:
            module._parameters[self.name] = parameter  # type: ignore[assignment]
        else:  # modules that keep lists of their weights (nn.RNNBase) watch their attributes
            setattr(module, self.name, parameter)
