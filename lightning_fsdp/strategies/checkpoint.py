"""Checkpoints of a strategy, in two kinds.

              a file (``"full"``)                               a folder (``"sharded"``)
    saving    every rank takes part; rank 0 gets one            every rank writes its slices
              whole tensor after the other and writes
    loading   every rank maps the file and reads its slices     every rank reads its slices
    read by   plain ``torch.load``, any strategy                strategies of this package

A file: what hooks find in ``checkpoint["state_dict"]`` before it is written are stand-ins for whole
tensors (``checkpoint/deferred.py``), the same on every rank. ``on_save_checkpoint`` runs on every
rank, and may rename, drop and convert them; ``full_tensor()`` of one gives its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fsdp.checkpoint import mapped
from lightning_fsdp.checkpoint import state as sharded
from lightning_fsdp.checkpoint.contents import NAMES
from lightning_fsdp.checkpoint.deferred import DeferredCheckpoint, DeferredTensor
from lightning_fsdp.engines.base import Engine
from lightning_fsdp.engines.native import NativeEngine


def module_state(engine: Engine, module: nn.Module, deferred: DeferredCheckpoint) -> dict[str, Any]:
    """The state dict to save, with stand-ins for what is sharded."""
    if engine.module is None:  # between two runs the module is whole
        return module.state_dict()
    return deferred.in_place_of(engine.gatherable_state_dict())


def load_module_state(
    engine: Engine, module: nn.Module, state: Mapping[str, Any], strict: bool
) -> None:
    """Take whole tensors; where the module is sharded every rank keeps its slices."""
    if engine.module is None:
        module.load_state_dict(state, strict=strict)
    else:
        engine.load_full_state_dict(state, strict=strict)
    mapped.give_back(mapped.tensors_of(state))


def read_folder(path: str | Path) -> dict[str, Any]:
    """A checkpoint as the Trainer wants it, with stand-ins for tensors.

    Raises:
        ValueError: No Trainer has written it.
    """
    checkpoint = sharded.read_extra(path)
    if "pytorch-lightning_version" not in checkpoint:
        raise ValueError(
            f"{path}: expected a checkpoint of a Trainer, got one of save_sharded, which holds no "
            "loops and hyper-parameters. Read it with load_sharded(path, module, optimizers)."
        )
    return checkpoint


def read_slices(
    engine: Engine, module: nn.Module, entries: Mapping[str, Any], strict: bool
) -> None:
    """Fill the sharded module from a folder, and with what hooks have put in. Collective."""
    others = sharded.read_module(engine.sharded_state(module), entries, strict)
    if others:  # extra state of modules, and what on_load_checkpoint has put in
        load_module_state(engine, module, others, strict=False)


def optimizer_state(
    engine: Engine, optimizer: Optimizer, deferred: DeferredCheckpoint
) -> dict[str, Any]:
    """What the optimizer of an unsharded run would save, with stand-ins. Collective."""
    if not _has_state_of_parameters(optimizer.state_dict()):
        return optimizer.state_dict()
    return deferred.in_place_of(engine.gatherable_optimizer_state_dict(optimizer))


def write(
    deferred: DeferredCheckpoint,
    checkpoint: dict[str, Any],
    path: str | Path,
    save: Callable[[dict[str, Any]], None],
    *,
    takes_stand_ins: bool,
) -> None:
    """Write a file on rank 0, with all ranks. Collective.

    Args:
        deferred: Made the stand-ins in the checkpoint.
        checkpoint: The Trainer's.
        path: For messages.
        save: Writes it, on rank 0.
        takes_stand_ins: Whether it does so by ``torch.save`` into a file, tensor by tensor; if not,
            it is given whole tensors, all of them.
    """

    def write_with_all() -> None:
        wholes: dict[int, Tensor] = {}  # tied tensors have one stand-in

        def whole(tensor: DeferredTensor) -> Tensor:
            if id(tensor) not in wholes:
                wholes[id(tensor)] = tensor.when_written()
            return wholes[id(tensor)]

        content = checkpoint
        if not takes_stand_ins:
            content = apply_to_collection(checkpoint, DeferredTensor, whole)
        save(content)

    deferred.write(f"checkpoint {str(path)!r}", write_with_all)


def load_optimizer_states(
    engine: Engine,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    states: Sequence[Mapping[str, Any]],
) -> None:
    """Each optimizer keeps its slices of a state that is whole, or in a folder.

    Raises:
        ValueError: Another number of optimizers was saved, or other parameter groups.
    """
    if any("saved_under" in state for state in states):
        sharded.read_optimizers(engine.sharded_state(module), optimizers, states)
        return
    sharded.check_number(optimizers, states)
    for optimizer, state in zip(optimizers, states, strict=True):
        if _has_state_of_parameters(state):
            read_once = {**state, "state": mapped.ReadOnce(state["state"])}
            engine.load_full_optimizer_state_dict(optimizer, read_once)
        else:
            optimizer.load_state_dict(dict(state))


def note_parameter_names(
    checkpoint: dict[str, Any],
    engine: Engine,
    module: nn.Module,
    optimizers: Iterable[Optimizer],
) -> None:
    """Add the names of each optimizer's parameters, group by group.

    Optimizer states go by numbers; with these, others can go by name. Parameters that are not the
    module's have the name ``""``.
    """
    if "optimizer_states" not in checkpoint:
        return
    named = dict(module.named_parameters())
    if isinstance(engine, NativeEngine) and engine.module is not None:
        named = engine.parameters
    name_of = {id(parameter): name for name, parameter in named.items()}
    checkpoint[NAMES] = [
        [[name_of.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def _has_state_of_parameters(state: Mapping[str, Any]) -> bool:
    # Where configure_optimizers returns None, Lightning puts an optimizer with an empty state dict.
    return "state" in state
