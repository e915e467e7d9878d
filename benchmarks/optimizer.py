"""Show what becomes of an optimizer that was built before sharding: arms, table, JSON, picture.

    python -m benchmarks.optimizer --out runs/optimizer

Each arm runs in fresh processes (:mod:`~benchmarks.optimizer_ranks`) and is held against
the first of its engine, whose optimizer was built after sharding. A fixed arm must end in the same
bits, with every tensor trained and no optimizer entry that is not the model's; the arm that nobody
fixed, under torch's FSDP2, must have trained nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from benchmarks.command import BenchmarkParser, write_record
from benchmarks.optimizer_ranks import Outcome, Phase, write_outcome
from lightning_fsdp.bench.documents import load, write
from lightning_fsdp.bench.runner import in_turns
from lightning_fsdp.callbacks.memory_picture import thinned
from lightning_fsdp.harness.command_line import (
    at_least,
    end,
    exit_with,
    folder_argument,
    positive,
)
from lightning_fsdp.harness.environment import describe
from lightning_fsdp.harness.ranks import run_ranks_apart
from lightning_fsdp.harness.tables import number, table_of

ENGINES = ("fsdp2", "scratch")
KINDS = ("after", "before_fixed", "before_not_fixed", "lightning")
PEER = "fsdp2_accelerate"
NOT_FIXED = "fsdp2_before_not_fixed"
"""The arm that trains nothing; it shows why the others are needed."""
_MOST_POINTS = 300  # of a phase in the picture
_DASHES = ("-", "--", "-.", ":")  # so that a print in grey can be read


def choose_arms(engines: Iterable[str]) -> list[str]:
    """The arms of some engines; accelerate's if it is installed."""
    arms = [f"{engine}_{kind}" for engine in engines for kind in KINDS]
    if "fsdp2" in engines and importlib.util.find_spec("accelerate") is not None:
        arms.append(PEER)
    return arms


def engine_of(arm: str) -> str:
    """Which engine an arm shards with."""
    return arm.partition("_")[0]


def reference_of(arm: str) -> str:
    """The arm that an arm is held against."""
    return f"{engine_of(arm)}_after"


def compare(args: argparse.Namespace, document: dict[str, Any]) -> int:
    """Run the arms, print the table, write the files.

    Args:
        args: Of the command line.
        document: Command and environment.

    Returns:
        Exit code: 0 if every arm did what it must.
    """
    arms = choose_arms(args.engines)

    def run(arm: str, _: int) -> list[Outcome] | str:
        folder = args.out / "arms" / arm
        given = arm, args.steps, str(folder)
        failure = run_ranks_apart(
            write_outcome, args.ranks, *given, folder=folder, timeout_s=args.timeout
        )
        if failure is not None:
            return f"{failure.says}; see {folder / 'log.txt'}"
        return [load(Outcome, folder / f"rank{rank}.json") for rank in range(args.ranks)]

    made, not_made = in_turns({arm: arm for arm in arms}, 1, run, "arms were not run")
    document["interrupted"] = not_made
    outcomes = {arm: found for arm, found in made if not isinstance(found, str)}
    failures = {arm: found for arm, found in made if isinstance(found, str)} | judge(outcomes)
    table = format_table([arm for arm, _ in made], outcomes, failures)
    write(args.out / "results.json", {**document, "failures": failures, "arms": outcomes})
    (args.out / "report.md").write_text(f"{describe(document)}\n\n{table}\n")
    if outcomes:
        picture = draw({arm: ranks[0].phases for arm, ranks in outcomes.items()})
        picture.savefig(args.out / "memory.png", dpi=150)
    print(f"\n{describe(document)}\n\n{table}\n\nWritten to {args.out}/: report.md, results.json, ")
    print("memory.png (memory of each arm over time), arms/ (a log per arm)")
    return end(not_made, [f"{arm}: {failure}" for arm, failure in failures.items()])


def judge(outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, str]:
    """What is wrong, by arm.

    Args:
        outcomes: Of every rank, by arm; the first arm of an engine is what others are held against.
    """
    wrong: dict[str, str] = {}
    for arm, ranks in outcomes.items():
        reference = outcomes.get(reference_of(arm), [None] * len(ranks))
        for outcome, right in zip(ranks, reference, strict=True):
            if (reason := _judge_rank(outcome, right)) is not None:
                wrong.setdefault(arm, f"rank {outcome.rank}: {reason}")
    return wrong


def _judge_rank(outcome: Outcome, reference: Outcome | None) -> str | None:
    total = len(outcome.weights)
    if outcome.arm == NOT_FIXED:
        if outcome.trained or outcome.num_held:
            return f"expected an optimizer that trains nothing, got {len(outcome.trained)} tensors"
        return None
    if outcome.num_held != outcome.num_entries or outcome.num_entries != total:
        return f"the optimizer holds {outcome.num_held} of the model's {total} parameters"
    if len(outcome.trained) != total:
        untrained = [name for name in outcome.weights if name not in outcome.trained]
        return f"not trained: {', '.join(untrained)}"
    if reference is None:
        return "there is no arm to compare with"
    if outcome.losses != reference.losses:
        return f"losses {outcome.losses} are not those of {reference.arm}, {reference.losses}"
    if outcome.weights != reference.weights:
        return f"weights are not those of {reference.arm}"
    return None


def format_table(
    arms: Sequence[str], outcomes: Mapping[str, Sequence[Outcome]], failures: Mapping[str, str]
) -> str:
    """The table that a person reads, in Markdown."""

    def per_rank(of: Callable[[Outcome], float | None], form: str) -> Callable[[str], str]:
        return lambda arm: " ".join(number(of(o), form, 1e6) for o in outcomes[arm])

    columns: dict[str, Callable[[str], str]] = {
        "arm": lambda arm: f"{arm} WRONG" if arm in outcomes and arm in failures else arm,
        "losses, weights": lambda arm: _likeness(outcomes[arm], outcomes.get(reference_of(arm))),
        "trained": lambda arm: _least(outcomes[arm], lambda o: (len(o.trained), len(o.weights))),
        "entries that are the model's": lambda arm: _least(
            outcomes[arm], lambda o: (o.num_held, o.num_entries)
        ),
        "last loss": lambda arm: f"{fmean(o.losses[-1] for o in outcomes[arm]):.6f}",
        "resting MB per rank": per_rank(lambda o: o.resting_bytes, ".1f"),
        "peak MB per rank": per_rank(lambda o: o.peak_bytes, ".1f"),
        "RSS MB per rank": per_rank(lambda o: o.rss_bytes, ".0f"),
    }
    return table_of(arms, columns, has_failed=lambda arm: arm not in outcomes)


def _least(ranks: Sequence[Outcome], of: Callable[[Outcome], tuple[int, int]]) -> str:
    part, whole = min(map(of, ranks))
    return f"{part}/{whole}"


def _likeness(ranks: Sequence[Outcome], reference: Sequence[Outcome] | None) -> str:
    if reference is None:
        return "?"
    if ranks is reference:
        return "reference"
    losses = [o.losses for o in ranks] == [o.losses for o in reference]
    weights = [o.weights for o in ranks] == [o.weights for o in reference]
    return ", ".join("same" if is_same else "other" for is_same in (losses, weights))


def draw(phases_of: Mapping[str, Sequence[Phase]]) -> Figure:
    """A matplotlib figure that belongs to no window.

    Arms issue different numbers of operations in a phase; each phase is as wide as the others, so
    that what is compared stands above each other.

    Args:
        phases_of: Of one rank, by arm.
    """
    engines = sorted(set(map(engine_of, phases_of)))
    figure = Figure(figsize=(9, 3.4 * len(engines)), layout="constrained")
    panels = figure.subplots(len(engines), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    for engine, axes in zip(engines, panels, strict=True):
        arms = [arm for arm in phases_of if engine_of(arm) == engine]
        names = [phase.name for phase in phases_of[arms[0]]]
        for index, arm in enumerate(arms):
            points: list[tuple[float, float]] = []
            for place, phase in enumerate(phases_of[arm]):
                num = len(phase.live_bytes)
                line = [(place + i / num, n) for i, n in enumerate(phase.live_bytes)]
                points += [(x, n / 1e6) for x, n in thinned(line, _MOST_POINTS)]
            # Arms that do the same lie on each other: the first are wide, the last are thin.
            axes.plot(
                *zip(*points, strict=True), label=arm.removeprefix(f"{engine}_"), alpha=0.8,
                linestyle=_DASHES[index % len(_DASHES)],
                linewidth=1.0 + 1.1 * (len(arms) - 1 - index), drawstyle="steps-post",
            )  # fmt: skip
        for index in range(0, len(names), 2):
            axes.axvspan(index, index + 1, color="black", alpha=0.04, linewidth=0)
        axes.set_xticks([i + 0.5 for i in range(len(names))], names)
        axes.tick_params(axis="x", length=0, labelbottom=True)
        title = f"{engine}: bytes of tensors on rank 0"
        axes.set(title=title, ylabel="MB", xlim=(0, len(names)), ylim=(0, None))
        axes.legend(title="optimizer", fontsize=9, frameon=False, loc="center left",
                    bbox_to_anchor=(1.0, 0.5))  # fmt: skip
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the arms; returns the exit code."""
    args = make_parser().parse(arguments)
    return compare(args, write_record(None, "optimizer", {}, arguments))


def make_parser() -> BenchmarkParser:
    """The options."""
    examples = ["--ranks 2 --steps 4", "--engines scratch --out runs/optimizer-scratch"]
    parser = BenchmarkParser("optimizer", __doc__, examples=examples)
    parser.add_argument(
        "--ranks", type=at_least(2), default=2, metavar="N", help="processes that train together"
    )
    parser.add_some("--engines", ENGINES, "engines to compare")
    parser.add_argument(
        "--steps", type=at_least(1), default=4, metavar="N", help="optimizer steps of each arm"
    )
    parser.add_argument(
        "--timeout", type=positive, default=300.0, help="most seconds that an arm may take"
    )
    parser.add_argument(
        "--out", type=folder_argument, default="runs/optimizer", help="folder for all of it"
    )
    return parser


if __name__ == "__main__":
    exit_with(main)
