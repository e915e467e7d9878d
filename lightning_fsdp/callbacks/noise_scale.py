"""The gradient noise scale: how large a batch still pays, from norms that training has anyway.

Gradients of a small and of a large batch have the same mean G, and a spread tr(Sigma) / batch size:

    E |g_small|^2 = |G|^2 + tr(Sigma) / b          a micro-batch of one rank: b samples
    E |g_big|^2   = |G|^2 + tr(Sigma) / B          the step's mean over n micro-batches: B = n b

Two equations, two unknowns, both estimates unbiased. Their ratio B_simple = tr(Sigma) / |G|^2 is
the batch size, in samples, at which noise and signal are equal. The estimates of one step are so
noisy that |G|^2 may be negative; so both are averaged over steps before they are divided.

Where sizes differ, b is the harmonic mean, which keeps the first equation exact. The step's
gradient is a mean with weights w, all equal or by tokens, and 1 / B is the sum of w^2 / b: B = n b
where they are equal.

Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv 1812.06162),
appendix A.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fsdp.callbacks import reporting
from lightning_fsdp.callbacks.observing import GradientReader
from lightning_fsdp.callbacks.plain_access import ReadableGradients, square_of


@dataclass(frozen=True)
class NoiseScale:
    """Averages over steps.

    Attributes:
        signal: Of |G|^2, the squared norm of the mean gradient; noisy, may be negative.
        noise: Of tr(Sigma), the summed variance of one sample's gradient.
        batch_size: Of the whole step, in samples.
    """

    signal: float
    noise: float
    batch_size: float

    @property
    def simple(self) -> float:
        """B_simple, in samples; NaN while the signal is drowned by the noise."""
        return self.noise / self.signal if self.signal > 0 else math.nan


class GradientNoiseScale(GradientReader):
    """Logs the simple noise scale, without any backward of its own.

    Logged, every ``every_n_steps``: ``noise_scale/simple`` (samples), ``/signal`` (|G|^2),
    ``/noise`` (tr(Sigma)), ``/batch_size`` (samples). ``simple`` is left out while the averaged
    signal is not positive. A step with a gradient that is not finite is left out of the averages.

    Args:
        smoothing: Weight of the past in the averages, from 0 on, below 1.
        every_n_steps: How often to log; every step is measured.
        num_samples: Samples in a batch of this rank. ``None``: the first dimension of the first
            tensor in it that has one, and is not empty. Beside ``num_tokens``, better its tokens.

    Raises:
        ValueError: A value out of range, or a step of a single micro-batch on one rank, from which
            nothing can be told.
        NotImplementedError: A strategy without access to gradients, or manual optimization.
    """

    _arriving: list[Tensor]  # squares of this backward's gradients
    _parts: list[tuple[Tensor, float | Tensor, float]]  # squares, weight, samples by micro-batch
    _samples: float  # of the micro-batch at hand

    def __init__(
        self,
        *,
        smoothing: float = 0.95,
        every_n_steps: int = 10,
        num_samples: Callable[[Any], float] | None = None,
    ) -> None:
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing: expected at least 0 and below 1, got {smoothing}.")
        self.smoothing = smoothing
        self.every_n_steps = reporting.checked_period(every_n_steps, self, "every_n_steps")
        self.num_samples = num_samples or _first_dimension
        self._averages = [0.0, 0.0]  # signal and noise; not yet divided by what they weigh
        self._weight = 0.0
        self._forget_step()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at gradients from here on."""
        super().on_train_start(trainer, pl_module)
        if trainer.world_size * trainer.accumulate_grad_batches < 2:
            raise ValueError(
                "GradientNoiseScale: expected at least two micro-batches in a step, which differ "
                "by noise alone, got one rank without accumulation. Set "
                "accumulate_grad_batches=2 (with half the batch size), or train on more ranks."
            )
        self._handle = self.access.on_local(self._on_local, edits=False)
        self._forget_step()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count the samples."""
        self._samples = float(self.num_samples(batch))
        if not 0 <= self._samples < math.inf:
            raise ValueError(
                f"num_samples: expected a finite number, 0 or more, got {self._samples} for batch "
                f"{batch_idx}. Return how many samples this rank has in it."
            )

    @override
    def on_before_zero_grad(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """A step begins; the one before may have been left before its end."""
        self._arriving, self._parts = [], []

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close a micro-batch."""
        scale = reporting.loss_scale(trainer)
        if self._arriving:
            square = torch.stack(self._arriving).sum() / scale**2
            self._parts.append((square, reporting.loss_weight(trainer), self._samples))
        self._arriving = []

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Estimate. Collective; clipping comes later."""
        big = [square_of(g.shard) for g in _reduced(self.access)]
        parts = [(float(square), float(weight), size) for square, weight, size in self._parts]
        # Without a sample or a token there is no gradient.
        parts = [part for part in parts if part[1] > 0 and part[2] > 0]
        self._forget_step()
        numbers = [
            float(torch.stack(big).sum()) if big else 0.0,
            sum(square / weight**2 for square, weight, _ in parts),
            float(len(parts)),
            sum(1 / size for _, _, size in parts),
            sum(weight for _, weight, _ in parts),
            sum(weight**2 / size for _, weight, size in parts),
        ]
        of_ranks = reporting.of_every_rank(trainer, numbers)
        big_square, small_squares, num, inverse_sizes, weights, spread = (
            sum(column) for column in zip(*of_ranks, strict=True)
        )
        big_square /= reporting.num_replicas(trainer)
        big_square /= reporting.scale_before_step(trainer, optimizer) ** 2
        if num < 2 or not math.isfinite(big_square + small_squares):
            return
        if getattr(trainer.strategy, "mean_loss", None) is None:
            # The last step of an epoch may have fewer micro-batches than losses were divided by.
            big_square *= (trainer.world_size / weights) ** 2
        size = weights**2 / spread
        self._average(*_estimate(big_square, small_squares / num, size, num / inverse_sizes))
        if trainer.global_step % self.every_n_steps == 0:
            self._log(trainer, size)

    def estimate(self, batch_size: float = math.nan) -> NoiseScale:
        """The averages so far; NaN before the first step."""
        signal, noise = (a / self._weight if self._weight else math.nan for a in self._averages)
        return NoiseScale(signal, noise, batch_size)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The averages."""
        return {"averages": list(self._averages), "weight": self._weight}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from them."""
        self._averages, self._weight = list(state_dict["averages"]), state_dict["weight"]

    def _on_local(self, _name: str, gradient: Tensor, _micro_batch: int) -> None:
        self._arriving.append(square_of(gradient))

    def _average(self, *estimates: float) -> None:
        kept, new = self.smoothing, 1 - self.smoothing
        self._averages = [
            kept * a + new * e for a, e in zip(self._averages, estimates, strict=True)
        ]
        self._weight = kept * self._weight + new

    def _log(self, trainer: pl.Trainer, batch_size: float) -> None:
        found = self.estimate(batch_size)
        metrics = {
            "noise_scale/signal": found.signal,
            "noise_scale/noise": found.noise,
            "noise_scale/batch_size": found.batch_size,
        }
        if math.isfinite(found.simple):
            metrics["noise_scale/simple"] = found.simple
        reporting.log(trainer, metrics, trainer.global_step)

    def _forget_step(self) -> None:
        self._arriving, self._parts, self._samples = [], [], 0.0


def _estimate(
    big_square: float, small_square: float, big: float, small: float
) -> tuple[float, float]:
    """Unbiased estimates of |G|^2 and tr(Sigma) from squared norms at two batch sizes."""
    signal = (big * big_square - small * small_square) / (big - small)
    noise = (small_square - big_square) / (1 / small - 1 / big)
    return signal, noise


def _reduced(access: ReadableGradients) -> list[Any]:
    gradients = (access[name] for name in access.names())
    return [gradient for gradient in gradients if gradient.state == "reduced"]


def _first_dimension(batch: Any) -> float:
    for tensor in _tensors_in(batch):
        if tensor.dim() and len(tensor):
            return len(tensor)
    raise TypeError(
        "GradientNoiseScale: expected a batch with a tensor of samples in it, got "
        f"{type(batch).__name__}. Say how many it has with num_samples=."
    )


def _tensors_in(batch: Any) -> Iterator[Tensor]:
    """In the order of the batch; what is text or a number has none."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Iterable) and not isinstance(batch, str | bytes):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors_in(part)
