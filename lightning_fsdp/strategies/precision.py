"""What ``Trainer(precision=...)`` means for a sharded module.

=============  ==============  ==================  ============  ==================
precision      main weights    gathered weights    reduced in    forward
=============  ==============  ==================  ============  ==================
32-true        fp32            fp32                fp32          plain
bf16-true      bf16            bf16                bf16          default dtype bf16
bf16-mixed     fp32            bf16                fp32          ``torch.autocast``
=============  ==============  ==================  ============  ==================

The Trainer hands a strategy the plugin that it would use with DDP; the strategy takes the name of
the precision from it and installs its own. Lightning's plugins would take the norm over this rank's
slices and refuse to clip for a fused optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fsdp.config import MixedPrecisionPolicy

POLICIES: dict[str, MixedPrecisionPolicy] = {
    "32-true": MixedPrecisionPolicy(),
    "bf16-true": MixedPrecisionPolicy(),
    "bf16-mixed": MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    ),
}


class ClipByNorm(Protocol):
    """The engine's global norm: the same value on every rank."""

    def __call__(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scale the gradients in place; returns their norm before that."""


class ShardedPrecision(Precision):
    """Precision of a sharded module; clips by the norm over all ranks.

    Args:
        precision: One of the rows of the table above.

    Raises:
        ValueError: Another precision; the message lists the supported ones.
    """

    precision: Any
    policy: MixedPrecisionPolicy
    device_type: str  # of torch.autocast; set by the strategy, like the next
    clip_by_norm: ClipByNorm | None

    def __init__(self, precision: str = "32-true") -> None:
        if precision not in POLICIES:
            raise ValueError(_unsupported(precision))
        self.precision = precision
        self.policy = POLICIES[precision]
        self.device_type = "cpu"
        self.clip_by_norm = None
        self._half = HalfPrecision("bf16-true") if precision == "bf16-true" else None

    @classmethod
    def of(cls, plugin: Precision | None) -> ShardedPrecision:
        """The plugin that does for a sharded module what ``plugin`` does for a whole one.

        Raises:
            ValueError: There is none; the message lists the supported precisions.
        """
        if plugin is None:
            return cls()
        if isinstance(plugin, ShardedPrecision):
            return plugin
        if type(plugin) in (Precision, HalfPrecision, MixedPrecision):
            return cls(plugin.precision)
        raise ValueError(_unsupported(getattr(plugin, "precision", None), type(plugin).__name__))

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return self._half.convert_module(module) if self._half else module

    @override
    def convert_input(self, data: Any) -> Any:
        return self._half.convert_input(data) if self._half else data

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self._half.tensor_init_context() if self._half else nullcontext()

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self._half.module_init_context() if self._half else nullcontext()

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        if self._half:
            with self._half.forward_context():
                yield
        elif self.precision == "bf16-mixed":
            # No cache of casted weights: a gathered weight is freed and filled again under it.
            with torch.autocast(self.device_type, dtype=torch.bfloat16, cache_enabled=False):
                yield
        else:
            yield

    @override
    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Steppable,
        model: pl.LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        # The closure (forward, backward, clipping) runs before the step, not inside it: when a step
        # begins, gradients are checked to be reduced, and with accumulation they are so only now.
        result = self._wrap_closure(model, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        assert self.clip_by_norm is not None, (
            "the strategy installs clip_by_norm when it gets the plugin"
        )
        self.clip_by_norm(self.main_params(optimizer), float(clip_val))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        # Elementwise, so slices are enough; torch's own function takes sharded gradients.
        torch.nn.utils.clip_grad_value_(self.main_params(optimizer), clip_value=clip_val)


def _unsupported(precision: Any, plugin: str | None = None) -> str:
    got = repr(precision) if plugin is None else f"{precision!r} ({plugin})"
    supported = ", ".join(repr(name) for name in POLICIES)
    cure = (
        "fp16 needs a gradient scaler that agrees on inf over all ranks, which does not exist yet; "
        "bf16 needs none."
        if "16" in str(precision) and "bf16" not in str(precision)
        else ""
    )
    return f"precision: expected one of {supported}, got {got}. {cure}".rstrip()
