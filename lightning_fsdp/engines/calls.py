"""Run any function as if it were a module's forward, whoever has sharded the module.

What a module's forward computes with, a function outside of it cannot read: parameters are pieces
there. :func:`call_with` lets each implementation do around the function what it does around the
forward: gather, and prepare the backward to gather and to reduce.

    module of the core       its hooks run around the function
    FSDP2's, FSDP1's, DDP's  it is called, with the function in the place of ``forward``
    a part of one of these   the function is called; of the core, as if by the unit it is a part of
    plain                    the function is called

A function that runs inside of such a call already finds everything whole, and is called. So does
the module itself, where a function calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from lightning_fsdp.config import check_computes_at_once
from lightning_fsdp.core.engine.hooks import hooks_of, unit_of
from lightning_fsdp.engines import torch_internals
from lightning_fsdp.engines.methods import call_as_forward

_Result = TypeVar("_Result")
_WRAPPERS = (FullyShardedDataParallel, DistributedDataParallel)
_CALLED = "_lightning_fsdp_called"  # on a module while a function runs as its forward


def call_with(
    module: nn.Module, function: Callable[..., _Result], *args: Any, **kwargs: Any
) -> _Result:
    """Run a function as if it were the module's forward.

    Inside, the module's parameters are whole and differentiable, also those that it shares with
    others. Their gradients are reduced as those of a forward are. Where the module is sharded, this
    is collective, as a forward is: call it on every rank, also on one that has nothing to compute.

    Args:
        module: Sharded by this package or by torch's FSDP1 or FSDP2, a part of such a module,
            wrapped by DDP, or plain. Hooks that were registered on a module of this package do not
            run; those of one that torch has sharded do, with what the function takes and returns.
        function: Reads the parameters through the module, as in ``lambda x: x @ head.weight.T``.
        args: Of the function. Hand over tensors that need gradients here and not in a closure: the
            parameters are freed, and their gradients reduced, as soon as the backward reaches the
            tensors here, otherwise at its end.
        kwargs: Likewise.

    Returns:
        What the function returns. Under a precision that casts a forward's inputs and outputs,
        those of the function are cast as well.

    Raises:
        RuntimeError: The module is a part of one that torch has sharded, whose forward is not
            running.
        TypeError: The function is a generator function, or async.
    """
    check_computes_at_once("call_with", function)
    around = _sharded_around(module)
    if around is not None:
        result: _Result = call_as_forward(around, function, *args, **kwargs)
        return result
    inner: nn.Module = module.module if isinstance(module, _WRAPPERS) else module
    if inner is module and not isinstance(module, FSDPModule):
        _require_running(module)
        return function(*args, **kwargs)
    if _CALLED in module.__dict__:
        return function(*args, **kwargs)

    def inside(*args: Any, **kwargs: Any) -> _Result:
        with torch_internals.staying_whole(module):
            return function(*args, **kwargs)

    with torch_internals.with_attribute(module, _CALLED, True), redirected(inner, inside):
        returned: _Result = module(*args, **kwargs)
    return returned


@contextmanager
def redirected(module: nn.Module, method: Callable[..., Any]) -> Iterator[None]:
    """Inside, calling the module runs another method in place of forward, with forward's hooks."""
    with ExitStack() as replaced:

        def forward(*args: Any, **kwargs: Any) -> Any:
            replaced.close()  # the method may call the module's own forward
            return method(*args, **kwargs)

        replaced.enter_context(torch_internals.with_attribute(module, "forward", forward))
        yield


def _sharded_around(module: nn.Module) -> nn.Module | None:
    """What makes whole what a module's forward reads itself, not by calling a unit."""
    if hooks_of(module) is not None:
        return module
    for part in _parts(module):
        unit = unit_of(part)
        if unit is not None and unit.modules:
            return unit.modules[0]
    return None


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        is_sharded = isinstance(child, (FSDPModule, FullyShardedDataParallel))
        if hooks_of(child) is None and not is_sharded:
            yield from _parts(child)


def _require_running(module: nn.Module) -> None:
    for part in _parts(module):
        for name, parameter in part.named_parameters(recurse=False):
            if torch_internals.is_idle(parameter):
                raise RuntimeError(
                    f"call_with: expected {type(module).__name__} to be sharded itself, or the "
                    f"forward of the module that it was sharded with to be running, got {name!r} "
                    "outside of it. Call it with the module that fully_shard or FSDP was given, or "
                    "inside of that module's forward."
                )
