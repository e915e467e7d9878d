"""Full state dicts of what the core has sharded, out of shards and back, one tensor at a time.

Collective: every rank calls. ``module.state_dict()`` needs no communication and holds
:class:`ShardedTensor` values. Functions here turn these, and the state of optimizers, into plain
tensors of the original names and shapes, and load such tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fsdp.core.engine.communicator import Communicator
from lightning_fsdp.core.optimizers.optimizer_classes import parameters_of
from lightning_fsdp.core.optimizers.optimizer_guard import slice_state
from lightning_fsdp.core.ranks.groups import agree_on
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor
from lightning_fsdp.engines.owned_state import (
    map_leaves,
    owned_by_number,
    state_of_all,
    state_of_rank,
)


def full_state_dict(
    module: nn.Module, *, rank0_only: bool = False, cpu_offload: bool = False
) -> dict[str, Tensor]:
    """The state dict that the module would have had without sharding. Collective.

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
    copies: dict[tuple[int, int], Tensor] = {}
    what, ranks = f"full_state_dict, {rank0_only=}", ranks_of(module.parameters())
    is_owner = ranks is None or ranks.mesh_rank == 0 or not rank0_only
    for name, value in agree_on(ranks, what, module.state_dict, list).items():
        whole = copies.get(value.identity) if isinstance(value, ShardedTensor) else None
        if whole is None:
            whole = whole_of(value, to_host=cpu_offload, rank0_only=rank0_only)
        if isinstance(value, ShardedTensor):
            copies[value.identity] = whole
        if is_owner:
            state[name] = whole
    return state


def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Any], *, strict: bool = True
) -> Any:
    """Load plain tensors of the original shapes; each rank keeps its slices. Collective.

    Args:
        module: Any module with sharded parameters inside.
        state: Name to tensor, the same on every rank.
        strict: As in ``nn.Module.load_state_dict``.

    Returns:
        The missing and unexpected keys, as ``nn.Module.load_state_dict``.

    Raises:
        RuntimeError: On any rank names are missing or unexpected, or a shape is another one.
    """
    load = functools.partial(module.load_state_dict, dict(state), strict=strict)
    return agree_on(ranks_of(module.parameters()), "load_full_state_dict", load)


def full_optimizer_state_dict(optimizer: Optimizer, *, rank0_only: bool = False) -> dict[str, Any]:
    """The state dict that the optimizer would have had without sharding. Collective.

    Args:
        optimizer: An optimizer over sharded parameters.
        rank0_only: Ranks other than 0 get the parameter groups and an empty state.

    Returns:
        As ``optimizer.state_dict()``, with whole plain tensors on the host.
    """
    what, ranks = f"full_optimizer_state_dict, {rank0_only=}", ranks_of(parameters_of(optimizer))
    owned = owned_by_number(optimizer)  # which only one rank has

    def kinds(found: dict[str, Any]) -> list[Any]:
        of_numbers = [(n, v) for n, v in found["state"].items() if isinstance(n, int)]
        return [(n, list(state)) for n, state in of_numbers if n not in owned]

    state_dict: dict[str, Any] = agree_on(ranks, what, optimizer.state_dict, kinds)
    is_owner = not rank0_only or ranks is None or ranks.mesh_rank == 0

    def whole(value: Any) -> Any:
        made = whole_of(value, to_host=True, rank0_only=rank0_only)
        return made if is_owner else None  # freed before the next one is made

    state = map_leaves(whole, state_of_all(optimizer, state_dict["state"]))
    return {**state_dict, "state": state if is_owner else {}}


def load_full_optimizer_state_dict(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load a plain optimizer state dict; each rank keeps its slices, or what it owns.

    Collective.

    Args:
        optimizer: An optimizer over sharded parameters, with the same groups as the one saved.
        state_dict: The same on every rank.
    """
    parameters = parameters_of(optimizer)

    def cut(number: int, key: str, value: Any) -> Any:
        return slice_state(parameters[number], key, value)

    def load() -> None:
        state = state_of_rank(optimizer, state_dict["state"], cut)
        optimizer.load_state_dict({**state_dict, "state": state})

    agree_on(ranks_of(parameters), "load_full_optimizer_state_dict", load)


def whole_of(value: Any, *, to_host: bool, rank0_only: bool) -> Any:
    """Gather a sharded tensor in its original shape, or copy a plain one. Collective.

    Args:
        value: A tensor; anything else is returned as it is.
        to_host: Put the result on the host.
        rank0_only: Ranks other than 0 (of all that train together) get one on the meta device.
    """
    if not isinstance(value, Tensor):
        return value
    if not isinstance(value, ShardedTensor):
        whole = value.detach().clone()
    else:
        whole = value.full_tensor(rank0_only=rank0_only)
        if rank0_only and value.spec.communicator.mesh_rank != 0:
            return whole.to("meta")  # the first rank of another replica has received it as well
    return whole.cpu() if to_host else whole


def ranks_of(parameters: Iterable[Tensor]) -> Communicator | None:
    """The ranks that train these together; ``None`` where no parameter is sharded."""
    return next((p.spec.communicator for p in parameters if isinstance(p, ShardedTensor)), None)
