"""Methods other than ``forward`` gather what the core has sharded, too."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_fsdp import config
from lightning_fsdp.core.engine.hooks import hooks_of


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let a method other than ``forward`` gather the module's parameters, too.

    Args:
        module: A sharded module.
        name: A method, e.g. ``generate`` or a Lightning ``training_step``, of the class or set on
            the module, which has precedence, as in Python.

    Raises:
        ValueError: The module is not sharded, or has no such method.
        TypeError: It is a generator function, or async: it would compute after it has returned.
    """
    _expect_sharded(module, "register_forward_method")
    method = getattr(module, name, None)
    if not callable(method):
        raise ValueError(
            f"register_forward_method: expected a method of {type(module).__name__}, got {name!r}. "
            "Pass the name of one, such as 'generate'."
        )
    config.check_computes_at_once("register_forward_method", method)
    # A function that was set on the module, not bound to it, is called as it is; copies share it.
    is_bound = getattr(method, "__self__", None) is module
    function = method.__func__ if is_bound else method

    @functools.wraps(function)
    def gathering(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        bound = functools.partial(function, self) if is_bound else function
        return call_as_forward(self, bound, *args, **kwargs)

    setattr(module, name, types.MethodType(gathering, module))  # a deepcopy binds it to the copy


def call_as_forward(
    module: nn.Module, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Call a function as if it were a sharded module's forward; inside one, as a part of it."""
    hooks = hooks_of(module)
    assert hooks is not None, "it was sharded"
    if hooks.unit is not None and hooks.schedule.is_inside(hooks.unit):
        return function(*args, **kwargs)
    if hooks.unit is not None:  # also an embedding's: only of its own forward is it known
        hooks.unit.needs_backward_gather = True
    try:
        args, kwargs = hooks.on_call(module, args, kwargs)
        output = function(*args, **kwargs)
    except BaseException:
        hooks.on_end(module, failed=True)
        raise
    return hooks.on_success(module, output)


def share_comm_ctx(modules: list[Any]) -> None:
    """Do nothing: offered for code written for torch's FSDP2. There are no streams to share.

    Args:
        modules: Sharded modules.

    Raises:
        ValueError: One of them is not sharded.
    """
    for module in modules:
        _expect_sharded(module, "share_comm_ctx")


def _expect_sharded(module: Any, where: str) -> None:
    if not isinstance(module, nn.Module) or hooks_of(module) is None:
        raise ValueError(
            f"{where}: expected a sharded module, got {type(module).__name__}. Call fully_shard "
            "first."
        )
