"""Full checkpoints: one file that plain ``torch.load`` and any other strategy read.

    saving    every rank takes part; rank 0 gets whole tensors on the CPU and writes
    loading   every rank maps the file and reads its slices

On the ranks that do not write, ``checkpoint["state_dict"]`` holds the same names with tensors on
the ``meta`` device: hooks that rename or drop entries (``on_save_checkpoint``) run on every rank,
and would fail on an empty dict on all but one, while the others wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

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


def optimizer_state(engine: Engine, optimizer: Optimizer) -> dict[str, Any]:
    """What the optimizer of an unsharded run would save, on rank 0. Collective."""
    if not _has_state_of_parameters(optimizer.state_dict()):
        return optimizer.state_dict()
    return engine.full_optimizer_state_dict(optimizer, rank0_only=True)


def load_optimizer_states(
    engine: Engine, optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]
) -> None:
    """Each optimizer keeps its slices of a whole state.

    Raises:
        ValueError: Another number of optimizers was saved.
    """
    if len(optimizers) != len(states):
        raise ValueError(
            f"checkpoint: expected the state of {len(optimizers)} optimizer(s), as many as "
            f"configure_optimizers returns, got {len(states)}. Resume with the optimizers that "
            "the checkpoint was saved with."
        )
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
