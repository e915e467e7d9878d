"""Full state dicts out of shards and back, one tensor at a time. Collective: every rank calls.

``module.state_dict()`` needs no communication and holds :class:`ShardedTensor` values. Functions
here turn these into plain tensors of the original names and shapes, and load such tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor


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
    is_owner = mesh_rank_of(module.parameters()) == 0 or not rank0_only
    for name, value in module.state_dict().items():
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
    """Load plain tensors of the original shapes; each rank keeps its slices.

    Args:
        module: Any module with sharded parameters inside.
        state: Name to tensor, the same on every rank.
        strict: As in ``nn.Module.load_state_dict``.

    Returns:
        The missing and unexpected keys, as ``nn.Module.load_state_dict``.
    """
    return module.load_state_dict(dict(state), strict=strict)


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


def mesh_rank_of(parameters: Iterable[Tensor]) -> int:
    """Rank of this process among all that train these together; 0 where none is sharded."""
    sharded = (parameter for parameter in parameters if isinstance(parameter, ShardedTensor))
    return next((parameter.spec.communicator.mesh_rank for parameter in sharded), 0)
