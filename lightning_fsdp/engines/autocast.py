"""Embeddings and norms under autocast give what they give in DDP.

    embedding   autocast leaves a lookup in the dtype of its weight, which is fp32 in DDP and
                decides that of the whole residual stream; here the gathered weight is of lower
                precision. So what comes out is cast back; its values are those of the weight.
    norm        an fp32 stream then meets weights of lower precision. On CUDA autocast computes the
                norm in fp32; on CPU it leaves it alone, and the kernel refuses the mixture. So
                there the stream is cast, and what comes out is cast back.
    statistics  a norm with running statistics in fp32 takes weights in fp32 alone, on every device.
                So it computes with its gathered weights cast back, as in DDP but for their
                rounding.

Wherever in a unit they lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_fsdp.config import MixedPrecisionPolicy

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.LayerNorm, nn.GroupNorm)
_WITH_STATISTICS = (_NormBase,)  # BatchNorm, SyncBatchNorm, InstanceNorm
_GATHERED = "_lightning_fsdp_gathered"  # on a module that computes: its own weights, by name


@dataclass(frozen=True)
class _CastOutput:
    """A forward hook."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _cast_floating(output, self.dtype)


@dataclass(frozen=True)
class _CastInputOnCPU:
    """A forward hook that comes before."""

    dtype: torch.dtype
    device_type: str | None

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            _cast_floating(arg, self.dtype) if self._is_on_cpu(arg) else arg for arg in args
        )

    def _is_on_cpu(self, arg: Any) -> bool:
        return isinstance(arg, Tensor) and (self.device_type or arg.device.type) == "cpu"


@dataclass(frozen=True)
class _WidenWeights:
    """A forward hook that comes before: the module finds its weights in another dtype."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any) -> None:
        gathered = module.__dict__[_GATHERED] = {}
        for name in ("weight", "bias"):
            weight = getattr(module, name)
            if weight is not None:
                gathered[name] = module.__dict__.get(name)  # FSDP1 keeps whole weights there
                module.__dict__[name] = weight.to(self.dtype)  # found before a parameter


@dataclass(frozen=True)
class _ForgetWidened:
    """A forward hook, also after an error."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        for name, before in module.__dict__.pop(_GATHERED, {}).items():
            if before is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = before


_HOOKS = (_CastOutput, _CastInputOnCPU, _WidenWeights, _ForgetWidened)


def keep_main_dtype(
    module: nn.Module, precision: MixedPrecisionPolicy, device_type: str | None = None
) -> None:
    """Let embeddings and norms give what they would with their main weights.

    Args:
        module: Before or after it was sharded.
        precision: Nothing happens under a policy that is not for use under autocast.
        device_type: Where the module is to be thought to compute; by default where its inputs are.
    """
    if precision.cast_forward_inputs or precision.param_dtype is None:
        return
    for inner in module.modules():
        weight = getattr(inner, "weight", None)
        if not isinstance(weight, Tensor):
            continue
        if isinstance(inner, _WITH_STATISTICS):
            inner.register_forward_pre_hook(_WidenWeights(weight.dtype))
            inner.register_forward_hook(_ForgetWidened(), prepend=True, always_call=True)
        if not isinstance(inner, (*_NORMS, *_EMBEDDINGS)):
            continue
        # Next to the module among all hooks: those of the user see what they see in DDP.
        inner.register_forward_hook(_CastOutput(weight.dtype), prepend=True)
        if isinstance(inner, _NORMS):
            inner.register_forward_pre_hook(_CastInputOnCPU(precision.param_dtype, device_type))


def forget_main_dtype(module: nn.Module) -> None:
    """Undo :func:`keep_main_dtype`."""
    for inner in module.modules():
        for hooks in (inner._forward_hooks, inner._forward_pre_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(hook, _HOOKS):
                    del hooks[key]


def _cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Others pass: ``call_with`` runs functions that take and return anything."""
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
