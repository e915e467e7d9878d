"""Whole state of an optimizer out of shards and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_fsdp.core.optimizers.optimizer_classes import SCALARS, parameters_of
from lightning_fsdp.core.optimizers.whole_state import map_leaves, state_of_all, state_of_rank
from lightning_fsdp.core.state.full_state import mesh_rank_of, whole_of
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor


def full_optimizer_state_dict(optimizer: Optimizer, *, rank0_only: bool = False) -> dict[str, Any]:
    """The state dict that the optimizer would have had without sharding.

    Args:
        optimizer: An optimizer over sharded parameters.
        rank0_only: Ranks other than 0 get the parameter groups and an empty state.

    Returns:
        As ``optimizer.state_dict()``, with whole plain tensors on the host.
    """
    state_dict: dict[str, Any] = optimizer.state_dict()
    is_owner = mesh_rank_of(parameters_of(optimizer)) == 0 or not rank0_only

    def whole(value: Any) -> Any:
        made = whole_of(value, to_host=True, rank0_only=rank0_only)
        return made if is_owner else None  # freed before the next one is made

    state = map_leaves(whole, state_of_all(optimizer, state_dict["state"]))
    return {**state_dict, "state": state if is_owner else {}}


def load_full_optimizer_state_dict(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load a plain optimizer state dict; each rank keeps its slices.

    Args:
        optimizer: An optimizer over sharded parameters, with the same groups as the one saved.
        state_dict: The same on every rank.
    """
    parameters = parameters_of(optimizer)

    def cut(place: int, key: str, value: Any) -> Any:
        return slice_state(parameters[place], key, value)

    state = state_of_rank(optimizer, state_dict["state"], cut)
    optimizer.load_state_dict({**state_dict, "state": state})


def slice_state(parameter: Tensor, key: str, value: Any) -> Any:
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
    if key in SCALARS:  # of any parameter, also beside one without dimensions
        return value.clone()  # steps count in it, and the state may be the user's
    if isinstance(value, ShardedTensor) or value.shape != parameter.shape:
        return value
    if value.is_meta:
        raise ValueError(no_values(parameter.spec.name, key))
    local = parameter.spec.slice_of(value).to(device=parameter.device, copy=True)
    return ShardedTensor(local, parameter.spec)


def no_values(name: str, key: str) -> str:
    """What to say of state that an optimizer allocated on the meta device."""
    return (
        f"optimizer state {key!r} of {name!r}: expected values, got a tensor on the meta device. "
        "Build this optimizer after sharding (Adagrad, for one, allocates when it is built)."
    )
