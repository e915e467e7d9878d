"""The largest batch per rank that fits, for each arm: tried, not computed.

Each attempt is a run of a few steps in processes of its own. It fails if the run does, for whatever
reason, or if its tensors take more than the device has. What the search finds is then run at full
length, and given up if that fails. (``python -m lightning_fsdp.plan`` computes, and runs nothing.)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lightning_fsdp.bench import documents
from lightning_fsdp.bench.arms import Arm, Workload, choose_arms
from lightning_fsdp.bench.records import Run
from lightning_fsdp.bench.runner import in_turns, run_arm
from lightning_fsdp.harness.amounts import format_bytes
from lightning_fsdp.harness.command_line import Interrupted, end
from lightning_fsdp.harness.environment import describe
from lightning_fsdp.harness.search import Search, largest_that_fits
from lightning_fsdp.harness.tables import table_of

RunArm = Callable[[Arm, Workload, Path], Run]
"""Runs an arm once; the folder is for its log and measurements."""


@dataclass(frozen=True)
class Found:
    """What the search found for one arm.

    Attributes:
        arm: Its name without the batch size.
        search: Its sizes are batches per rank.
        runs: Of its attempts, in the same order; without one that was interrupted.
    """

    arm: str
    search: Search
    runs: tuple[Run, ...]

    def as_json(self) -> dict[str, Any]:
        """Everything, by name; each attempt with its reason, its memory and its log."""
        document = {"arm": self.arm, "limit": self.search.limit, **asdict(self.search)}
        for tried, run in zip(document["tried"], [*self.runs, Run(self.arm)], strict=False):
            of_run = ("failure_kind", "peak_bytes", "wall_s", "log")
            tried |= {name: getattr(run, name) for name in of_run}
        return document


def search(args: argparse.Namespace, workload: Workload, document: dict[str, Any]) -> int:
    """Find the largest batch of every arm, and write every attempt; returns the exit code."""

    def run(arm: Arm, of: Workload, out: Path) -> Run:
        done = run_arm(arm, of, repeat=0, out=out, timeout_s=args.timeout)
        peaks = [rank.peak_bytes for rank in done.ranks]
        known = " ".join("?" if peak is None else format_bytes(peak) for peak in peaks)
        said = done.failure or f"at most {known}"
        # Above the bar.
        tqdm.write(f"{arm.name}, {of.total_steps} steps, {done.wall_s:.0f} s: {said}")
        sys.stdout.flush()
        return done

    def search_one(arm: Arm, _: int) -> Found:
        cap, device_bytes, out = args.max_batch_size, args.device_memory, args.out / "runs"
        return find_largest(arm, workload, run, cap=cap, device_bytes=device_bytes, out=out)

    # A size is searched, and one process would take the batches of all ranks.
    arms = choose_arms(args.engines, args.stages, [1], args.grad_accum)
    searched = {name_of(arm): arm for arm in arms if arm.engine != "single"}
    made, not_made = in_turns(searched, 1, search_one, "arms were not searched to the end")
    document["interrupted"] = not_made
    found = [each for _, each in made]
    write_found(args.out, found, document)
    print(f"\n{(args.out / 'largest_batch.md').read_text()}\nWritten to {args.out}/: ")
    print("largest_batch.md, largest_batch.json (every attempt), runs/ (a log per run)")
    without = [each for each in found if each.search.largest is None]
    return end(not_made, [f"{each.arm}: no batch fits; {each.search.limit}" for each in without])


def find_largest(
    arm: Arm, workload: Workload, run: RunArm, *, cap: int, device_bytes: int | None, out: Path
) -> Found:
    """Search for one arm, whose own batch size does not matter.

    Args:
        arm: Whose largest batch is asked for.
        workload: What a run at full length does.
        run: Runs an arm once.
        cap: The largest batch to try.
        device_bytes: What all tensors of a rank may take together; ``None``: the device decides.
        out: Folder for all runs.

    Raises:
        Interrupted: After Ctrl-C, with what was found so far.
        KeyboardInterrupt: That was in the first attempt.
    """
    runs: list[Run] = []

    def attempt(of: Workload, folder: str, size: int) -> str | None:
        runs.append(run(replace(arm, batch_size=size), of, out / folder))
        return _why_not(runs[-1], device_bytes)

    in_short = partial(attempt, replace(workload, warmup_steps=1, timed_steps=1), "short")
    try:
        search = largest_that_fits(in_short, cap=cap, verify=partial(attempt, workload, "full"))
    except Interrupted as interrupt:
        raise Interrupted(Found(name_of(arm), interrupt.part, tuple(runs))) from interrupt
    return Found(name_of(arm), search, tuple(runs))


def name_of(arm: Arm) -> str:
    """Of an arm, without the batch size."""
    return f"{arm.kind}_a{arm.grad_accum}"


def format_found(found: Sequence[Found]) -> str:
    """The table that a person reads, in Markdown."""
    columns: dict[str, Callable[[Found], str]] = {
        "arm": lambda each: each.arm,
        "largest batch per rank": lambda each: str(each.search.largest or "none"),
        "why not more": lambda each: each.search.limit,
        "tried": lambda each: " ".join(
            str(tried.size) for tried in each.search.tried if not tried.is_verification
        ),
    }
    return table_of(found, columns)


def write_found(out: Path, found: Sequence[Found], document: dict[str, Any]) -> None:
    """Write ``largest_batch.json``, every attempt with its reason, and ``largest_batch.md``."""
    results = {**document, "arms": [each.as_json() for each in found]}
    documents.write(out / "largest_batch.json", results, indent=1)
    (out / "largest_batch.md").write_text(f"{describe(document)}\n\n{format_found(found)}\n")


def _why_not(run: Run, device_bytes: int | None) -> str | None:
    if run.failure is not None or device_bytes is None:
        return run.failure
    if run.peak_bytes is None:
        return "its memory was not measured"
    return f"takes {format_bytes(run.peak_bytes)}" if run.peak_bytes > device_bytes else None
