"""Whole state out of shards and back, one flat parameter at a time. Collective: every rank calls.

``module.state_dict()`` needs no communication and holds :class:`ShardedTensor` values; what is here
turns them into plain tensors of the original names and shapes, and takes such tensors in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fsdp.core.engine.sharded_tensor import ShardedTensor

# Counts and factors that torch.optim keeps as tensors.
SCALARS = {"step", "eta", "mu", "mu_product"}


def full_state_dict(
    module: nn.Module, *, rank0_only: bool = False, cpu_offload: bool = False
) -> dict[str, Tensor]:
    """The state dict that the module would have had without sharding.

    Holds the result and one gathered parameter at a time.

    Args:
        module: Any module with sharded parameters inside.
        rank0_only: Ranks other than 0 (of all that train together) get an empty dict.
        cpu_offload: Put every tensor on the host.

    Returns:
        Original names, order, shapes and main dtypes; buffers included; plain tensors that share no
        memory with the module. Tied parameters stay one tensor under several names.
    """
    state: dict[str, Tensor] = {}
    copies: dict[int, Tensor] = {}  # tied parameters have one local slice
    is_owner = _rank_of(module.parameters()) == 0 or not rank0_only
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):  # extra state of a module
            whole = value
        elif isinstance(value, ShardedTensor) and id(value.spec) in copies:
            whole = copies[id(value.spec)]
        else:
            whole = _whole(value, to_host=cpu_offload, rank0_only=rank0_only)
            if isinstance(value, ShardedTensor):
                copies[id(value.spec)] = whole
        if is_owner:
            state[name] = whole
    return state


def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Any], *, strict: bool = True
) -> Any:
    """Load plain tensors of the original shapes; each rank keeps its slices.

    Args:
        module: Any module with sharded parameters inside.
        state: The same on every rank.
        strict: As in ``nn.Module.load_state_dict``.

    Returns:
        The missing and unexpected keys, as ``nn.Module.load_state_dict``.
    """
    return module.load_state_dict(dict(state), strict=strict)


def full_optimizer_state_dict(optimizer: Optimizer, *, rank0_only: bool = False) -> dict[str, Any]:
    """The state dict that the optimizer would have had without sharding.

    Args:
        optimizer: An optimizer over sharded parameters.
        rank0_only: Ranks other than 0 get the parameter groups and an empty state.

    Returns:
        As ``optimizer.state_dict()``, with whole plain tensors on the host.
    """
    state_dict: dict[str, Any] = optimizer.state_dict()
    parameters = parameters_of(optimizer)
    is_owner = _rank_of(iter(parameters)) == 0 or not rank0_only
    whole_state: dict[Any, Any] = {}
    for index, values in state_dict["state"].items():
        if is_owner:
            whole_state[index] = {}
        for key, value in values.items():
            if isinstance(value, Tensor):
                value = _whole(value, to_host=True, rank0_only=rank0_only)
            if is_owner:
                whole_state[index][key] = value
    return {**state_dict, "state": whole_state}


def load_full_optimizer_state_dict(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load a plain optimizer state dict; each rank keeps its slices.

    Args:
        optimizer: An optimizer over sharded parameters, with the same groups as the one saved.
        state_dict: The same on every rank.
    """
    parameters = parameters_of(optimizer)
    state = {}
    for index, values in state_dict["state"].items():
        parameter = parameters[index] if isinstance(index, int) else None
        state[index] = {key: slice_state(parameter, key, value) for key, value in values.items()}
    optimizer.load_state_dict({**state_dict, "state": state})


def slice_state(parameter: Tensor | None, key: str, value: Any) -> Any:
    """One entry of optimizer state as this rank keeps it: whole tensors become slices.

    Args:
        parameter: The parameter that the state belongs to; plain ones keep their state.
        key: Name of the entry.
        value: Anything; sharded already, it is returned.

    Raises:
        ValueError: It was allocated on the meta device.
    """
    if not isinstance(parameter, ShardedTensor) or not isinstance(value, Tensor):
        return value
    is_scalar = key in SCALARS  # of any parameter, also beside one without dimensions
    if is_scalar or isinstance(value, ShardedTensor) or value.shape != parameter.shape:
        return value
    if value.is_meta:
        raise ValueError(no_values(parameter.spec.name, key))
    with torch.no_grad():
        local = parameter.spec.slice_of(value).to(device=parameter.device, copy=True)
    return ShardedTensor(local, parameter.spec)


def no_values(name: str, key: str) -> str:
    """What to say of state that an optimizer allocated on the meta device."""
    return (
        f"optimizer state {key!r} of {name!r}: expected values, got a tensor on the meta device. "
        "Build this optimizer after sharding (Adagrad, for one, allocates when it is built)."
    )


def _whole(value: Tensor, *, to_host: bool, rank0_only: bool) -> Tensor:
    with torch.no_grad():
        if not isinstance(value, ShardedTensor):
            whole = value.detach().clone()
        else:
            whole = value.full_tensor(rank0_only=rank0_only)
            if rank0_only and value.spec.communicator.mesh_rank != 0:
                return whole.to("meta")  # the first rank of another replica has got it, too
    return whole.cpu() if to_host else whole


def _rank_of(parameters: Iterator[Tensor]) -> int:
    for parameter in parameters:
        if isinstance(parameter, ShardedTensor):
            return parameter.spec.communicator.mesh_rank
    return 0


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Of all its groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
