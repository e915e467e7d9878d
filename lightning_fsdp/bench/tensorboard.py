"""Results for TensorBoard: a run per arm with scalars and HParams, and one with the pictures."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter

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

    Args:
        folder: For a folder per run; emptied.
        results: Whose arms become runs.
        pictures: By name; they go into a run of their own.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for arm in results.arms:
        with SummaryWriter(str(folder / arm.name)) as writer:
            _write_arm(writer, arm)
    with SummaryWriter(str(folder / "pictures")) as writer:
        for name, figure in pictures.items():
            writer.add_figure(name, figure, close=False)


def _write_arm(writer: SummaryWriter, arm: ArmResult) -> None:
    _, losses = loss_curve(arm) or ([], [])
    for step, loss in enumerate(losses, start=1):
        if math.isfinite(loss):
            writer.add_scalar("loss", loss, step)
    if arm.failure is None and arm.runs:
        ranks = arm.runs[0]["ranks"]
        step_s = [rank["step_s"] for rank in ranks]
        rates = step_rates([rank["step_tokens"] for rank in ranks], step_s)
        for step, (seconds, rate) in enumerate(zip(slowest(step_s), rates, strict=True), start=1):
            writer.add_scalar("timed_step/ms", seconds * 1e3, step)
            writer.add_scalar("timed_step/tokens_per_s", rate, step)
    figures = {name: arm.get(name) for name in _FIGURES}
    figures |= {name: arm.worst(name) for name in _PER_RANK}
    parts = arm.get("parts_ms") or {}
    figures |= {f"parts/{name}": value for name, value in parts.items()}
    engine, stage = arm.kind
    writer.add_hparams(
        {
            "engine": engine,
            "zero_stage": "none" if stage is None else str(stage),
            "batch_size": arm.shape[0],
            "grad_accum": arm.shape[1],
            "num_processes": arm.row["num_processes"],
            "failure": arm.failure or "none",
        },
        {f"result/{name}": value for name, value in figures.items() if value is not None},
        run_name=".",
    )
