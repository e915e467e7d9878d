"""Runs arms, each in processes of its own, in turns; a failed arm is a result with a reason."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from lightning_fsdp.bench.arms import Arm, Workload
from lightning_fsdp.bench.measure import RankMeasurement


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
    turns = [(repeat, arm) for repeat in range(repeats) for arm in arms]
    with tqdm(turns, unit="run", disable=None) as bar:
        for repeat, arm in bar:
            bar.set_description(f"{arm.name} (round {repeat + 1} of {repeats})")
            runs.append(_run(arm, workload, repeat, out / "runs", timeout_s))
    return runs


def _run(arm: Arm, workload: Workload, repeat: int, out: Path, timeout_s: float) -> Run:
    folder = out / f"{arm.name}_r{repeat}"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier benchmark in the same place
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    command = [sys.executable, "-m", "recipes.train", *arm.recipe_arguments(workload, folder)]
    start = time.perf_counter()
    with log.open("wb") as stream:
        # A session of its own, so that ending it also ends the ranks that the script starts.
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=_environment(),
        )
        try:
            code = process.wait(timeout_s)
            failure = None if code == 0 else f"exit code {code}: {_last_line(log)}"
        except subprocess.TimeoutExpired:
            failure = f"took longer than {timeout_s:.0f} s"
        finally:
            _end(process)
    run = Run(arm, repeat, time.perf_counter() - start, log, failure=failure)
    if failure is None:
        files = [folder / f"rank{rank}.json" for rank in range(arm.num_processes(workload))]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            run.failure = f"no measurement from {', '.join(missing)}"
        else:
            run.ranks = [RankMeasurement(**json.loads(file.read_text())) for file in files]
    return run


def _environment() -> dict[str, str]:
    # One thread per rank: more would let the arms with fewer processes use more of the machine.
    inherited = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _end(process: subprocess.Popen[bytes]) -> None:
    for kind, grace_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, kind)
        except ProcessLookupError:
            break
        deadline = time.perf_counter() + grace_s
        while time.perf_counter() < deadline and process.poll() is None:
            time.sleep(0.05)
    process.wait()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    return lines[-1] if lines else "no output"
