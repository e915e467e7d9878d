"""The hooks around optimizers' steps: what a step computes on, and what it makes stale.

Two hooks on every optimizer of the process, registered at the first sharding. The one before a step
refuses gradients that were not reduced, and chooses what the step computes on:

    torch's own elementwise optimizers    plain slices (``OnSlices``)
    other elementwise ones                the sharded parameters themselves
    all others                            whole tensors, each on one rank (``whole_tensors.py``)

The one after it frees whole copies kept since the forward (ZeRO-2), as their values are stale. A
step that a gradient scaler skips writes nothing: the copies stay, and serve the next forward.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from lightning_fsdp.core import torch_internals
from lightning_fsdp.core.engine.torch_internals import not_compiled
from lightning_fsdp.core.optimizers.optimizer_classes import ELEMENTWISE, SCALARS
from lightning_fsdp.core.optimizers.whole_tensors import whole_tensors_of
from lightning_fsdp.core.tensors.sharded_tensor import (
    ShardedTensor,
    check_gradients,
    flat_param_of,
    spec_of_leaf,
)
from lightning_fsdp.core.tensors.slicewise import slices_beside

_lock = threading.Lock()  # models may be sharded in several threads
_hooks: list[RemovableHandle] = []


def watch() -> None:
    """Check optimizers' steps from now on, and free whole copies that they make stale."""
    with _lock:
        if not _hooks:
            # Not compiled: a compiled step has only the optimizer's own computation in its graph,
            # not what ranks tell each other around it.
            _hooks.append(register_optimizer_step_pre_hook(not_compiled(_before_step)))
            _hooks.append(register_optimizer_step_post_hook(not_compiled(_after_step)))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Check a step, and choose what it computes on; returns the arguments to call it with."""
    sharded, is_on_slices = _sharded_in(optimizer), type(optimizer) in ELEMENTWISE
    whole_tensors = None if is_on_slices else whole_tensors_of(optimizer)
    if whole_tensors is not None:
        # The last hook chooses then: the optimizer's own hooks still see slices.
        torch_internals.next_to_step(optimizer, _to_owners, _from_owners)
    if not sharded:
        return args, kwargs
    owned = {} if whole_tensors is None else whole_tensors.stepped_whole()
    _shard_whole_state(optimizer, {*map(id, sharded)} - owned.keys())
    if whole_tensors is None:
        if _closure_of(args, kwargs) is None:  # else a backward is still to reduce
            check_gradients(sharded, "an optimizer step")
        bring_scale(optimizer, sharded[0].device)
    # A derived class may have a step of its own, and take a norm in it: of a plain slice it would
    # be this rank's only, while a sharded parameter knows what it is a slice of.
    return (OnSlices(optimizer) if is_on_slices else optimizer, *args[1:]), kwargs


def bring_scale(optimizer: Optimizer, device: torch.device) -> None:
    """Move a gradient scaler's numbers to the device that a fused step computes on.

    For offloaded parameters the step itself would only queue copies of them to the host, and read
    these before they have arrived.
    """
    for name in ("grad_scale", "found_inf"):
        if isinstance(value := getattr(optimizer, name, None), Tensor):
            setattr(optimizer, name, value.to(device))


def _closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure of a step, if it has one. As is not documented, hooks get the optimizer first."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


@not_compiled
def _to_owners(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The last hook before a step over whole tensors."""
    if (whole_tensors := whole_tensors_of(optimizer)) is None:
        # It is a twin: where its step calls that of its base class, hooks run again.
        return args, kwargs
    return whole_tensors.begin(args, kwargs, _closure_of(args, kwargs))


@not_compiled
def _from_owners(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if (whole_tensors := whole_tensors_of(optimizer)) is not None:
        whole_tensors.end()


def _sharded_in(optimizer: Optimizer) -> list[ShardedTensor]:
    """The sharded parameters of an optimizer.

    Raises:
        RuntimeError: It has a leaf instead of one, as it was built inside a forward.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    plain = [p for p in parameters if not isinstance(p, ShardedTensor)]
    for spec in filter(None, map(spec_of_leaf, plain)):
        raise RuntimeError(
            f"optimizer step: expected the sharded parameter {spec.name!r}, got the whole copy "
            "that is there inside of a forward, which nobody reads. Build the optimizer outside of "
            "the forward."
        )
    return [p for p in parameters if isinstance(p, ShardedTensor)]


class OnSlices:
    """Stands for an optimizer of ``torch.optim`` in its own ``step``, to compute on slices.

    These classes collect parameters, gradients and state of a group in lists (``_init_group``), and
    then compute on the lists only. Here the optimizer itself collects them, and the slices, which
    share their memory, take their place.
    """

    state: Any  # the optimizer's own, or a dict that is dropped

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> Any:
        self.state = self._optimizer.state
        # Else torch calls ``__torch_function__`` for every attribute of a subclass, several times.
        with torch_internals.without_torch_function():
            result = torch_internals.init_group_of(self._optimizer)(group, *lists)
        if _put_slices(group, lists):
            # SGD writes its lists to ``state`` once more afterwards, under the slices. They are
            # there already, under the optimizer's parameters.
            self.state = defaultdict(dict)
        return result


def _put_slices(group: dict[str, Any], lists: tuple[list[Any], ...]) -> bool:
    """Replace the tensors of one group, parameters first, by their slices, which are plain.

    Every operation on a :class:`ShardedTensor` goes through Python, and a step has a dozen for each
    parameter. Slices share the memory, so what is written to them is written to the tensors.

    Returns:
        Whether they were replaced.
    """
    parameters = list(lists[0])
    # A missing entry (SGD's first momentum) is made by the math, and has to become a sharded one.
    if group["differentiable"] or type(None) in map(type, itertools.chain(*lists[2:])):
        return False
    for tensors in lists:
        if tensors:  # kinds of state that this group does not have stay empty
            tensors[:] = slices_beside(parameters, tensors, "optimizer step")
    return True


def _shard_whole_state(optimizer: Optimizer, sliced: Collection[int]) -> None:
    """Slice state that was allocated before sharding, loaded as whole tensors, or set by hand.

    Only that of ``sliced``, by ``id`` of parameters: one that has left the groups may come back,
    and its owner then needs its state whole.
    """
    for parameter, state in optimizer.state.items():
        if id(parameter) not in sliced:
            continue
        for key, value in state.items():
            if type(value) is not ShardedTensor and key not in SCALARS:
                state[key] = slice_state(parameter, key, value)


def slice_state(parameter: Tensor, key: str, value: Any) -> Any:
    """One entry of optimizer state as this rank keeps it: whole tensors become slices.

    Args:
        parameter: The parameter that the state belongs to; plain ones keep their state as it is.
        key: Name of the entry.
        value: Any value; tensors of the parameter's shape are cut, unless they are sharded already.

    Raises:
        ValueError: It was allocated on the meta device.
    """
    if not isinstance(parameter, ShardedTensor) or not isinstance(value, Tensor):
        return value
    if key in SCALARS:  # by name, as a parameter may have no dimensions either
        return value.clone()  # steps write to it, and it may be the user's
    if isinstance(value, ShardedTensor) or value.shape != parameter.shape:
        return value
    if value.is_meta:
        raise ValueError(no_values(parameter.spec.name, key))
    local = parameter.spec.slice_of(value).to(device=parameter.device, copy=True)
    return ShardedTensor(local, parameter.spec)


def no_values(name: str, key: str) -> str:
    """The message about state that an optimizer allocated on the meta device."""
    return (
        f"optimizer state {key!r} of {name!r}: expected values, got a tensor on the meta device. "
        "Build this optimizer after sharding (Adagrad, for one, allocates when it is built)."
    )


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    flat_params = dict.fromkeys(filter(None, map(flat_param_of, parameters)))
    # In the order of the parameters, which is the same on all ranks: what is in use is gathered.
    for schedule in dict.fromkeys(itertools.chain(*[f.runners for f in flat_params])):
        schedule.after_optimizer_step(flat_params)
