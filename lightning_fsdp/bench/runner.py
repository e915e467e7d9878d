"""Runs arms, each in processes of its own, in turns; a failed arm is a result with a reason."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_fsdp.bench.arms import Arm, Workload
from lightning_fsdp.bench.documents import load
from lightning_fsdp.bench.failure import RankFailure
from lightning_fsdp.bench.progress import in_turns
from lightning_fsdp.bench.records import RankMeasurement, Run
from lightning_fsdp.harness.processes import run_command


def run_arms(
    arms: Sequence[Arm], workload: Workload, *, repeats: int, out: Path, timeout_s: float
) -> list[Run]:
    """Run every arm ``repeats`` times, one round after another.

    Args:
        arms: What to compare.
        workload: What each arm does.
        repeats: Rounds over all arms.
        out: Folder for logs and measurements.
        timeout_s: Wall time after which a run is ended, with all its processes.

    Returns:
        All runs; those so far after Ctrl-C, if there are any.
    """
    runs: list[Run] = []
    try:
        for repeat, arm in in_turns(arms, repeats):
            run = run_arm(arm, workload, repeat=repeat, out=out / "runs", timeout_s=timeout_s)
            runs.append(run)
    except KeyboardInterrupt:
        if not runs:
            raise
    return runs


def run_arm(arm: Arm, workload: Workload, *, repeat: int, out: Path, timeout_s: float) -> Run:
    """Run an arm once, in processes of its own.

    Args:
        arm: What to run.
        workload: What it does.
        repeat: Tells runs of one arm apart.
        out: Folder for a folder of its log and measurements.
        timeout_s: Wall time after which it is ended, with all its processes.
    """
    folder = out / f"{arm.name}_r{repeat}"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier benchmark in the same place
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    recipe = ["recipes.train", *arm.recipe_arguments(workload, folder)]
    command = [sys.executable, "-m", *workload.launcher, *recipe]
    start = time.perf_counter()
    failure = run_command(command, log=log, timeout_s=timeout_s)
    run = Run(arm.name, repeat, time.perf_counter() - start, log)
    files = [folder / f"rank{rank}.json" for rank in range(arm.num_processes(workload))]
    missing = [file.name for file in files if not file.exists()]
    if failure is not None:
        memory = _out_of_memory(folder)
        run.failure = memory or failure.says
        run.failure_kind = failure.kind if memory is None else "out of memory"
    elif missing:
        run.failure = f"no measurement from {', '.join(missing)}"
        run.failure_kind = "no measurement"
    else:
        run.ranks = [load(RankMeasurement, file) for file in files]
        run.config = _config(folder)
    return run


def _config(folder: Path) -> dict[str, Any] | None:
    """As Lightning's command line wrote it down."""
    path = folder / "config.yaml"
    config: dict[str, Any] | None = yaml.safe_load(path.read_text()) if path.exists() else None
    return config


def _out_of_memory(folder: Path) -> str | None:
    """Where and how a run ran out of memory; ``None`` if that is not why it failed."""
    # A rank that loses another one fails as well, so any that ran out of memory is the cause.
    for file in sorted(folder.glob("failure*.json")):
        failure = load(RankFailure, file)
        if failure.is_out_of_memory:
            says = f": {failure.message}" if failure.message else ""
            return f"out of memory on rank {failure.rank}: {failure.type}{says}"
    return None
