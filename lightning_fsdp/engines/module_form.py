"""What a module tree looked like before a native FSDP changed it, so that it can be given back.

torch's FSDP1 puts wrappers around modules, FSDP2 gives them another class, both add hooks; torch
offers no way back. :class:`ModuleForm` remembers the tree and what was done to it:

    form = ModuleForm(module)
    ...                          FSDP changes the module
    form.seal()                  attributes and wrappers that are new now are FSDP's; what a module
                                 gets later is the user's, and stays
    with form.worn(values):      the tree as it was, holding other parameters, to save or to load
    form.restore(values)         the tree as it was, with its own parameter objects
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_fsdp.engines import torch_internals

# Where ``nn.Module`` keeps its hooks; children and parameters are put back separately.
_HOOK_TABLES = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


class _Form:
    """One module as it was when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self.cls = type(module)
        self.attributes = set(module.__dict__)
        self.children = dict(module._modules)
        self.parameters = dict(module._parameters)
        self.hooks = {name: dict(module.__dict__[name]) for name in _HOOK_TABLES}


class ModuleForm:
    """The tree below a module.

    Attributes:
        parameters: As they were, by original name; every parameter once.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._before = {module: _Form(module) for module in root.modules()}
        self._new_attributes: dict[nn.Module, set[str]] = {}
        self._plain: dict[nn.Module | None, nn.Module | None] = {}  # what is in a wrapper
        self.parameters = dict(root.named_parameters())
        self._name_of = {parameter: name for name, parameter in self.parameters.items()}

    def places(self) -> dict[nn.Module, dict[str, str]]:
        """Each module that holds parameters: its attributes, and the parameters' names."""
        return {
            module: {a: self._name_of[p] for a, p in form.parameters.items() if p is not None}
            for module, form in self._before.items()
            if any(p is not None for p in form.parameters.values())
        }

    def seal(self) -> None:
        """Note which attributes and wrappers are new since this was made."""
        for module, before in self._before.items():
            self._new_attributes[module] = set(module.__dict__) - before.attributes
            self._plain |= {module._modules[name]: m for name, m in before.children.items()}

    @contextmanager
    def worn(self, values: Mapping[str, nn.Parameter]) -> Iterator[nn.Module]:
        """The tree in its old form for a while, with other parameters in the places of its own.

        Args:
            values: By original name.

        Yields:
            The root. What happens to its parameters is forgotten.
        """
        present = {module: _Form(module) for module in (*self._before, *self._root.modules())}
        try:
            self._put_back(values)
            yield self._root
        finally:
            for module, form in present.items():
                module.__class__ = form.cls
                _fill(module._modules, form.children)
                _fill(module._parameters, form.parameters)
                for name, hooks in form.hooks.items():
                    _fill(module.__dict__[name], hooks)

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """The tree in its old form for good: the same parameter objects, with these values.

        Args:
            values: By original name; whole, plain tensors.
        """
        for name, parameter in self.parameters.items():
            parameter.grad = None
            parameter.data = values[name]
        self._put_back(self.parameters)
        for module, names in self._new_attributes.items():
            for name in names:
                module.__dict__.pop(name, None)
            torch_internals.list_flat_weights(module)

    def _put_back(self, values: Mapping[str, nn.Parameter]) -> None:
        for module in (*self._before, *self._root.modules()):
            for name, child in module._modules.items():
                module._modules[name] = self._plain.get(child, child)  # others are the user's
        for module, before in self._before.items():
            module.__class__ = before.cls
            for attribute, parameter in before.parameters.items():
                if parameter is not None:
                    module._parameters[attribute] = values[self._name_of[parameter]]
            for name in _HOOK_TABLES:
                table = module.__dict__[name]
                for key in [k for k in table if k not in before.hooks[name]]:
                    if _is_of_sharding(table[key]):  # some come as late as the first forward
                        del table[key]


def _is_of_sharding(hook: Any) -> bool:
    while isinstance(hook, functools.partial) or hasattr(hook, "hook"):
        hook = hook.func if isinstance(hook, functools.partial) else hook.hook
    origin = getattr(hook, "__module__", None) or ""
    return origin.startswith(("torch.distributed.", "lightning_fsdp.engines."))


def _fill(table: dict[str, Any], content: Mapping[str, Any]) -> None:
    table.clear()
    table.update(content)
