"""What ``Trainer(precision=...)`` means for a sharded module.

=============  ==============  ==================  ============  ==================
precision      main weights    gathered weights    reduced in    forward
=============  ==============  ==================  ============  ==================
32-true        fp32            fp32                fp32          plain
bf16-true      bf16            bf16                bf16          default dtype bf16
bf16-mixed     fp32            bf16                fp32          ``torch.autocast``
16-mixed       fp32            fp16                fp32          ``torch.autocast``
=============  ==============  ==================  ============  ==================

The Trainer hands a strategy the plugin that it would use with DDP; the strategy takes the name of
the precision (and the gradient scaler) from it and installs its own. Lightning's plugins would take
the norm over this rank's slices and refuse to clip for a fused optimizer.

On CPU the Trainer itself turns ``precision="16-mixed"`` into bf16-mixed and says so; a plugin given
as an object (``MixedPrecision("16-mixed", "cpu")``) stays what it is.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fsdp.config import MixedPrecisionPolicy
from lightning_fsdp.engines.base import Engine
from lightning_fsdp.strategies.lightning_internals import is_inside_step, unwrap_optimizer
from lightning_fsdp.strategies.nonfinite import NonfiniteGuard
from lightning_fsdp.strategies.token_mean import TokenMean

POLICIES: dict[str, MixedPrecisionPolicy] = {
    "32-true": MixedPrecisionPolicy(),
    "bf16-true": MixedPrecisionPolicy(),
    "bf16-mixed": MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    ),
    "16-mixed": MixedPrecisionPolicy(
        param_dtype=torch.float16, reduce_dtype=torch.float32, cast_forward_inputs=False
    ),
}

_CURES = {
    "16-true": "Gradients of fp16 main weights cannot be unscaled by a gradient scaler, and lose "
    "small values without one. Use '16-mixed' (fp32 main weights) or 'bf16-true'.",
    "64-true": "Use '32-true'; or fully_shard a model in float64 without a Trainer.",
}

# Where a checkpoint keeps the scaler, so that a run under DDP goes on from it, and the reverse.
_SCALER_KEY = MixedPrecision.__qualname__


class ShardedPrecision(Precision):
    """Precision of a sharded module; clips by the norm over all ranks.

    Args:
        precision: One of the rows of the table above.
        scaler: Of 16-mixed; ``None``: torch's, as it is by default.

    Raises:
        ValueError: Another precision (the message lists the supported ones), or a scaler for one
            that needs none.
    """

    precision: Any
    policy: MixedPrecisionPolicy
    device_type: str = "cpu"  # of torch.autocast; set by the strategy, like the next three
    engine: Engine
    token_mean: TokenMean | None = None
    nonfinite: NonfiniteGuard | None = None
    scaler: torch.amp.GradScaler | None

    def __init__(
        self, precision: str = "32-true", scaler: torch.amp.GradScaler | None = None
    ) -> None:
        if precision not in POLICIES:
            raise ValueError(_unsupported(precision))
        if scaler is not None and precision != "16-mixed":
            raise ValueError(
                f"scaler: expected None with precision {precision!r}, got {scaler}. Only 16-mixed "
                "scales the loss."
            )
        if scaler is None and precision == "16-mixed":
            # It scales on whatever device the loss is; for CUDA it asks whether there is one.
            scaler = torch.amp.GradScaler("cuda" if torch.cuda.is_available() else "cpu")
        self.precision = precision
        self.scaler = scaler
        self.policy = POLICIES[precision]
        self._unscaled: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # and not stepped since
        # Lightning's, for all but the autocast of a mixed precision.
        self._unmixed = HalfPrecision("bf16-true") if precision == "bf16-true" else Precision()

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
            return cls(plugin.precision, getattr(plugin, "scaler", None))
        raise ValueError(_unsupported(getattr(plugin, "precision", None), type(plugin).__name__))

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the weights that forward and backward use."""
        is_half = isinstance(self._unmixed, HalfPrecision)
        return torch.bfloat16 if is_half else self.policy.param_dtype or torch.float32

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return self._unmixed.convert_module(module)

    @override
    def convert_input(self, data: Any) -> Any:
        return self._unmixed.convert_input(data)

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self._unmixed.tensor_init_context()

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self._unmixed.module_init_context()

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        if self.policy.param_dtype is None:
            return self._unmixed.forward_context()
        # No cache of casted weights: a gathered weight is freed and filled again under it.
        return torch.autocast(self.device_type, self.policy.param_dtype, cache_enabled=False)

    @override
    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        loss = tensor
        if self.token_mean is not None:
            loss = self.token_mean.weigh(loss, module.trainer.accumulate_grad_batches)
        if self.nonfinite is not None:
            self.nonfinite.note_loss(loss)
        loss = loss if self.scaler is None else self.scaler.scale(loss)
        return super().pre_backward(loss, module)

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        # Nearer to the backward than Strategy.backward, which contains on_after_backward.
        self.engine.before_backward()
        super().backward(tensor, model, *args, **kwargs)
        self.engine.after_backward()
        if self.token_mean is not None and not is_inside_step(model.trainer):
            self.token_mean.finish()

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
        if self.scaler is None:
            result = self._wrap_closure(model, optimizer, closure)
            if self._allows_step(optimizer):
                optimizer.step(**kwargs)
            else:
                self.engine.end_step()
            return result
        result = closure()
        had_backward = result is not None or not model.automatic_optimization
        if had_backward:
            # Also for a fused optimizer, which could do it itself, but after clipping.
            self._unscale(unwrap_optimizer(optimizer))  # type: ignore[arg-type]
        self._after_closure(model, optimizer)
        if had_backward:
            if self._scales or self._allows_step(optimizer):
                self._step_scaled(optimizer, **kwargs)
            self.engine.end_step()
        return result

    @override
    def _after_closure(self, model: pl.LightningModule, optimizer: Steppable) -> None:
        if self.token_mean is not None:
            self.token_mean.finish()  # where the step's last micro-batch had no backward
        super()._after_closure(model, optimizer)

    @property
    def _scales(self) -> bool:
        """Whether a gradient scaler skips steps whose gradients are not finite."""
        return self.scaler is not None and self.scaler.is_enabled()

    def _step_scaled(self, optimizer: Steppable, **kwargs: Any) -> None:
        assert self.scaler is not None, "it has unscaled the gradients"
        before = self.scaler.get_scale() if self.nonfinite is not None else 0.0
        self.scaler.step(optimizer, **kwargs)  # type: ignore[arg-type]
        self._unscaled.discard(unwrap_optimizer(optimizer))  # type: ignore[arg-type]
        if self._unscaled:  # clipped by hand, and to step with the same scale
            return
        self.scaler.update()
        if self.nonfinite is not None and self._scales:
            if self.scaler.get_scale() < before:
                self.nonfinite.note_skipped(before)
            self.nonfinite.end_step()

    def _unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale of the loss, once before each step."""
        if self._scales and optimizer not in self._unscaled:
            assert self.scaler is not None, "it scales"
            self.scaler.unscale_(optimizer)
            self._unscaled.add(optimizer)

    def _allows_step(self, optimizer: Steppable) -> bool:
        if self.nonfinite is None:
            return True
        return self.nonfinite.allows_step(optimizer, self.main_params(optimizer))  # type: ignore[arg-type]

    def _allows(self, optimizer: Optimizer, norm: Tensor) -> bool:
        if self.nonfinite is None:
            return True
        return bool(norm.isfinite()) if self._scales else self.nonfinite.allows(optimizer, norm)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = None if self.scaler is None else self.scaler.state_dict()
        if state:  # that of a scaler which is switched off is empty
            checkpoint[_SCALER_KEY] = state

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.scaler is not None and _SCALER_KEY in checkpoint:
            self.scaler.load_state_dict(checkpoint[_SCALER_KEY])

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self._unscale(unwrap_optimizer(optimizer))  # clipped by hand, they are scaled
        allows = functools.partial(self._allows, unwrap_optimizer(optimizer))
        self.engine.clip_grad_norm_(self.main_params(optimizer), float(clip_val), allows=allows)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        guard, optimizer = None if self._scales else self.nonfinite, unwrap_optimizer(optimizer)
        self._unscale(optimizer)
        # Before infinities become ordinary values.
        if guard is None or guard.allows_clipping(optimizer, self.main_params(optimizer)):
            # Elementwise, so slices are enough; torch's own function takes sharded gradients.
            torch.nn.utils.clip_grad_value_(self.main_params(optimizer), clip_value=clip_val)


def _unsupported(precision: Any, plugin: str | None = None) -> str:
    got = repr(precision) if plugin is None else f"{precision!r} ({plugin})"
    supported = ", ".join(repr(name) for name in POLICIES)
    return (
        f"precision: expected one of {supported}, got {got}. {_CURES.get(precision, '')}".rstrip()
    )
