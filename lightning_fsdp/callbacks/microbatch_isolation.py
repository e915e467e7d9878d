"""Whether each micro-batch's gradient stays its own, checked by value while training goes on.

    backward i      every gradient is copied as it arrives: g_i
    after it        what waits on this rank must be g_0 + ... + g_i; or, where this backward
                    reduced, the mean over ranks of that
    next step       before its first backward, nothing of the last step may be left

A copy of each gradient of the step is held by each rank (its whole gradients, once per micro-batch)
in the steps that are looked at. Nothing is switched: micro-batches accumulate as the user chose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fsdp.callbacks import reporting
from lightning_fsdp.callbacks.observing import GradientReader
from lightning_fsdp.callbacks.plain_access import square_of


class GradientsLeaked(RuntimeError):  # noqa: N818 (says what happened)
    """A gradient that waits or was reduced is not the sum of the micro-batches' own gradients."""


@dataclass(frozen=True)
class MicroBatchReport:
    """One step, over all ranks.

    Attributes:
        step: Optimizer step, from 0.
        norms: ``[rank][micro_batch]``: of each one's own gradient, all parameters together, as
            Lightning scales it (divided by ``accumulate_grad_batches``), or by its tokens.
        cosines: Likewise, to the sum of this rank's micro-batches; NaN where a norm is 0.
    """

    step: int
    norms: list[list[float]]
    cosines: list[list[float]]


class MicrobatchIsolationProbe(GradientReader):
    """Raises when a micro-batch's gradient leaks into another one or into the next step.

    Logged in the chosen steps: ``probes/micro_batch/{i}/norm`` and ``.../cosine``, the mean over
    ranks. Hooks of your own that edit gradients have to be there before the step begins, so that
    the probe sees what they leave.

    Args:
        steps: Optimizer steps to look at: a period, or a collection of step numbers from 0.
        tolerance: Of the difference, as a part of the micro-batches' summed norms. ``None``: what
            rounding in the gradients' dtype can explain. Gradients of fp16 that overflowed are not
            compared.

    Attributes:
        reports: One per step looked at.

    Raises:
        GradientsLeaked: On every rank, naming parameter, rank and micro-batches.
        NotImplementedError: A strategy without access to gradients, or manual optimization.
    """

    _own: list[dict[str, Tensor]]  # per micro-batch of this step, by name
    _last: list[dict[str, Tensor]]  # of the step before, for the message

    def __init__(self, *, steps: reporting.Steps = 1, tolerance: float | None = None) -> None:
        self.steps = reporting.checked_steps(steps, self)
        self.tolerance = tolerance
        self.reports: list[MicroBatchReport] = []
        self._own, self._last = [], []
        self._is_new_step = True

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Look at this micro-batch, if its step is chosen."""
        if self._handle is None and reporting.is_chosen(self.steps, trainer.global_step):
            self._handle = self.access.on_local(self._on_local, edits=False)

    @override
    def on_before_zero_grad(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """A step begins; the one before may have been left before its end."""
        self._is_new_step, self._own = True, []

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Nothing may be left when a step begins: by now the Trainer has cleared it. Collective."""
        if self._handle is None:
            return
        if self._is_new_step:
            self._is_new_step = False
            self._check(trainer, "nothing before the first micro-batch")
            self._last = []
        self._own.append({})

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What waits must be the sum of what arrived. Collective."""
        if self._handle is not None:
            self._check(trainer, f"the sum of micro-batches {list(range(len(self._own)))}")

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Report the step. Collective."""
        if self._handle is None:
            return
        self._handle.remove()
        self._handle = None
        self._report(trainer)
        goes_on = reporting.is_chosen(self.steps, trainer.global_step + 1)
        self._last, self._own = (self._own if goes_on else []), []

    # -- the comparison ----------------------------------------------------------------------------

    def _on_local(self, name: str, gradient: Tensor, _micro_batch: int) -> None:
        if self._own:
            self._own[-1][name] = gradient.detach().clone()

    def _check(self, trainer: pl.Trainer, expected: str) -> None:
        """Compare every gradient with the sum of its parts. Collective.

        All ranks judge the same numbers, so that all of them raise, and the same.
        """
        # What was reduced within the replica alone is looked at once all have been averaged.
        names = [name for name in self.access.names() if self.access[name].state != "replica"]
        states = self._agreed_states(trainer, names)
        numbers: list[float] = []
        for name in names:
            parts = self._parts(name)
            size = _norm(self._difference(trainer, name, states[name]))
            numbers += [size, sum(map(_norm, parts)), self._rounding(trainer, parts)]
        of_ranks, factor = reporting.of_every_rank(trainer, numbers), self._factor(trainer)
        for index, name in enumerate(names):
            sizes, scales, roundings = zip(
                *(theirs[3 * index : 3 * index + 3] for theirs in of_ranks), strict=True
            )
            if states[name] == "reduced":
                scales = (sum(scales) / len(scales) * factor,) * len(scales)
            for rank, (size, scale) in enumerate(zip(sizes, scales, strict=True)):
                # A difference that is not finite has an operand that is not: overflow, no leak.
                if math.isfinite(size) and size > max(roundings) * scale:
                    raise GradientsLeaked(
                        f"gradient of {name!r} (rank {rank}, step {trainer.global_step}): expected "
                        f"{expected}, got something else by a norm of {size:.3g}, where theirs add "
                        f"up to {scale:.3g}.{self._origin(trainer, name, states[name], rank)} Look "
                        "for a hook or callback that writes to gradients after the step has begun, "
                        "and for parameters that no zero_grad() reaches."
                    )

    def _agreed_states(self, trainer: pl.Trainer, names: list[str]) -> dict[str, str]:
        """``reduced`` where all ranks have it reduced; else ``local``. Collective."""
        flags = [float(self.access[name].state == "reduced") for name in names]
        of_names = zip(*reporting.of_every_rank(trainer, flags), strict=True)
        states = {}
        for name, of_ranks in zip(names, of_names, strict=True):
            if any(of_ranks) and not all(of_ranks):
                ranks = [rank for rank, is_reduced in enumerate(of_ranks) if is_reduced]
                raise GradientsLeaked(
                    f"gradient of {name!r} (step {trainer.global_step}): expected one state on all "
                    f"ranks, got it reduced on ranks {ranks} alone. Every rank has to run the same "
                    "backwards with the same no_sync()."
                )
            states[name] = "reduced" if all(of_ranks) else "local"
        return states

    def _difference(self, trainer: pl.Trainer, name: str, state: str) -> Tensor:
        """What is there, less the sum of its parts. Collective where it is reduced."""
        gradient, parts = self.access[name], self._parts(name)
        if state == "reduced":
            found = gradient.full().to(trainer.strategy.root_device)
            expected = _sum_of(parts, found)
            if trainer.world_size > 1:
                dist.all_reduce(expected)
            return found - expected * (self._factor(trainer) / trainer.world_size)
        if gradient.state == "local":
            found = gradient.local()
            return found - _sum_of(parts, found)
        return -_sum_of(parts, parts[0]) if parts else torch.zeros(1)

    def _factor(self, trainer: pl.Trainer) -> float:
        """What the mean over tokens has multiplied reduced gradients by: at the step's end."""
        token_mean = getattr(trainer.precision_plugin, "token_mean", None)
        return 1.0 if token_mean is None else float(token_mean.factor)

    def _parts(self, name: str) -> list[Tensor]:
        return [own[name] for own in self._own if name in own]

    def _rounding(self, trainer: pl.Trainer, parts: list[Tensor]) -> float:
        """What part of the summed norms rounding may explain: some steps of the coarsest dtype."""
        if self.tolerance is not None or not parts:
            return self.tolerance or 0.0
        num_additions = len(parts) + trainer.world_size
        return 4 * torch.finfo(parts[0].dtype).eps * math.sqrt(num_additions)

    def _origin(self, trainer: pl.Trainer, name: str, state: str, rank: int) -> str:
        """Which micro-batch a wrong gradient has too much or too little of. Collective."""
        difference = self._difference(trainer, name, state)
        this, last = (
            [_cosine(difference, own.get(name)) for own in owns] for owns in (self._own, self._last)
        )
        cosines = reporting.of_every_rank(trainer, [*this, *last])[rank]
        likeliest = max(range(len(cosines)), key=lambda i: abs(cosines[i]), default=None)
        if likeliest is None or abs(cosines[likeliest]) < 0.9:
            return ""
        is_this = likeliest < len(this)
        index = likeliest if is_this else likeliest - len(this)
        return (
            f" The difference is along micro-batch {index} of {'this' if is_this else 'the last'} "
            f"step (cosine {cosines[likeliest]:.2f})."
        )

    def _report(self, trainer: pl.Trainer) -> None:
        scale = reporting.loss_scale(trainer)
        squares = [sum(float(square_of(g)) for g in own.values()) for own in self._own]
        names = {name: None for own in self._own for name in own}
        total, dots = 0.0, [0.0] * len(self._own)
        for name in names:
            parts = self._parts(name)
            whole = _sum_of(parts, parts[0])
            total += _dot(whole, whole)
            for index, own in enumerate(self._own):
                dots[index] += _dot(own[name], whole) if name in own else 0.0
        cosines = [
            dot / math.sqrt(square * total) if square * total > 0 else math.nan
            for dot, square in zip(dots, squares, strict=True)
        ]
        norms = [math.sqrt(square) * self._factor(trainer) / scale for square in squares]
        of_ranks = reporting.of_every_rank(trainer, [*norms, *cosines])
        num = len(norms)
        report = MicroBatchReport(
            trainer.global_step, [theirs[:num] for theirs in of_ranks], [t[num:] for t in of_ranks]
        )
        self.reports.append(report)
        metrics = {}
        for index in range(num):
            for what, values in (("norm", report.norms), ("cosine", report.cosines)):
                mean = sum(of_rank[index] for of_rank in values) / len(values)
                metrics[f"probes/micro_batch/{index}/{what}"] = mean
        reporting.log(trainer, metrics, trainer.global_step)

    @override
    def release(self, trainer: pl.Trainer) -> None:
        """Forget the gradients."""
        super().release(trainer)
        self._own, self._last = [], []


def _sum_of(parts: list[Tensor], like: Tensor) -> Tensor:
    """In at least fp32, in order of arrival, as gradients are accumulated."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    total = torch.zeros(like.shape, dtype=dtype, device=like.device)
    for part in parts:
        total += part
    return total


def _norm(gradient: Tensor) -> float:
    return float(square_of(gradient).sqrt())


def _dot(a: Tensor, b: Tensor) -> float:
    """In fp64: in 16 bits products of scaled gradients overflow, or are rounded to a few bits."""
    return float(torch.dot(a.flatten().double(), b.flatten().double()))


def _cosine(a: Tensor, b: Tensor | None) -> float:
    if b is None or a.shape != b.shape:
        return 0.0
    product = _norm(a) * _norm(b)
    return _dot(b, a) / product if product else 0.0
