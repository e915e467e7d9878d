"""Results for TensorBoard: a run per arm with scalars and HParams, and one with the pictures."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from lightning_fsdp.bench.results import ArmResult, Results, loss_curve, slowest, step_rates

_FIGURES = (  # of a row, that HParams compares
    "tokens_per_s", "step_ms", "loss_last", "mfu", "host_ms", "end_to_end_s", "payload_bytes",
)  # fmt: skip
_PER_RANK = (
    "peak_bytes", "resting_bytes", "peak_rss_bytes", "cuda_peak_allocated_bytes",
    "cuda_peak_reserved_bytes",
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
    figures = {arm.name: _figures(arm) for arm in results.arms}
    metrics = {name: 0.0 for found in figures.values() for name in found}
    first_timed = results.document.get("workload", {}).get("warmup_steps", 0)
    for arm in results.arms:
        with SummaryWriter(str(folder / run_name(arm))) as writer:
            _write_steps(writer, arm, first_timed)
            # Each run names the metrics of all, as TensorBoard takes its columns from any of them.
            for summary in hparams(_settings(arm), metrics):  # type: ignore[no-untyped-call]
                writer.file_writer.add_summary(summary)
            for name, value in figures[arm.name].items():
                writer.add_scalar(name, value)
    with SummaryWriter(str(folder / "pictures")) as writer:
        for name, figure in pictures.items():
            writer.add_figure(name, figure, close=False)


def run_name(arm: ArmResult) -> str:
    """Short, as it stands in front of every curve: ``fsdp2-3_b4``, ``ddp_b4_a2``."""
    engine, stage = arm.kind
    batch_size, grad_accum = arm.shape
    kind = engine if stage is None else f"{engine}-{stage}"
    return f"{kind}_b{batch_size}" + (f"_a{grad_accum}" if grad_accum > 1 else "")


def _settings(arm: ArmResult) -> dict[str, str | int]:
    """What an arm is; the columns of HParams, in this order."""
    engine, stage = arm.kind
    batch_size, grad_accum = arm.shape
    return {
        "engine": engine,
        "stage": "none" if stage is None else str(stage),
        "batch": batch_size,
        "accumulation": grad_accum,
        "ranks": arm.row["num_processes"],
        "failure": arm.failure or "none",
    }


def _figures(arm: ArmResult) -> dict[str, float]:
    figures = {name: arm.get(name) for name in _FIGURES}
    figures |= {name: arm.worst(name) for name in _PER_RANK}
    parts = arm.get("parts_ms") or {}
    figures |= {f"parts/{name}": value for name, value in parts.items()}
    return {f"result/{name}": value for name, value in figures.items() if value is not None}


def _write_steps(writer: SummaryWriter, arm: ArmResult, first_timed: int) -> None:
    _, losses = loss_curve(arm) or ([], [])
    for step, loss in enumerate(losses):
        if math.isfinite(loss):
            writer.add_scalar("train/loss", loss, step)
    if arm.failure is None and arm.runs:
        ranks = arm.runs[0]["ranks"]
        step_s = [rank["step_s"] for rank in ranks]
        rates = step_rates([rank["step_tokens"] for rank in ranks], step_s)
        for step, (seconds, rate) in enumerate(zip(slowest(step_s), rates, strict=True)):
            writer.add_scalar("throughput/step_ms", seconds * 1e3, first_timed + step)
            writer.add_scalar("throughput/tokens_per_s", rate, first_timed + step)
