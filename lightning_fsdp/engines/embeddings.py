"""Embeddings under autocast give the dtype that they give in DDP.

Autocast leaves a lookup in the dtype of its weight, which is fp32 in DDP and decides that of the
whole residual stream; here the gathered weight is of lower precision. So what comes out is cast
back, wherever in a unit the embedding lies. Its values are those of the gathered weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fsdp.config import MixedPrecisionPolicy


@dataclass(frozen=True)
class _CastOutput:
    """A forward hook."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.to(self.dtype)


def keep_main_dtype(module: nn.Module, precision: MixedPrecisionPolicy) -> None:
    """Cast what embeddings give back to the dtype of their main weights.

    Args:
        module: Before or after it was sharded.
        precision: Nothing happens under a policy that is not for use under autocast.
    """
    if precision.cast_forward_inputs or precision.param_dtype is None:
        return
    for inner in module.modules():
        if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)):
            # First of all hooks: those of the user see what they see in DDP.
            inner.register_forward_hook(_CastOutput(inner.weight.dtype), prepend=True)


def forget_main_dtype(module: nn.Module) -> None:
    """Undo :func:`keep_main_dtype`."""
    for inner in module.modules():
        for key, hook in list(inner._forward_hooks.items()):
            if isinstance(hook, _CastOutput):
                del inner._forward_hooks[key]
