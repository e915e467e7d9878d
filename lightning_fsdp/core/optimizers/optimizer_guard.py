"""What an optimizer's step means for sharded parameters: who may take it, and what it ends.

Two hooks on every optimizer of the process, registered at the first sharding. Before a step:
optimizers that need whole tensors are refused, and gradients that were not reduced; torch's own
get plain slices to compute on. After it: whole copies kept since the forward (ZeRO-2) are freed,
since their weights are no longer true. A step that a gradient scaler skips writes nothing: they
stay true, and serve the next forward.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
import warnings
import weakref
from collections.abc import Collection
from typing import Any

from torch import optim
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_fsdp.core import torch_internals
from lightning_fsdp.core.engine.schedule import Schedule
from lightning_fsdp.core.engine.sharded_tensor import ShardedTensor, ShardSpec
from lightning_fsdp.core.engine.unreduced_gradient import (
    UnreducedGradient,
    unreduced,
    zero_gradient,
)
from lightning_fsdp.core.optimizers.grad_scaler import support_grad_scaler
from lightning_fsdp.core.state.full_state import SCALARS, parameters_of, slice_state
from lightning_fsdp.core.tensors.slices import slices_beside

# Every element's update depends on that element's history alone: slices train as the whole would.
_ELEMENTWISE = {
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop),
    *(optim.Rprop, optim.Adagrad, optim.Adadelta, optim.ASGD),
}
# In lower case: packages spell them differently. Each takes norms, means, maxima or products over a
# parameter, or over all of them; read in the sources of pytorch_optimizer 4.1.
_NEEDS_WHOLE_TENSORS = {
    *("lbfgs", "adafactor", "adalite", "adalomo", "came", "emofact", "sm3"),  # rows and columns
    *("muon", "adamuon", "distributedmuon", "adago", "scion", "spectralsphere", "mars"),  # matrices
    *("shampoo", "scalableshampoo", "soap", "splus", "kron", "dash", "conda", "lorarite"),
    *("galore", "fira", "apollo", "alice", "racs", "sara", "demo"),  # projections
    *("lamb", "lars", "lomo", "fromage", "nero", "novograd", "adagc", "amos"),  # norms
    *("stableadamw", "stablespam", "adammini", "adam_mini", "adamp", "sgdp", "sgdsai", "ranger21"),
    *("prodigy", "dadaptadagrad", "dadaptadam", "dadaptadan", "dadaptlion", "dadaptsgd"),
}

_warned: set[type[Optimizer]] = set()
# Per optimizer, which state it had when that was last looked through, and its entries: how many,
# and how many of them sharded.
_states_seen: weakref.WeakKeyDictionary[Optimizer, tuple[int, int, int]] = (
    weakref.WeakKeyDictionary()
)
_schedules: weakref.WeakSet[Schedule] = weakref.WeakSet()
_lock = threading.Lock()  # models may be sharded in one thread while another one steps


def watch(schedule: Schedule) -> None:
    """Let optimizer steps be checked, and free this schedule's kept copies after them."""
    with _lock:
        _register_once()
        _schedules.add(schedule)


def schedules() -> list[Schedule]:
    """All that are watched now."""
    with _lock:
        return list(_schedules)


@functools.cache
def _register_once() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    support_grad_scaler(_end_micro_batches)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    sharded = [p for p in parameters_of(optimizer) if isinstance(p, ShardedTensor)]
    if not sharded:
        return None
    check_class(optimizer, sharded[0].spec.name)
    _shard_whole_state(optimizer)
    if _closure_of(args, kwargs) is None:  # else the backward, which reduces, is still to come
        stepped = set(map(id, sharded))
        for schedule in schedules():
            _check_gradients(schedule, stepped)
    if type(optimizer) not in _ELEMENTWISE:
        return None  # also a derived class: on plain slices its own step could take a norm, unseen
    return (torch_internals.OptimizerOnLists(optimizer, _put_slices), *args[1:]), kwargs


def _end_micro_batches(specs: Collection[ShardSpec]) -> None:
    # A gradient scaler may keep the optimizer, which ends the count, from its step.
    unscaled = set(map(id, specs))
    for schedule in schedules():
        for flat_param in schedule.flat_params:
            if not unscaled.isdisjoint(id(parameter.spec) for parameter in flat_param.parameters):
                flat_param.micro_batch = 0


def _check_gradients(schedule: Schedule, stepped: set[int]) -> None:
    """Let the gradients of a step be the same on all ranks, after backwards without reduction.

    Collective if there were such backwards since the last reduction. What was zeroed on some ranks
    before it was reduced becomes zeros on all.

    Raises:
        RuntimeError: A gradient waits to be reduced, on any rank.
    """
    parameters = [
        parameter
        for flat_param in schedule.flat_params
        if flat_param.sends_sums and flat_param.is_trainable
        for parameter in flat_param.parameters
        if id(parameter) in stepped
    ]
    if not parameters:
        return
    waiting = [isinstance(parameter.grad, UnreducedGradient) for parameter in parameters]
    present = [parameter.grad is not None for parameter in parameters]
    any_rank = schedule.communicator.any_rank([waiting, present])()
    for parameter, is_waiting, is_present in zip(parameters, *any_rank, strict=True):
        if is_waiting:
            raise unreduced(parameter.spec, "an optimizer step")
        if is_present and parameter.grad is None:
            parameter.grad = zero_gradient(parameter)


def _put_slices(group: dict[str, Any], lists: tuple[list[Any], ...]) -> bool:
    """Replace the tensors of one group, parameters first, by their slices, which are plain.

    Each operation on a :class:`ShardedTensor` costs its way through Python; a step has a dozen for
    every parameter. What they write, they write to the same memory.
    """
    parameters = list(lists[0])
    # A missing entry (SGD's first momentum) is made by the math and has to come out sharded.
    if group["differentiable"] or type(None) in map(type, itertools.chain(*lists[2:])):
        return False
    for tensors in lists:
        if tensors:  # kinds of state that this group does without stay empty
            tensors[:] = slices_beside(parameters, tensors, "optimizer step")
    return True


def _closure_of(args: Any, kwargs: Any) -> Any:
    # torch passes the arguments of ``step``, the optimizer first.
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def _shard_whole_state(optimizer: Optimizer) -> None:
    """Slice state that was allocated before sharding, loaded as whole tensors, or set by hand."""
    if _states_seen.get(optimizer) == _summary(optimizer):
        return
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, ShardedTensor):
            continue
        for key, value in state.items():
            if type(value) is not ShardedTensor and key not in SCALARS:
                state[key] = slice_state(parameter, key, value)
    _states_seen[optimizer] = _summary(optimizer)


def _summary(optimizer: Optimizer) -> tuple[int, int, int]:
    kinds = list(
        map(type, itertools.chain.from_iterable(map(_values_of, optimizer.state.values())))
    )
    return id(optimizer.state), len(kinds), kinds.count(ShardedTensor)


_values_of = operator.methodcaller("values")


def check_class(optimizer: Optimizer, example: str) -> None:
    """Refuse an optimizer that cannot step slices; warn of one that nothing is known of.

    Args:
        optimizer: Over sharded parameters.
        example: The name of one of them.

    Raises:
        NotImplementedError: It needs whole tensors.
    """
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    name = names[0]
    for ancestor in names:
        if ancestor.lower() in _NEEDS_WHOLE_TENSORS:
            raise NotImplementedError(
                f"{name}: expected an optimizer that updates each element by itself, got one that "
                f"needs whole tensors ({ancestor}), but {example!r} is sharded: each "
                "rank holds a slice. Use AdamW, SGD or another elementwise optimizer, or leave its "
                "parameters unsharded with ignored_params."
            )
    if _ELEMENTWISE.isdisjoint(type(optimizer).__mro__):
        _warn_unknown(type(optimizer))


def _warn_unknown(cls: type[Optimizer]) -> None:
    if cls in _warned:
        return
    _warned.add(cls)
    warnings.warn(
        f"{cls.__module__}.{cls.__name__} is not known to lightning_fsdp. It steps slices of the "
        "parameters, which is right only if it updates each element by itself.",
        stacklevel=5,
    )


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepped = {id(p) for p in parameters_of(optimizer) if isinstance(p, ShardedTensor)}
    if stepped:
        for schedule in schedules():
            schedule.after_optimizer_step(stepped)
