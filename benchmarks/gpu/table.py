"""What was found, in at most 100 lines: failures by name, goals beside results, cases in order."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Case, all_cases, small_cases
from benchmarks.gpu.recipes import NAMES
from benchmarks.gpu.record import DONE, FAILED, OUT_OF_MEMORY, Record
from lightning_fsdp.harness.tables import markdown_table

MOST_LINES = 100
_MOST_FAILURES, _MOST_GOALS, _WIDTH = 12, 16, 119
_PART_OF_FILE = {"tests.json": "tests", "speed.json": "speed", "recipes.json": "recipes"}
_HEAD = ("case", "tokens/s", "MFU %", "step", "GiB", "exposed", "host", "opt", "graph")

Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Goal:
    """A ratio and what it should be.

    Attributes:
        of: What was measured.
        found: The ratio.
        wanted: The least that it should be.
    """

    of: str
    found: float
    wanted: float

    @property
    def is_met(self) -> bool:
        """Whether what was found is enough."""
        return self.found >= self.wanted


def write_table(folder: Path) -> str:
    """The table of a folder's records, also written there as ``table.txt``."""
    records = {part: Record(folder / name) for name, part in _PART_OF_FILE.items()}
    lines = [line[:_WIDTH] for line in _lines(records)][:MOST_LINES]
    text = "\n".join(lines)
    (folder / "table.txt").write_text(f"{text}\n")
    return text


def table_of(document: Mapping[str, Any]) -> str:
    """Goals and cases of ``speed.json`` as tables for a page."""
    results, peak = document["results"], document["sessions"][-1]["peak_tflops"]
    found = [(g.of, f"{g.found:.3f}", f"{g.wanted:g}") for g in goals(results, peak)]
    done = [case for case in all_cases() if results.get(case.name, {}).get("state") == DONE]
    cases = [_row(case, results[case.name], peak) for case in done]
    return f"{markdown_table(('goal', 'found', 'wanted'), found)}\n\n{markdown_table(_HEAD, cases)}"


def count_failures(folder: Path) -> int:
    """Tests, cases and recipes that failed; what did not fit on the device is a result."""
    records = [Record(folder / name) for name in _PART_OF_FILE]
    return sum(r["state"] == FAILED for record in records for r in record.results.values())


def tokens_per_s(result: Mapping[str, Any]) -> float:
    """Of one rank, by the median step."""
    return float(result["batch"] * result["seq_len"] / statistics.median(result["step_s"]))


def mfu(result: Mapping[str, Any], peak_tflops: float) -> float:
    """Of one rank: operations that the model needs, of those that its device could do."""
    return float(result["flops_per_token"] * tokens_per_s(result) / (peak_tflops * 1e12))


def goals(results: Results, peak_tflops: float) -> list[Goal]:
    """What is wanted of every setting that was measured, most telling first."""
    found = []
    for case in all_cases():
        if case.arm not in ("scratch_zero3", "scratch_zero2"):
            continue
        core = _result_of(results, case, case.arm)
        if core is None:
            continue
        for arm, wanted in ((case.arm.replace("scratch", "fsdp2"), 1.05), ("unsharded", 0.98)):
            other = _result_of(results, case, arm)
            if other is not None:
                ratio = tokens_per_s(core) / tokens_per_s(other)
                found.append(Goal(f"{case.name}: tokens/s of {arm}'s", ratio, wanted))
        is_large = case.setting.model in ("gpt2-xl", "qwen2.5-1.5b")
        if is_large and case.setting.is_compiled and case.world_size == 1:
            found.append(Goal(f"{case.name}: MFU", mfu(core, peak_tflops), 0.5))
    return found


def farthest_losses(results: Results) -> tuple[float, str] | None:
    """How far an arm's losses are from the unsharded model's at one rank, and which arm's."""
    apart = []
    for case in all_cases():
        mine, whole = (_result_of(results, case, arm) for arm in (case.arm, "unsharded"))
        if mine is not None and whole is not None and mine is not whole:
            pairs = zip(mine["losses"], whole["losses"], strict=True)
            apart.append((max(abs(one - other) for one, other in pairs), case.name))
    return max(apart, default=None)


def _result_of(results: Results, case: Case, arm: str) -> Mapping[str, Any] | None:
    result = results.get(Case(setting=case.setting, arm=arm, world_size=case.world_size).name)
    return result if result is not None and result["state"] == DONE else None


def _lines(records: Mapping[str, Record]) -> Iterator[str]:
    sessions = [session for record in records.values() for session in record.sessions]
    session = sessions[-1]
    device, versions = session["device"], session["versions"]
    commits = sorted({(each["commit"] or "unknown")[:12] for each in sessions})
    yield (
        f"{session['date'][:10]}, {device['name']}, driver {device.get('driver')}; torch "
        f"{versions['torch']}; commit {', '.join(commits)}"
    )
    before = [*_head_of(records), *_of_recipes(records["recipes"])]
    yield from before
    is_small = device["type"] == "cpu"
    of_goals = list(_of_goals(records["speed"], is_small=is_small))
    yield from of_goals
    room = MOST_LINES - len(before) - len(of_goals) - 1
    yield from _of_cases(records["speed"], is_small=is_small, room=room)


def _head_of(records: Mapping[str, Record]) -> Iterator[str]:
    """Each part in a line, and what failed in it."""
    for part, record in records.items():
        if not record.sessions:
            yield f"{part}: not run"
            continue
        if record.sessions[-1]["missing"]:
            packages = " ".join(record.sessions[-1]["missing"])
            yield f"{part}: left out, as this is not installed: {packages}"
            continue
        states = Counter(result["state"] for result in record.results.values())
        names = {"speed": [case.name for case in _cases_of(record)], "recipes": NAMES}
        missing = [name for name in names.get(part, ()) if name not in record.results]
        states["not reached"] += len(missing)
        yield f"{part}: " + ", ".join(f"{n} {state}" for state, n in states.items() if n)
        failed = [(n, r) for n, r in record.results.items() if r["state"] == FAILED]
        for name, result in failed[:_MOST_FAILURES]:
            says = str(result.get("says", "")).strip().splitlines()
            yield f"  FAILED {name}: {says[-1] if says else ''}"
        if len(failed) > _MOST_FAILURES:
            yield f"  and {len(failed) - _MOST_FAILURES} more, in {part}.json"


def _of_recipes(record: Record) -> Iterator[str]:
    for name, result in record.results.items():
        if result["state"] == DONE:
            logged = result["fit"]
            losses, rates = logged["train/loss"], logged["throughput/tokens_per_s"]
            yield (
                f"  {name}: loss {losses[0]:.3f} to {losses[-1]:.3f}, "
                f"{statistics.median(rates):,.0f} tokens/s, "
                f"{max(logged['memory/rank0_GiB']):.1f} GiB; resumed from "
                f"{result['checkpoint_bytes'] / 1e9:.2f} GB, {result['most_apart']:.1e} apart"
            )
            yield f"    {result['text'][0]!a}"


def _of_goals(record: Record, *, is_small: bool) -> Iterator[str]:
    if not record.sessions:
        return
    apart = farthest_losses(record.results)
    if apart is not None:
        yield f"losses at one rank: {apart[0]:.2g} from the unsharded model's at most ({apart[1]})"
    peak = record.sessions[-1]["peak_tflops"]
    found = goals(record.results, peak)
    met = sum(goal.is_met for goal in found)
    if is_small:
        yield f"goals: {len(found)} compared; in small on a CPU they mean nothing"
        return
    yield f"goals: {met} of {len(found)} met (assumed peak: {peak:g} TFLOP/s in bfloat16)"
    for goal in sorted(found, key=lambda goal: goal.is_met)[:_MOST_GOALS]:
        verdict = "met" if goal.is_met else "MISSED"
        yield f"  {verdict:6} {goal.found:.3f} (goal {goal.wanted:g}): {goal.of}"
    if len(found) > _MOST_GOALS:
        yield f"  and {len(found) - _MOST_GOALS} more"


def _of_cases(record: Record, *, is_small: bool, room: int) -> Iterator[str]:
    cases = [case for case in _cases_of(record) if record.state_of(case.name) is not None]
    cases = [case for case in cases if record.state_of(case.name) != FAILED]
    if not cases:
        return
    most = room - 4  # the sentence before, the head with its line, the sentence after
    yield "speed, per rank: medians in ms, of steps with quartiles; peaks of memory (and reserved)"
    peak = None if is_small else record.sessions[-1]["peak_tflops"]
    rows = [_row(case, record.results[case.name], peak) for case in cases[:most]]
    lines = markdown_table(_HEAD, rows).splitlines()
    yield from (line.strip("|- ").replace(" | ", " ") for line in lines if line.strip("|- "))
    if len(cases) > most:
        yield f"and {len(cases) - most} more, in speed.json"


def _row(case: Case, result: Mapping[str, Any], peak_tflops: float | None) -> list[str]:
    name = f"{case.setting.name} {case.arm} {case.world_size}"
    if result["state"] == OUT_OF_MEMORY:
        return [name, OUT_OF_MEMORY, *[""] * (len(_HEAD) - 2)]
    low, median, high = (1e3 * s for s in statistics.quantiles(result["step_s"], n=4))
    allocated, reserved = result["peak_allocated_bytes"], result["peak_reserved_bytes"]
    return [
        name,
        f"{tokens_per_s(result):,.0f}",
        "" if peak_tflops is None else f"{100 * mfu(result, peak_tflops):.1f}",
        f"{median:.4g} {low:.4g}..{high:.4g}",
        "" if allocated is None else f"{allocated / 2**30:.3g} {reserved / 2**30:.3g}",
        _ms(result["exposed_s"]),
        _ms(result["host_s"], statistics.median),
        _ms(result["optimizer_s"], statistics.median),
        _ms(result.get("captured_optimizer_s"), statistics.median),
    ]


def _ms(seconds: Any, over: Callable[[Any], float] = float) -> str:
    return "" if seconds is None else f"{1e3 * over(seconds):.1f}"


def _cases_of(record: Record) -> list[Case]:
    is_small = record.sessions[-1]["device"]["type"] == "cpu" if record.sessions else False
    return small_cases() if is_small else all_cases()
