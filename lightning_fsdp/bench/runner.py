"""Runs arms, each in processes of its own; a failed one is a result with a reason.

They take turns, under a bar that says which one, how many, and until when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import yaml
from tqdm import tqdm

from lightning_fsdp.bench.arms import Arm, Workload
from lightning_fsdp.bench.documents import load
from lightning_fsdp.bench.records import RankMeasurement, Run
from lightning_fsdp.harness.command_line import Interrupted
from lightning_fsdp.harness.failures import RankFailure
from lightning_fsdp.harness.processes import empty_folder, run_module

# Runs are few and long: the mean pace of all of them, not that of the last ones.
_BAR = "{desc}{n_fmt}/{total_fmt} |{bar}| {elapsed}, about {remaining} left"

T = TypeVar("T")
R = TypeVar("R")


def in_turns(
    turns: Mapping[str, T],
    repeats: int,
    run: Callable[[T, int], R],
    not_made: str = "runs were not made",
) -> tuple[list[tuple[T, R]], str | None]:
    """Run each once per round, under a bar; silent where nobody watches.

    Args:
        turns: What takes turns, in the order of a round, by a name for people.
        repeats: Rounds.
        run: Given one of them and the round, from 0.
        not_made: What to say of runs that are missing, behind their number.

    Returns:
        What was run, with its result; and after Ctrl-C, how many runs were not made, in words, and
        what was not run at all. One that raises ``Interrupted`` is both: its part of a result comes
        last.

    Raises:
        KeyboardInterrupt: None was made.
    """
    made: list[tuple[T, R]] = []
    rounds = [(repeat, name) for repeat in range(repeats) for name in turns]
    with tqdm(total=len(rounds), bar_format=_BAR, smoothing=0, disable=None) as bar:
        try:
            for repeat, name in rounds:
                which = f", round {repeat + 1}/{repeats}" if repeats > 1 else ""
                bar.set_description(f"{name}{which}")
                made.append((turns[name], run(turns[name], repeat)))
                bar.bar_format = _BAR + ", until {eta:%H:%M}"
                bar.update()
            return made, None
        except KeyboardInterrupt as interrupt:
            num_missing = len(rounds) - len(made)
            if isinstance(interrupt, Interrupted):
                made.append((turns[name], interrupt.part))
            if not made:
                raise
    never = [name for repeat, name in rounds[len(made) :] if repeat == 0]
    names = f"; nothing of {', '.join(never)}" if never else ""
    return made, f"{num_missing} of {len(rounds)} {not_made}{names}"


def run_arm(arm: Arm, workload: Workload, *, repeat: int, out: Path, timeout_s: float) -> Run:
    """Run an arm once, in processes of its own.

    Args:
        arm: What to run.
        workload: What it does.
        repeat: Tells runs of one arm apart.
        out: Folder for a folder of its log and measurements.
        timeout_s: Wall time after which it is ended, with all its processes.
    """
    folder = empty_folder(out / f"{arm.name}_r{repeat}")
    module = [*workload.launcher, "recipes.train", *arm.recipe_arguments(workload, folder)]
    start = time.perf_counter()
    failure = run_module(module, folder, timeout_s=timeout_s)
    run = Run(arm.name, repeat, time.perf_counter() - start, folder / "log.txt")
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
        config = folder / "config.yaml"  # as Lightning's command line wrote it down
        run.config = yaml.safe_load(config.read_text()) if config.exists() else None
    return run


def _out_of_memory(folder: Path) -> str | None:
    """Where and how a run ran out of memory; ``None`` if that is not why it failed."""
    # A rank that loses another one fails as well, so any that ran out of memory is the cause.
    for file in sorted(folder.glob("failure*.json")):
        failure = load(RankFailure, file)
        if failure.is_out_of_memory:
            says = f": {failure.message}" if failure.message else ""
            return f"out of memory on rank {failure.rank}: {failure.type}{says}"
    return None
