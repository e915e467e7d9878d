"""Refuses what belongs to one rank in the part of a checkpoint that rank 0 writes as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lightning_fsdp.core.sharded_module import ShardedModule
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor


def refuse_pieces(content: Any, at: str) -> None:
    """Refuse a slice of a tensor, and a sharded module, wherever they are in it.

    Those of this core would not be pickled, without a word about where they are; a ``DTensor``
    would be, with rank 0's slice alone.

    Args:
        content: Of hooks and callbacks: mappings, lists and whatever else, in any depth.
        at: How the user gets there.

    Raises:
        TypeError: There is one; says where.
    """
    if isinstance(content, Mapping):
        for key, value in content.items():
            refuse_pieces(value, f"{at}[{key!r}]")
    elif isinstance(content, list | tuple):
        for index, value in enumerate(content):
            refuse_pieces(value, f"{at}[{index}]")
    elif isinstance(content, ShardedTensor) or (
        isinstance(content, DTensor) and not all(p.is_replicate() for p in content.placements)
    ):
        raise TypeError(
            f"{at}: expected a whole tensor, got a {type(content).__name__}, of which this rank "
            "has a slice. Put its full_tensor() there, on every rank; for an average of the "
            "weights, lightning_fsdp.ShardedEMA saves and loads slices."
        )
    elif holds_sharded(content):
        raise TypeError(
            f"{at}: expected plain data, got a {type(content).__name__} that is sharded. Leave it "
            "out, as the state dict has its weights; of hyper-parameters, by "
            "save_hyperparameters(ignore=[its name])."
        )


def holds_sharded(value: Any) -> bool:
    """Whether it is a module of which a part is sharded."""
    kinds = ShardedModule | FSDPModule | FullyShardedDataParallel
    return isinstance(value, nn.Module) and any(isinstance(m, kinds) for m in value.modules())
