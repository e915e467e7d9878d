"""Runs arms, each in processes of its own, in turns; a failed arm is a result with a reason."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_fsdp.bench.arms import Arm, Workload
from lightning_fsdp.bench.measure import RankMeasurement
from lightning_fsdp.bench.progress import in_turns
from lightning_fsdp.harness.processes import run_command


@dataclass
class Run:
    """One run of one arm.

    Attributes:
        ranks: What each rank measured; empty if the run failed.
        wall_s: From start to end of the processes.
        failure: Why there is nothing to show, or ``None``.
        log: File with everything that the processes printed.
    """

    arm: Arm
    repeat: int
    wall_s: float
    log: Path
    ranks: list[RankMeasurement] = field(default_factory=list)
    failure: str | None = None


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
    """
    runs = []
    for repeat, arm in in_turns(arms, repeats):
        runs.append(_run(arm, workload, repeat, out / "runs", timeout_s))
    return runs


def _run(arm: Arm, workload: Workload, repeat: int, out: Path, timeout_s: float) -> Run:
    folder = out / f"{arm.name}_r{repeat}"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier benchmark in the same place
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    command = [sys.executable, "-m", "recipes.train", *arm.recipe_arguments(workload, folder)]
    start = time.perf_counter()
    failure = run_command(command, log=log, timeout_s=timeout_s)
    run = Run(arm, repeat, time.perf_counter() - start, log, failure=failure)
    if failure is None:
        files = [folder / f"rank{rank}.json" for rank in range(arm.num_processes(workload))]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            run.failure = f"no measurement from {', '.join(missing)}"
        else:
            run.ranks = [RankMeasurement(**json.loads(file.read_text())) for file in files]
    return run
