"""Every private name of torch that callbacks use, one function each, with the reason.

Checked against torch 2.13. A name that goes away is to be replaced here, and nowhere else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_fsdp.core.engine.torch_internals import current_backward


def record_memory_history(is_on: bool) -> None:
    """Keep the stack of every CUDA allocation; torch documents this name, and has no public one.

    Stacks of Python alone: for those of C++ torch starts a process for each library, which stays.
    """
    torch.cuda.memory._record_memory_history("all" if is_on else None, stacks="python")


def dump_memory_snapshot(path: str) -> None:
    """Write what was kept, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]


def is_fake(cls: type) -> bool:
    """Whether tensors of a type have no memory; DTensor works out shapes with them at any time."""
    return issubclass(cls, FakeTensor)


def attention_on_cpu() -> tuple[Any, Any]:
    """Forward and backward of ``scaled_dot_product_attention`` as CPU runs it."""
    aten = torch.ops.aten
    return (
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )


def grouped_product() -> Any:
    """Products of rows with one matrix of several, as of experts; no public name calls it."""
    return torch.ops.aten._grouped_mm


def unscales_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step divides gradients by a gradient scaler's scale, as fused ones do.

    Torch's scaler and Lightning's plugin ask by this name.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


class ModelFlopCounter(FlopCounterMode):
    """Leaves out what activation checkpointing computes a second time.

    It does so in the backward, with gradients enabled; a backward itself has them
    disabled, unless it is differentiated. The counter has no public place to leave something out.
    """

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if current_backward() >= 0 and torch.is_grad_enabled():
            return out
        return super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]
