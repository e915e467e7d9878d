"""Tokens per second, where the time of a step goes, and how much of the hardware that uses.

========== ==============================================================================
part       from, to
========== ==============================================================================
data       end of a batch to the start of the next: loading, moving, other callbacks
forward    ``on_train_batch_start`` to ``on_before_backward``
backward   to ``on_after_backward``, with its communication
optimizer  to the end of the batch, where a step was made; otherwise it counts as data
========== ==============================================================================

On CUDA the parts are taken between events on the device's own clock, which nobody waits for until
the numbers are logged. Validation does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.flop_counter import (
    FlopCounterMode,
    addmm_flop,
    sdpa_backward_flop,
    sdpa_flop,
)
from typing_extensions import override

from lightning_fsdp.callbacks import modes, reporting, torch_internals
from lightning_fsdp.callbacks.observing import ObservingCallback

PARTS = ("data", "forward", "backward", "optimizer")


class ThroughputMonitor(ObservingCallback):
    """Logs speed every ``log_every_n_steps`` of the Trainer, over the steps since the last time.

    Logged: ``throughput/tokens_per_s`` (of all ranks together, by the slowest one's clock),
    ``throughput/{data,forward,backward,optimizer}_s`` (seconds per optimizer step, mean over ranks)
    and, where ``peak_flops`` is given, ``throughput/mfu``.

    Args:
        num_tokens: Tokens in a batch of this rank, without padding. ``None``: ones in its
            ``attention_mask``; else entries of ``input_ids`` that are not ``pad_id``.
        pad_id: Of padding in ``input_ids``.
        flops_per_token: Of forward and backward. ``"count"``: torch's ``FlopCounterMode`` counts
            those of each fit's first micro-batch, which runs uncompiled; what is recomputed counts
            once.
        peak_flops: Of one device, per second, in the dtype that is used. ``None``: no MFU.

    Attributes:
        flops_per_token: As given, or as counted once a fit's first micro-batch is through.

    Raises:
        ValueError: ``peak_flops`` without ``flops_per_token``.
        NotImplementedError: Manual optimization.
        TypeError: A batch whose tokens cannot be told.
    """

    flops_per_token: float | None
    _last: float | torch.cuda.Event | None  # the last mark; None before training
    _spans: list[tuple[str, Any, Any]]  # part, its beginning and end
    _tokens: float | Tensor
    _tokens_of_batch: float | Tensor

    def __init__(
        self,
        *,
        num_tokens: Callable[[Any], float | Tensor] | None = None,
        pad_id: int | None = None,
        flops_per_token: float | Literal["count"] | None = None,
        peak_flops: float | None = None,
    ) -> None:
        if peak_flops is not None and flops_per_token is None:
            raise ValueError(
                "ThroughputMonitor(peak_flops=...): expected flops_per_token as well, got None. "
                'Give 6 times the number of parameters, or "count".'
            )
        self._is_counted = flops_per_token == "count"
        self._counts_flops = False  # from the start of training to the end of its first micro-batch
        self.flops_per_token = None if isinstance(flops_per_token, str) else flops_per_token
        self.peak_flops = peak_flops
        self.pad_id = pad_id
        self.num_tokens = num_tokens or partial(tokens_in, pad_id=pad_id)
        self._counter: FlopCounterMode | None = None
        self._tokens_of_batch = 0.0
        self._restart(None)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        super().on_train_start(trainer, pl_module)
        self._device = trainer.strategy.root_device
        self._counts_flops = self._is_counted  # of each fit: another may train another module
        self._restart(self._now())

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Data is there."""
        self._close_counter()  # of a batch that had no backward
        self._mark("data")
        # Read only when they are logged: perhaps the device has still to count them.
        tokens = self.num_tokens(batch)  # added up in fp64: a mask may have come in 16 bits
        self._tokens_of_batch = tokens.double() if isinstance(tokens, Tensor) else tokens
        self._tokens = self._tokens + self._tokens_of_batch
        if self._counts_flops:
            self._counter = flop_counter()
            modes.enter(self._counter)

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Forward is through."""
        self._mark("forward")

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Backward is through."""
        self._mark("backward")
        self._close_counter(counts=True)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """A step is made."""
        self._is_step = True

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """The step is through; log when it is time. Collective then."""
        if not self._is_step:
            return
        self._is_step = False
        self._mark("optimizer")
        self._num_steps += 1
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and trainer.global_step % every == 0:
            self._report(trainer)
            self._restart(self._now())

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock."""
        if self._last is not None:
            self._mark("data")

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start it again, where it ran."""
        if self._last is not None:
            self._last = self._now()

    @override
    def release(self, trainer: pl.Trainer) -> None:
        """Count no more."""
        self._close_counter()

    # -- the clock ---------------------------------------------------------------------------------

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _mark(self, part: str) -> None:
        now = self._now()
        if self._last is not None:
            self._spans.append((part, self._last, now))
        self._last = now

    def _restart(self, now: float | torch.cuda.Event | None) -> None:
        self._last, self._spans = now, []
        self._tokens, self._num_steps, self._is_step = 0.0, 0, False

    def _seconds(self) -> dict[str, float]:
        seconds = dict.fromkeys(PARTS, 0.0)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for part, start, stop in self._spans:
            is_event = isinstance(start, torch.cuda.Event)
            seconds[part] += start.elapsed_time(stop) / 1e3 if is_event else stop - start
        return seconds

    # -- figures -----------------------------------------------------------------------------------

    def _close_counter(self, *, counts: bool = False) -> None:
        if self._counter is None:
            return
        modes.leave(self._counter)
        if counts and (tokens := float(self._tokens_of_batch)):
            self.flops_per_token = self._counter.get_total_flops() / tokens
            self._counts_flops = False
        self._counter = None

    def _report(self, trainer: pl.Trainer) -> None:
        seconds, tokens = self._seconds(), float(self._tokens)
        mine = [tokens, (self.flops_per_token or 0.0) * tokens, *seconds.values()]
        of_ranks = reporting.of_every_rank(trainer, mine)
        slowest = max(sum(parts) for _, _, *parts in of_ranks)
        if slowest <= 0 or not self._num_steps:
            return
        metrics = {"throughput/tokens_per_s": sum(tokens for tokens, *_ in of_ranks) / slowest}
        for index, part in enumerate(PARTS):
            mean = sum(theirs[2 + index] for theirs in of_ranks) / len(of_ranks)
            metrics[f"throughput/{part}_s"] = mean / self._num_steps
        if self.peak_flops is not None:
            flops = sum(flops for _, flops, *_ in of_ranks)
            metrics["throughput/mfu"] = flops / slowest / (self.peak_flops * len(of_ranks))
        # The step is made; the Trainer logs it by its number from 0.
        reporting.log(trainer, metrics, trainer.global_step - 1)


def tokens_in(batch: Any, pad_id: int | None = None) -> float | Tensor:
    """Tokens that are trained on: no padding. 0-d where they have to be counted.

    Args:
        batch: With ``attention_mask`` or ``input_ids``.
        pad_id: The id that pads, where there is no mask.

    Raises:
        TypeError: It has neither.
    """
    if isinstance(batch, Mapping) and "attention_mask" in batch:
        mask: Tensor = batch["attention_mask"]
        return mask.sum(dtype=torch.int64)
    if isinstance(batch, Mapping) and "input_ids" in batch:
        ids: Tensor = batch["input_ids"]
        return ids.numel() if pad_id is None else (ids != pad_id).sum()
    raise TypeError(
        "ThroughputMonitor: expected a batch with attention_mask or input_ids, got "
        f"{type(batch).__name__}. Say how many tokens it has with num_tokens=."
    )


def flop_counter() -> FlopCounterMode:
    """Counts floating-point operations while it is entered; what is recomputed counts once.

    Torch's own, which up to 2.15 does not know the attention that it runs on CPU, a product that
    is added in place (the loss in chunks), nor those of rows with one matrix of several (experts).
    """
    forward, backward = torch_internals.attention_on_cpu()
    counter = torch_internals.ModelFlopCounter(
        display=False,
        custom_mapping={torch_internals.grouped_product(): _grouped_product_flops},
    )
    # Torch's own formulas, which take shapes already.
    counter.flop_registry |= {
        forward: sdpa_flop,
        backward: sdpa_backward_flop,
        torch.ops.aten.addmm_: addmm_flop,
    }
    return counter


def _grouped_product_flops(left: Any, right: Any, *_: Any, **__: Any) -> int:
    # Groups divide the dimension that one of them has, unless both have one for each group.
    groups = left[0] if len(left) == len(right) == 3 else 1
    return int(2 * groups * left[-2] * left[-1] * right[-1])
