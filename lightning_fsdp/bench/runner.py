"""Runs arms, each in processes of its own, in turns; a failed arm is a result with a reason."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightning_fsdp.bench.arms import Arm, Workload
from lightning_fsdp.bench.failure import FailureKind, RankFailure
from lightning_fsdp.bench.progress import in_turns
from lightning_fsdp.bench.rank_measurement import RankMeasurement
from lightning_fsdp.harness.processes import run_command


@dataclass
class Run:
    """One run of one arm.

    Attributes:
        ranks: What each rank measured; empty if the run failed.
        wall_s: From start to end of the processes.
        failure: Why there is nothing to show, or ``None``.
        failure_kind: By the type of what a rank raised; ``None`` without a failure.
        log: File with everything that the processes printed.
        config: All options of the recipe, given or not; ``None`` where it did not come to them.
    """

    arm: Arm
    repeat: int
    wall_s: float
    log: Path
    ranks: list[RankMeasurement] = field(default_factory=list)
    failure: str | None = None
    failure_kind: FailureKind | None = None
    config: dict[str, Any] | None = None


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
    wall_s = time.perf_counter() - start
    if failure is not None:
        memory = _out_of_memory(folder)
        kind: FailureKind = failure.kind if memory is None else "out of memory"
        return Run(arm, repeat, wall_s, log, failure=memory or failure.says, failure_kind=kind)
    files = [folder / f"rank{rank}.json" for rank in range(arm.num_processes(workload))]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        says = f"no measurement from {', '.join(missing)}"
        return Run(arm, repeat, wall_s, log, failure=says, failure_kind="no measurement")
    ranks = [RankMeasurement(**json.loads(file.read_text())) for file in files]
    return Run(arm, repeat, wall_s, log, ranks=ranks, config=_config(folder))


def _config(folder: Path) -> dict[str, Any] | None:
    """As Lightning's command line wrote it down."""
    path = folder / "config.yaml"
    config: dict[str, Any] | None = yaml.safe_load(path.read_text()) if path.exists() else None
    return config


def _out_of_memory(folder: Path) -> str | None:
    """Where and how a run ran out of memory; ``None`` if that is not why it failed."""
    # A rank that loses another one fails as well, so any that ran out of memory is the cause.
    for file in sorted(folder.glob("failure*.json")):
        failure = RankFailure(**json.loads(file.read_text()))
        if failure.is_out_of_memory:
            says = f": {failure.message}" if failure.message else ""
            return f"out of memory on rank {failure.rank}: {failure.type}{says}"
    return None
