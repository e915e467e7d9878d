"""Recomputes units in the backward, and compiles them: before sharding, whatever the engine.

    activation_checkpointing   ``forward`` of a unit keeps its inputs alone, and runs again later
    compile                    ``module.compile()``, hooks of sharding included

No module is wrapped, so that names stay what they are. A unit that encloses other units is left
alone: its forward is theirs, and would be computed once more for each level.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
import sys
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from lightning_fsdp.core.engine.structures import parts_of
from lightning_fsdp.engines import torch_internals
from lightning_fsdp.units import UnitSelector, find_units

_MARK = "_lightning_fsdp_call"  # on each module that was changed here


@dataclass
class _Change:
    """What :func:`undo` takes back from a module."""

    has_forward: bool = False  # an own ``forward`` of this file
    forward: Callable[..., Any] | None = None  # that of the user, if the module had an own one
    is_compiled: bool = False


def apply(
    root: nn.Module,
    units: UnitSelector,
    *,
    checkpointing: Sequence[str] | bool | None,
    compiles: bool,
) -> None:
    """Change how units are called.

    Args:
        root: The module, whole.
        units: How units are found.
        checkpointing: ``True``: every unit; or the names of classes.
        compiles: Compile every unit; one that is compiled already is left so.

    Raises:
        ValueError: There is no module of such a class; or one would count its batches twice.
    """
    if not checkpointing and not compiles:
        return
    found = {module: None for _, modules in find_units(root, units) for module in modules}
    innermost = [m for m in found if sum(inner in found for inner in m.modules()) == 1]
    recomputed = innermost if checkpointing is True else _of_classes(root, checkpointing or ())
    _refuse_what_counts_calls(root, recomputed)
    for module in recomputed:
        change = module.__dict__.setdefault(_MARK, _Change())
        change.has_forward, change.forward = True, module.__dict__.get("forward")
        # A bound method, so that a deep copy of the module calls itself.
        module.__dict__["forward"] = MethodType(_recomputing(change.forward), module)
    for module in innermost if compiles else ():
        if not torch_internals.is_compiled(module):
            module.__dict__.setdefault(_MARK, _Change()).is_compiled = True
            module.compile()


def undo(root: nn.Module) -> None:
    """Take back what :func:`apply` did; nothing happens to a module without."""
    for module in root.modules():
        change: _Change | None = module.__dict__.pop(_MARK, None)
        if change is None:
            continue
        if change.has_forward:
            del module.__dict__["forward"]
        if change.forward is not None:
            module.__dict__["forward"] = change.forward
        if change.is_compiled:
            torch_internals.forget_compiled(module)


def _recomputing(own: Callable[..., Any] | None) -> Callable[..., Any]:
    # Without transformers there are none.
    caches = getattr(sys.modules.get("transformers.cache_utils"), "Cache", ())

    def without(argument: Any) -> Any:
        """Of a cache nothing: each forward appends its keys to it, also the one in the backward."""
        if not isinstance(argument, caches) or not torch.is_grad_enabled():
            return argument
        if argument.get_seq_length() > 0:
            raise ValueError(
                "activation_checkpointing: expected a cache (past_key_values) without keys, got "
                "one with some (of prefix tuning, or of a call before), to which the forward in "
                "the backward would append once more. Train without activation_checkpointing, or "
                "without a cache."
            )
        return None

    def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        args = tuple(map(without, args))
        kwargs = {name: without(value) for name, value in kwargs.items()}
        function = own if own is not None else partial(type(module).forward, module)
        # What is compiled needs nothing held, and has no state.
        holds = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        call = _Repeatable(function, args, kwargs) if holds else partial(function, **kwargs)
        # Without keywords: ``checkpoint`` would take those that it has itself, such as ``debug``.
        return checkpoint(call, *args, use_reentrant=False)

    return forward


class _Repeatable:
    """A call of a forward that may write to lists, mappings and dataclasses that it is passed.

    The first time it writes to the caller's. When it runs again, in a backward, these hold what
    came after; so then it gets others, with what they held at first.
    """

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self._function = function
        # Without the tensors that are arguments themselves: ``checkpoint`` saves them as autograd
        # does, so that hooks may move them elsewhere.
        self._held = [None if isinstance(value, Tensor) else _copied(value) for value in args]
        self._named = _copied(kwargs)
        self._given: dict[str, Any] | None = kwargs  # the caller's, until it has run

    def __call__(self, *args: Any) -> Any:
        kwargs, self._given = self._given, None
        if kwargs is None:
            pairs = zip(args, self._held, strict=True)
            args = tuple(new if isinstance(new, Tensor) else _copied(old) for new, old in pairs)
            kwargs = _copied(self._named)
        return self._function(*args, **kwargs)


def _copied(value: Any) -> Any:
    """The same tensors, and whatever else, in new lists, mappings and dataclasses."""
    if isinstance(value, tuple):
        parts = [_copied(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if not is_dataclass and not isinstance(value, (list, MutableMapping)):
        return value
    copied = copy.copy(value)
    # Fields of frozen dataclasses, too.
    put = operator.setitem if isinstance(value, (list, MutableMapping)) else object.__setattr__
    for key, part in zip(*parts_of(value), strict=True):
        put(copied, key, _copied(part))
    return copied


def _of_classes(root: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    wanted = set(names)
    chosen = [module for module in root.modules() if type(module).__name__ in wanted]
    missing = wanted - {type(module).__name__ for module in chosen}
    if missing:
        present = sorted({type(module).__name__ for module in root.modules() if module is not root})
        raise ValueError(
            f"activation_checkpointing: expected classes that occur in {type(root).__name__}, got "
            f"{sorted(missing)}. Choose from {present}."
        )
    return chosen


def _refuse_what_counts_calls(root: nn.Module, recomputed: Sequence[nn.Module]) -> None:
    inside = {inner for module in recomputed for inner in module.modules()}
    for name, module in root.named_modules():
        changed = _changed_by_each_call(module) if module in inside else None
        if changed is not None:
            raise ValueError(
                f"activation_checkpointing: {name!r} ({type(module).__name__}) would take each "
                f"batch into its {changed} twice, as its forward runs twice. Name the classes to "
                "recompute without it: activation_checkpointing=[...]."
            )


def _changed_by_each_call(module: nn.Module) -> str | None:
    if isinstance(module, _NormBase) and module.track_running_stats:
        return "running statistics"
    return "spectral norm's estimate" if torch_internals.estimates_spectral_norm(module) else None
