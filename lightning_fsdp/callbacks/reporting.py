"""What all callbacks share: when they look, how ranks agree on numbers, where numbers go."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.loggers.tensorboard import TensorBoardLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.optim import Optimizer

from lightning_fsdp.callbacks.torch_internals import unscales_itself
from lightning_fsdp.engines.rank_grid import all_gather_objects

T = TypeVar("T")
Steps = int | Collection[int]
"""Every so many optimizer steps, from the first on; or the numbers of those steps, from 0."""


def checked_steps(steps: Steps, owner: object) -> Steps:
    """The same, if it chooses any step.

    Raises:
        ValueError: A period below 1, no step, or none that can come.
    """
    if isinstance(steps, int):
        can_come = steps >= 1 and not isinstance(steps, bool)
    else:
        is_collection = isinstance(steps, Collection) and not isinstance(steps, str)
        can_come = is_collection and bool(steps) and all(_is_number(step) for step in steps)
    if not can_come:
        raise ValueError(
            f"{type(owner).__name__}(steps=...): expected a period of at least 1 or a collection "
            f"of step numbers, got {steps!r}."
        )
    return steps


def checked_period(period: int, owner: object, option: str) -> int:
    """The same, if it is one.

    Raises:
        ValueError: Below 1, or no whole number.
    """
    if not _is_number(period) or period < 1:
        raise ValueError(
            f"{type(owner).__name__}({option}=...): expected a period of at least 1, got "
            f"{period!r}."
        )
    return period


def _is_number(step: object) -> bool:
    return isinstance(step, int) and not isinstance(step, bool) and step >= 0


def is_chosen(steps: Steps, step: int) -> bool:
    """Whether an optimizer step, counted from 0, is one of them; the same on every rank."""
    return step % steps == 0 if isinstance(steps, int) else step in steps


def loss_scale(trainer: pl.Trainer) -> float:
    """By how much a gradient is too large between its backward and the step: fp16's scaling."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())


def scale_before_step(trainer: pl.Trainer, optimizer: Optimizer) -> float:
    """By how much a gradient is too large in ``on_before_optimizer_step``: mostly 1.

    Lightning's own plugin leaves it to an optimizer that can divide by the scale to do so.
    """
    is_left = isinstance(trainer.precision_plugin, MixedPrecision) and unscales_itself(optimizer)
    return loss_scale(trainer) if is_left else 1.0


def loss_weight(trainer: pl.Trainer) -> float | Tensor:
    """By what the mean loss of the last micro-batch was multiplied, without fp16's scaling."""
    token_mean = getattr(trainer.precision_plugin, "token_mean", None)
    weight: Tensor | None = None if token_mean is None else token_mean.weight
    return 1 / trainer.accumulate_grad_batches if weight is None else weight


def num_replicas(trainer: pl.Trainer) -> int:
    """How often each shard is there, on one rank each."""
    count: int = getattr(trainer.strategy, "num_replicas", 1)
    return count


def of_every_rank(trainer: pl.Trainer, numbers: Sequence[float]) -> list[list[float]]:
    """The numbers of each rank, in rank order, equal on all ranks. Collective.

    Args:
        trainer: Whose default process group is asked.
        numbers: As many on every rank.
    """
    if trainer.world_size == 1:
        return [list(numbers)]
    mine = torch.tensor(numbers, dtype=torch.float64, device=trainer.strategy.root_device)
    every = [torch.empty_like(mine) for _ in range(trainer.world_size)]
    dist.all_gather(every, mine)
    return [theirs.tolist() for theirs in every]


def objects_of_every_rank(trainer: pl.Trainer, mine: T) -> list[T]:
    """What each rank has, in rank order; pickled, so for chosen steps alone. Collective."""
    return all_gather_objects(mine) if trainer.world_size > 1 else [mine]


def log(trainer: pl.Trainer, metrics: Mapping[str, float], step: int) -> None:
    """Hand numbers that all ranks agree on to every logger, on rank 0. No communication."""
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(dict(metrics), step=step)


def tensorboards(trainer: pl.Trainer) -> list[TensorBoardLogger]:
    """Loggers that take pictures and histograms, on rank 0; none elsewhere."""
    if not trainer.is_global_zero:
        return []
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
