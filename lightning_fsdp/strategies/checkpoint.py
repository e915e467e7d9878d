"""Checkpoints of a strategy, in two kinds.

              a file (``"full"``)                               a folder (``"sharded"``)
    saving    every rank takes part; rank 0 gets whole          every rank writes its slices
              tensors on the CPU and writes
    loading   every rank maps the file and reads its slices     every rank reads its slices
    read by   plain ``torch.load``, any strategy                strategies of this package

A file: on the ranks that do not write, ``checkpoint["state_dict"]`` holds the same names with
tensors on the ``meta`` device: hooks that rename or drop entries (``on_save_checkpoint``) run on
every rank, and would fail on an empty dict on all but one, while the others wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fsdp.checkpoint import state as sharded
from lightning_fsdp.checkpoint.contents import NAMES
from lightning_fsdp.engines.base import Engine
from lightning_fsdp.engines.native import NativeEngine


def module_state(engine: Engine, module: nn.Module) -> dict[str, Any]:
    """The state dict to save: whole on rank 0, names and shapes on the others. Collective."""
    if engine.module is None:  # between two runs the module is whole
        return module.state_dict()
    state: dict[str, Any] = engine.full_state_dict(rank0_only=True)
    outline = [{name: _outline(value) for name, value in state.items()}]
    dist.broadcast_object_list(outline, src=0)
    return state if dist.get_rank() == 0 else outline[0]


def load_module_state(
    engine: Engine, module: nn.Module, state: Mapping[str, Any], strict: bool
) -> None:
    """Take whole tensors; where the module is sharded every rank keeps its slices."""
    if engine.module is None:
        module.load_state_dict(state, strict=strict)
    else:
        engine.load_full_state_dict(state, strict=strict)


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


def optimizer_state(engine: Engine, optimizer: Optimizer) -> dict[str, Any]:
    """What the optimizer of an unsharded run would save, on rank 0. Collective."""
    if not _has_state_of_parameters(optimizer.state_dict()):
        return optimizer.state_dict()
    return engine.full_optimizer_state_dict(optimizer, rank0_only=True)


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
            engine.load_full_optimizer_state_dict(optimizer, state)
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


def _outline(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value
