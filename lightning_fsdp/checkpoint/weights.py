"""The tensors of a module's state dict, sharded or not, each to be made whole by itself."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lightning_fsdp.checkpoint.safetensors_folder import Outline
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor
from lightning_fsdp.engines.base import owner_of
from lightning_fsdp.engines.gatherable import Gatherable
from lightning_fsdp.engines.native import NativeEngine
from lightning_fsdp.engines.native_state import gatherable_state_dict


@dataclass(frozen=True)
class Weight:
    """One name of a state dict.

    Attributes:
        outline: Of the whole.
        identity: The same for the names of one tied tensor.
        whole: Makes it, plain, on any device. Collective.
    """

    outline: Outline
    identity: int
    whole: Callable[[], Tensor]


def weights_in(model: nn.Module, root: nn.Module) -> dict[str, Weight]:
    """Of a model, by the names that they had before sharding.

    Args:
        model: It, or a part of it.
        root: The module that was sharded.

    Raises:
        TypeError: FSDP1's, which do not say what they are.
        ValueError: A value that is no tensor.
    """
    engine = owner_of(root)
    if isinstance(engine, NativeEngine) and not engine.shows_whole_shapes:
        found = refuse_values(gatherable_state_dict(engine, lambda b: b, part=model))
    else:
        found = tensors_in(model, root)
    return {
        name: Weight(Outline(tuple(t.shape), t.dtype), id(t), partial(_whole, t))
        for name, t in found.items()
    }


def _whole(tensor: Tensor | Gatherable) -> Tensor:
    with torch.no_grad():
        if isinstance(tensor, Gatherable):
            return tensor.make_whole(tensor.piece, True)
        if isinstance(tensor, DTensor):  # offloaded ones are not where the mesh communicates
            return typing.cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()
        if isinstance(tensor, ShardedTensor):
            return tensor.full_tensor(rank0_only=True)
        return tensor.detach()


def tensors_in(model: nn.Module, root: nn.Module) -> dict[str, Tensor]:
    """The tensors of the state dict, sharded as they are; tied ones are one object.

    Raises:
        TypeError: FSDP1's, which do not say what they are.
        ValueError: A value that is no tensor.
    """
    for name, inner in root.named_modules():
        if isinstance(inner, FullyShardedDataParallel) or _holds_piece(inner):
            raise TypeError(
                f"{name or type(root).__name__}: expected a module that is plain or sharded by "
                "fully_shard, got FullyShardedDataParallel, which hides the elements that a rank "
                "has. Give the whole LightningModule, inside of FSDP1Strategy."
            )
    return refuse_values(model.state_dict(keep_vars=True))


def refuse_values(state: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse what is no tensor.

    Raises:
        ValueError: It is none.
    """
    for name, value in state.items():
        if not isinstance(value, Tensor | Gatherable):
            raise ValueError(
                f"{name!r}: expected a tensor, got {type(value).__name__}: safetensors files hold "
                "nothing else. Save a checkpoint of the Trainer."
            )
    return dict(state)


def _holds_piece(module: nn.Module) -> bool:
    """Whether FSDP1 has sharded something around this module: its weight is 1-D then."""
    return isinstance(module, nn.Embedding | nn.Linear) and module.weight.dim() != 2
