"""Results for TensorBoard: a run per arm with scalars and HParams, and one with the pictures."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from lightning_fsdp.bench.records import PER_RANK, Row, worst
from lightning_fsdp.bench.results import Results

_OF_ARM = (
    "tokens_per_s", "step_ms", "loss_last", "mfu", "host_ms", "end_to_end_s", "sent_bytes",
)  # fmt: skip


def write_runs(folder: Path, results: Results, pictures: Mapping[str, Figure]) -> None:
    """Write all runs anew; a figure that was not measured has no scalar.

    Steps count from 0 and from the first warm-up step, as the Trainer's own.

    Args:
        folder: For a folder per run; emptied.
        results: Whose arms become runs.
        pictures: By name; they go into a run of their own.
    """
    shutil.rmtree(folder, ignore_errors=True)
    figures = {arm.arm: _figures(arm) for arm in results.arms}
    metrics = {name: 0.0 for found in figures.values() for name in found}
    first_timed = results.workload.get("warmup_steps", 0)
    for arm in results.arms:
        with SummaryWriter(str(folder / arm.arm)) as writer:
            _write_steps(writer, arm, first_timed)
            # Each run names the metrics of all, as TensorBoard takes its columns from any of them.
            for summary in hparams(_settings(arm), metrics):  # type: ignore[no-untyped-call]
                writer.file_writer.add_summary(summary)
            for name, value in figures[arm.arm].items():
                writer.add_scalar(name, value)
    with SummaryWriter(str(folder / "pictures")) as writer:
        for name, figure in pictures.items():
            writer.add_figure(f"pictures/{name}", figure, close=False)


def _settings(arm: Row) -> dict[str, str | int]:
    """What an arm is: columns of HParams, which shows the first five names of the alphabet."""
    return {
        "engine": arm.engine,
        "stage": "none" if arm.zero_stage is None else str(arm.zero_stage),
        "batch": arm.batch_size,
        "accumulation": arm.grad_accum,
        "ranks": arm.num_processes,
        **({"trouble": arm.failure_kind} if arm.failure_kind is not None else {}),
    }


def _figures(arm: Row) -> dict[str, float]:
    figures = {name: getattr(arm, name) for name in _OF_ARM}
    figures |= {name: worst(getattr(arm, name)) for name in PER_RANK}
    figures |= {f"parts/{name}": value for name, value in (arm.parts_ms or {}).items()}
    return {f"result/{name}": value for name, value in figures.items() if value is not None}


def _write_steps(writer: SummaryWriter, arm: Row, first_timed: int) -> None:
    for step, loss in enumerate(arm.step_losses):
        if math.isfinite(loss):
            writer.add_scalar("train/loss", loss, step)
    if arm.failure is None and arm.runs:
        first = arm.runs[0]
        for step, (seconds, rate) in enumerate(zip(first.slowest_s, first.rates, strict=True)):
            writer.add_scalar("throughput/step_ms", seconds * 1e3, first_timed + step)
            writer.add_scalar("throughput/tokens_per_s", rate, first_timed + step)
