"""Sharded checkpoints without Lightning."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_fsdp.checkpoint import state as states
from lightning_fsdp.checkpoint.background import Saving
from lightning_fsdp.checkpoint.ranks import Ranks
from lightning_fsdp.core.tensors.flat_chunks import FlatChunks
from lightning_fsdp.engines.base import owner_of
from lightning_fsdp.engines.sharded_state import ShardedState


def save_sharded(
    path: str | PathLike[str],
    module: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write module and optimizers to a folder, each rank its slices. Collective.

    Args:
        path: Of the folder.
        module: Sharded by this package or by torch's FSDP2, in ``DistributedDataParallel``, or
            plain.
        optimizers: Over its parameters.
        extra: Anything else that ``torch.load(weights_only=True)`` can read; that of rank 0.

    Raises:
        ValueError: An optimizer has a parameter that is not in the module.
        TypeError: A module that was wrapped in torch's FSDP1 by hand; a sharded tensor in extra.
    """
    states.write(path, _checkpoint_of(path, module, optimizers, extra))


def async_save_sharded(
    path: str | PathLike[str],
    module: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    extra: Mapping[str, Any] | None = None,
) -> Saving:
    """As :func:`save_sharded`, with the writing in the background. Collective.

    Returns when this rank's slices are copied to the host: training may go on, and what is written
    are the values of the call. One save runs at a time: this one, and every other save and load,
    first waits for the last.

    Returns:
        ``wait()`` returns when the checkpoint is in place, and raises what the save failed with, on
        every rank. Whoever does not wait hears of it from the next save.
    """
    return states.write_in_background(path, _checkpoint_of(path, module, optimizers, extra))


def load_sharded(
    path: str | PathLike[str],
    module: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    *,
    strict: bool = True,
) -> dict[str, Any]:
    """Fill module and optimizers from a folder, each rank its slices. Collective.

    Whoever wrote it, with whatever number of ranks. No tensor is ever whole. Weights of another
    dtype than the module's are converted.

    Args:
        path: Of the folder.
        module: As in :func:`save_sharded`, on the same devices as its optimizers.
        optimizers: As many as were saved, or none; with or without state.
        strict: Whether the names must be those of the module.

    Returns:
        The ``extra`` that was saved.

    Raises:
        RuntimeError: Names or shapes are not the module's.
        ValueError: Another number of optimizers, another kind of one, or other groups.
        TypeError: A module that was wrapped in torch's FSDP1 by hand.
    """

    def begin() -> tuple[ShardedState, dict[str, Any]]:
        return _state_of(module), states.read_extra(path)

    alike = f"load with {len(optimizers)} optimizers, {strict=}"
    state, saved = Ranks().here(f"load {os.fspath(path)!r}", begin, alike)
    values = states.read_module(state, saved["state_dict"], strict)
    inner = _inner(module)
    owner = owner_of(inner)
    if owner is not None:
        owner.read_shards_again()
    if values:
        load = inner.load_state_dict if owner is None else owner.load_full_state_dict
        load(values, strict=False)
    if optimizers:
        states.read_optimizers(state, optimizers, saved.get("optimizer_states", ()))
    extra: dict[str, Any] = saved.get("extra", {})
    return extra


def _checkpoint_of(
    path: str | PathLike[str],
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    extra: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What is saved. Collective."""

    def make() -> dict[str, Any]:
        given = dict(extra or {})
        for name, value in given.items():
            if isinstance(value, FlatChunks | DTensor):
                raise TypeError(
                    f"extra[{name!r}]: expected what rank 0 can write, got a sharded tensor, of "
                    "which it has a part. Pass full_tensor() of it, or save its module to a folder "
                    "of its own."
                )
        state = _state_of(module)
        packed = [states.optimizer_state(state, o, i) for i, o in enumerate(optimizers)]
        return {"state_dict": state.of_module(), "optimizer_states": packed, "extra": given}

    doing = f"save {os.fspath(path)!r}"
    return Ranks().here(doing, make, f"{doing} with {len(optimizers)} optimizers")


def _state_of(module: nn.Module) -> ShardedState:
    inner = _inner(module)
    owner = owner_of(inner)
    if owner is not None:
        return owner.sharded_state(inner)
    for name, child in inner.named_modules():
        if isinstance(child, FullyShardedDataParallel):
            raise TypeError(
                f"{name or type(child).__name__}: expected a module that this package or "
                "torch's fully_shard sharded, or a plain one, got FullyShardedDataParallel, "
                "which hides which elements a rank has. Train with FSDP1Strategy, or use torch's "
                "torch.distributed.checkpoint.state_dict."
            )
    return ShardedState(inner)


def _inner(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module
