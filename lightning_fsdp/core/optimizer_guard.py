"""What an optimizer's step means for sharded parameters: who may take it, and what it ends.

Two hooks on every optimizer of the process, registered at the first sharding. Before a step:
optimizers that need whole tensors are refused, and gradients that were not reduced. After it:
whole copies kept since the forward (ZeRO-2) are freed, since their weights are no longer true.
A step that a gradient scaler skips writes nothing: they stay true, and serve the next forward.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_fsdp.core.checkpoint import slice_state
from lightning_fsdp.core.grad_scaler import support_grad_scaler
from lightning_fsdp.core.schedule import Schedule
from lightning_fsdp.core.sharded_tensor import ShardedTensor
from lightning_fsdp.core.unreduced_gradient import UnreducedGradient

# Every element's update depends on that element's history alone: slices train as the whole would.
_ELEMENTWISE = {
    *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "Adagrad", "Adadelta", "ASGD"),
}
_NEEDS_WHOLE_TENSORS = {
    *("LBFGS", "Adafactor", "Muon", "Lamb", "LAMB", "Lars", "LARS", "Shampoo", "SOAP"),
}

_warned: set[type[Optimizer]] = set()
_schedules: weakref.WeakSet[Schedule] = weakref.WeakSet()


def watch(schedule: Schedule) -> None:
    """Let optimizer steps be checked, and free this schedule's kept copies after them."""
    _register_once()
    _schedules.add(schedule)


@functools.cache
def _register_once() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    support_grad_scaler()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    sharded = [p for p in _parameters(optimizer) if isinstance(p, ShardedTensor)]
    if not sharded:
        return
    _check_class(optimizer, sharded[0])
    _shard_whole_state(optimizer, sharded)
    if _closure_of(args, kwargs) is not None:
        return  # its backward, which reduces the gradients, is still to come
    for parameter in sharded:
        gradient = parameter.grad
        if isinstance(gradient, UnreducedGradient) and not gradient.is_cleared:
            raise gradient.refusal("an optimizer step")
        if isinstance(gradient, UnreducedGradient):
            parameter.grad = None  # zeroed in place: there is nothing to step with


def _closure_of(args: Any, kwargs: Any) -> Any:
    # torch passes the arguments of ``step``, the optimizer first.
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def _shard_whole_state(optimizer: Optimizer, parameters: list[ShardedTensor]) -> None:
    """Slice state that was allocated before sharding, or loaded as whole tensors."""
    for parameter in parameters:
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        for key, value in state.items():
            is_whole = isinstance(value, torch.Tensor) and type(value) is not ShardedTensor
            if is_whole and (value.dim() > 0 or parameter.dim() == 0):
                state[key] = slice_state(parameter, key, value)


def _check_class(optimizer: Optimizer, example: ShardedTensor) -> None:
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    name = names[0]
    for ancestor in names:
        if ancestor in _NEEDS_WHOLE_TENSORS:
            raise NotImplementedError(
                f"{name}: expected an optimizer that updates each element by itself, got one that "
                f"needs whole tensors ({ancestor}), but {example.spec.name!r} is sharded: each "
                "rank holds a slice. Use AdamW, SGD or another elementwise optimizer, or leave its "
                "parameters unsharded with ignored_params."
            )
    if any(
        cls.__name__ in _ELEMENTWISE and cls.__module__.startswith("torch.optim")
        for cls in type(optimizer).__mro__
    ):
        return
    _warn_unknown(type(optimizer))


def _warn_unknown(cls: type[Optimizer]) -> None:
    if cls in _warned:
        return
    _warned.add(cls)
    warnings.warn(
        f"{cls.__module__}.{cls.__name__} is not known to lightning_fsdp. It steps slices of the "
        "parameters, which is right only if it updates each element by itself; an operation that "
        "needs a whole tensor raises.",
        stacklevel=5,
    )


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepped = {id(p) for p in _parameters(optimizer) if isinstance(p, ShardedTensor)}
    if stepped:
        for schedule in list(_schedules):
            schedule.after_optimizer_step(stepped)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
