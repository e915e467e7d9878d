"""What a user chooses: how long parameters stay whole, their dtypes, and where shards live.

A ZeRO stage is a value, not a mode: :class:`ShardingPlan` says when a whole copy is freed, and that
is all that the core looks at.

=========  ======================  =======================  ===============================
plan       after a unit's forward  after a unit's backward  after the optimizer's step
=========  ======================  =======================  ===============================
``ZERO3``  freed                   freed                    (nothing left to free)
``ZERO2``  kept                    kept                     freed
=========  ======================  =======================  ===============================
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """When the whole copy of a unit's parameters is freed.

    Gradients and optimizer state are sharded under every plan.

    Attributes:
        reshard_after_forward: Free after the unit's forward and gather again for its backward.
            ``None`` keeps the outermost module's own parameters and frees all others.
        reshard_after_backward: Free after the unit's backward. If this is false, the copy is kept
            until the optimizer's step, so that accumulating micro-batches gathers nothing twice.

    Raises:
        NotImplementedError: ``reshard_after_forward`` is neither a bool nor ``None``.
        ValueError: It is true and ``reshard_after_backward`` is not.

    Source: ZeRO (arXiv 1910.02054), stages 2 and 3.
    """

    reshard_after_forward: bool | None
    reshard_after_backward: bool

    def __post_init__(self) -> None:
        check_reshard_after_forward(self.reshard_after_forward)
        if self.reshard_after_forward and not self.reshard_after_backward:
            raise ValueError(
                "ShardingPlan: expected reshard_after_backward=True with "
                "reshard_after_forward=True, got False: a copy gathered for the backward would "
                "outlive it. Set both, or neither."
            )


def check_reshard_after_forward(value: object) -> None:
    """Refuse a number of ranks, which torch's FSDP2 takes, and which would pass for ``True``.

    Raises:
        NotImplementedError: It is neither a bool nor ``None``.
    """
    if not isinstance(value, bool | None):
        raise NotImplementedError(
            f"reshard_after_forward: expected True, False or None, got {value!r}. For a second "
            "copy of the weights in each host (ZeRO++'s hpZ), pass state_over='all' and a mesh of "
            "2 dimensions (replicate, shard): a rank keeps 1/shard of the weights, which all "
            "gathers read."
        )


_COMPUTES_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def check_computes_at_once(where: str, function: Callable[..., Any]) -> None:
    """Refuse a function to run as a forward that computes after it has returned.

    Raises:
        TypeError: It is a generator function, or async.
    """
    code = getattr(function, "__code__", None)
    if code is not None and code.co_flags & _COMPUTES_LATER:
        raise TypeError(
            f"{where}: expected a function that returns what it has computed, got "
            f"{function.__name__!r}, a generator or async, which computes when its parameters are "
            "sharded again. If it calls modules alone, leave it as it is: these gather by "
            "themselves. Otherwise let it return a list, or pass what it calls in each step."
        )


ZERO2 = ShardingPlan(reshard_after_forward=False, reshard_after_backward=False)
ZERO3 = ShardingPlan(reshard_after_forward=True, reshard_after_backward=True)

_PLAN_OF_STAGE = {2: ZERO2, 3: ZERO3}


def plan_of_stage(zero_stage: int) -> ShardingPlan:
    """The plan of a ZeRO stage.

    Args:
        zero_stage: 2 or 3.

    Raises:
        ValueError: It is another stage.
    """
    if zero_stage not in _PLAN_OF_STAGE:
        raise ValueError(
            f"zero_stage: expected 2 (gradients and optimizer state sharded) or 3 (parameters "
            f"too), got {zero_stage!r}. Choose one of them."
        )
    return _PLAN_OF_STAGE[zero_stage]


@dataclass(frozen=True)
class OffloadPolicy:
    """Nothing is offloaded: shards live on the device that computes."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, reduced gradients and optimizer state live on the host; the optimizer steps there.

    Attributes:
        pin_memory: Use pinned memory, which an accelerator copies from and to while the host goes
            on. No other process can use it meanwhile. Needs an accelerator.
    """

    pin_memory: bool = True


@runtime_checkable
class PrecisionPolicy(Protocol):
    """What the core reads of a precision policy; the one of torch's FSDP2 has it as well."""

    @property
    def param_dtype(self) -> torch.dtype | None:
        """See :class:`MixedPrecisionPolicy`."""

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """See :class:`MixedPrecisionPolicy`."""

    @property
    def output_dtype(self) -> torch.dtype | None:
        """See :class:`MixedPrecisionPolicy`."""

    @property
    def cast_forward_inputs(self) -> bool:
        """See :class:`MixedPrecisionPolicy`."""


@dataclass(frozen=True)  # also by position, in the order of torch's class
class MixedPrecisionPolicy:
    """The dtypes of compute, reduction and outputs. Main weights keep the dtype they had.

    Attributes:
        param_dtype: Dtype of the gathered (compute) weights; ``None``: that of the main weights.
        reduce_dtype: Dtype in which gradients are summed over ranks and micro-batches; ``None``:
            that of the compute weights. Gradients of one backward that are narrower are sent as
            they are and widened on arrival: fp32 sums of bf16 gradients cost bf16 transfers.
        output_dtype: Dtype that floating-point outputs of a unit's forward are cast to; ``None``:
            they are not cast.
        cast_forward_inputs: Cast floating-point inputs of a unit's forward to ``param_dtype``.

    Raises:
        ValueError: A dtype is not a floating-point ``torch.dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
                raise ValueError(
                    f"MixedPrecisionPolicy.{name}: expected a floating-point torch.dtype or None, "
                    f"got {dtype!r}."
                )
