"""Which gradients can be read, when, and in which state; and whether what is read is finite.

================== ======================================================================
moment             is
================== ======================================================================
before_backward    before each backward; between micro-batches, earlier gradients wait
after_zero_grad    the same moment in the first micro-batch: the Trainer has just cleared
after_backward     after each backward, with or without communication
before_step        ``on_before_optimizer_step``: unscaled, before clipping
================== ======================================================================
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fsdp.callbacks import reporting
from lightning_fsdp.callbacks.observing import GradientReader
from lightning_fsdp.callbacks.plain_access import ReadableGradients, square_of
from lightning_fsdp.engines.gradients import GradientUnavailable

Moment = Literal["before_backward", "after_zero_grad", "after_backward", "before_step"]


@dataclass(frozen=True)
class AccessRecord:
    """What could be read at one moment, on all ranks; equal on all of them.

    Attributes:
        step: Optimizer step, from 0.
        micro_batch: Of the step, from 0.
        moment: See the table above.
        states: By original name: ``none``, ``local`` or ``reduced``; ``unavailable`` where there is
            a gradient that cannot be read, or where ranks are in different states.
        norms: Of the readable ones. Reduced: over all ranks. Local: the root of the mean square
            over ranks. Scaled as they were found; unscaled before the step.
        nan: Names of those with NaN on any rank.
        inf: Names of those with an infinity on any rank.
    """

    step: int
    micro_batch: int
    moment: Moment
    states: dict[str, str]
    norms: dict[str, float]
    nan: list[str]
    inf: list[str]

    @property
    def num_accessible(self) -> int:
        """How many original parameters have a gradient that every rank can read."""
        return sum(state in ("local", "reduced") for state in self.states.values())

    @property
    def num_total(self) -> int:
        """How many trainable original parameters there are."""
        return len(self.states)


class GradientAccessProbe(GradientReader):
    """Reads every gradient at every moment of the chosen steps.

    Logged: ``probes/gradient_access/{moment}/accessible`` and ``/total`` (parameters; of the last
    micro-batch), ``probes/gradient_norm/{layer}`` before the optimizer's step,
    ``probes/gradient_access/num_nan`` and ``/num_inf`` (parameters). TensorBoard also gets a
    histogram of the parameters' norms per layer. A gradient that is not finite before the step is
    named in a warning, unless a gradient scaler takes care of it. With a strategy's
    ``on_nonfinite``, what that says also names the first activation that was not finite.

    Args:
        steps: Optimizer steps to look at: a period, or a collection of step numbers from 0.

    Attributes:
        records: All that was seen, in order.

    Raises:
        NotImplementedError: A strategy without access to gradients, or manual optimization.
    """

    def __init__(self, *, steps: reporting.Steps = 50) -> None:
        self.steps = reporting.checked_steps(steps, self)
        self.records: list[AccessRecord] = []
        self._of_step: list[AccessRecord] = []  # those of the step at hand
        self._micro_batch = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look for activations that are not finite as well, where the strategy can."""
        super().on_train_start(trainer, pl_module)
        trace_activations = getattr(trainer.strategy, "trace_activations", None)
        if trace_activations is not None:
            trace_activations()

    @override
    def on_before_zero_grad(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """A step begins; the one before may have been left before its end."""
        self._micro_batch, self._of_step = 0, []

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Look. Collective."""
        self._look(trainer, "before_backward" if self._micro_batch else "after_zero_grad")

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look. Collective."""
        self._look(trainer, "after_backward")
        self._micro_batch += 1

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Look, and report the step. Collective."""
        self._micro_batch = max(self._micro_batch - 1, 0)  # that of the last backward
        scale = reporting.scale_before_step(trainer, optimizer)
        record = self._look(trainer, "before_step", scale)
        if record is not None:
            self._report(trainer, record)

    def _look(self, trainer: pl.Trainer, moment: Moment, scale: float = 1.0) -> AccessRecord | None:
        if not reporting.is_chosen(self.steps, trainer.global_step):
            return None
        names = self.access.names()
        read = [_read(self.access, name) for name in names]
        of_ranks = reporting.objects_of_every_rank(trainer, _figures_of(read))
        states, norms, nan, inf = {}, {}, [], []
        for name, figures in zip(names, zip(*of_ranks, strict=True), strict=True):
            every_state, squares, nans, infs = zip(*figures, strict=True)
            state = every_state[0] if len(set(every_state)) == 1 else "unavailable"
            states[name] = state
            if state in ("local", "reduced"):
                num = len(squares) if state == "local" else reporting.num_replicas(trainer)
                norms[name] = math.sqrt(sum(squares) / num) / scale
            if any(nans):
                nan.append(name)
            if any(infs):
                inf.append(name)
        record = AccessRecord(
            trainer.global_step, self._micro_batch, moment, states, norms, nan, inf
        )
        self.records.append(record)
        self._of_step.append(record)
        return record

    def _report(self, trainer: pl.Trainer, last: AccessRecord) -> None:
        metrics: dict[str, float] = {
            "probes/gradient_access/num_nan": len(last.nan),
            "probes/gradient_access/num_inf": len(last.inf),
        }
        for record in self._of_step:
            moment = f"probes/gradient_access/{record.moment}"
            metrics[f"{moment}/accessible"] = record.num_accessible
            metrics[f"{moment}/total"] = record.num_total
        layers: dict[str, list[float]] = defaultdict(list)
        for name, norm in last.norms.items():
            layers[_layer_of(name)].append(norm)
        for layer, norms in layers.items():
            metrics[f"probes/gradient_norm/{layer}"] = math.hypot(*norms)
        reporting.log(trainer, metrics, last.step)
        for logger in reporting.tensorboards(trainer):
            for layer, norms in layers.items():
                finite = [norm for norm in norms if math.isfinite(norm)]
                if finite:
                    tag = f"probes/gradient_norms/{layer}"
                    logger.experiment.add_histogram(tag, torch.tensor(finite), last.step)
        is_scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        if (last.nan or last.inf) and not is_scaled:
            rank_zero_warn(
                f"Gradients before optimizer step {last.step} are not finite: NaN in {last.nan}, "
                f"infinity in {last.inf}."
            )


def _read(access: ReadableGradients, name: str) -> tuple[str, Tensor | None]:
    gradient = access[name]
    state: Any = gradient.state
    try:
        if state == "none":
            return state, None
        return state, gradient.local() if state == "local" else gradient.shard
    except GradientUnavailable:
        return "unavailable", None


def _figures_of(read: list[tuple[str, Tensor | None]]) -> list[tuple[str, float, float, float]]:
    """Per gradient: state, sum of squares, elements that are NaN, and infinite; one wait."""
    rows = [
        torch.stack([square_of(g), g.isnan().sum().double(), g.isinf().sum().double()])
        for _, g in read
        if g is not None
    ]
    found = iter(torch.stack(rows).tolist() if rows else [])
    return [(state, *(next(found) if g is not None else (0.0, 0.0, 0.0))) for state, g in read]


def _layer_of(name: str) -> str:
    """Up to the first number in a name (``blocks.0``); where there is none, the owning module."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1]) or name
