"""How engines scale: each arm in one process, among more and more ranks that are only modelled.

An arm runs as it does otherwise (the recipe's command line, the same callback) as the first of
``N`` hosts with one device each, which is all that Lightning has to be told. Its group is there
before the strategy asks for one, and simulated; see ``simulate/``. It is dealt ``1 / N`` of the
data, and its shards are ``1 / N`` of the model. The reference is one process that trains the whole
model on one rank's batches: what a rank could do if communication and sharding were free.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lightning_fsdp.bench import documents, plot_style
from lightning_fsdp.bench.arms import Arm, Workload, choose_arms, notes_on
from lightning_fsdp.bench.documents import PerStep
from lightning_fsdp.bench.records import OfArm, Run, in_ms, listed, of_all
from lightning_fsdp.bench.results import kind_label, shape_label
from lightning_fsdp.bench.runner import in_turns, run_arm
from lightning_fsdp.harness.command_line import end
from lightning_fsdp.harness.environment import describe
from lightning_fsdp.harness.tables import bullets, number, table_of
from lightning_fsdp.simulate.among import launcher
from lightning_fsdp.simulate.network import Network
from lightning_fsdp.simulate.transfer import Usage

_NOTED_LATE_SHARE = 0.05  # of a step
_OF_PADDING = (
    "FSDP2 deals out rows of each parameter, and pads them to a multiple of the ranks: every rank "
    "sends a row at least. Where a parameter has fewer rows than there are ranks (a layer of width "
    "128 among 1024), most of what is sent is padding, which grows with the ranks."
)
_NOTHING = Usage().per_step_since(Usage(), 1)  # takes one process of a network
_REMEDY = "Simulate again, or name another folder."


@dataclass(kw_only=True)
class Point(OfArm):
    """One arm among one number of ranks. Times are medians over the timed steps, or their means.

    Attributes:
        tokens_per_s_per_rank: Of rank 0, which stands for all.
        efficiency: The same of what one unsharded process reaches; ``None`` without that one.
        step_ms: Median.
        exposed_ms: Per step, for which the program waited for the network; ``None`` where the
            engine waits unseen.
        busy_ms: Per step, for which the network carries this rank's data.
        late_ms: Per step, by which this machine was slower than the network that it stands for.
        calls: Per step, by kind.
        sent_bytes: Per step, by each rank.
        failure: Why the other fields are empty.
    """

    world_size: int
    tokens_per_s_per_rank: float | None = None
    efficiency: float | None = None
    step_ms: float | None = None
    exposed_ms: float | None = None
    busy_ms: float | None = None
    late_ms: float | None = None
    calls: dict[str, PerStep] | None = None
    sent_bytes: PerStep | None = None
    failure: str | None = None


def simulate(args: argparse.Namespace, workload: Workload, document: dict[str, Any]) -> int:
    """Run every arm among every number of ranks, the references alone, and write how they scale.

    All of it takes turns, so that a slow hour of the machine is nobody's.

    Args:
        args: Of the command line.
        workload: What each arm does, on one rank.
        document: Command, environment and workload.

    Returns:
        Exit code: 0 if every arm ran.
    """
    arms = choose_arms(args.engines, args.stages, args.batch_sizes, args.grad_accum)
    networks = args.networks
    works = {1: workload} | {network.world_size: _among(workload, network) for network in networks}
    turns = [(1, arm) for arm in arms if arm.engine == "single"]
    turns += [(n.world_size, arm) for n in networks for arm in arms if arm.engine != "single"]

    def run(turn: tuple[int, Arm], repeat: int) -> Run:
        world_size, arm = turn
        out = args.out / "runs" / f"world{world_size}"
        return run_arm(arm, works[world_size], repeat=repeat, out=out, timeout_s=args.timeout)

    named = {f"{arm.name} among {n}": (n, arm) for n, arm in turns}
    made, not_made = in_turns(named, args.repeats, run)
    document["interrupted"] = not_made
    points: list[Point] = []
    for world_size, arm in dict.fromkeys(turn for turn, _ in made):
        point = Point(arm=arm.name, **asdict(arm), world_size=world_size)
        runs = [done for turn, done in made if turn == (world_size, arm)]
        _fill_in(point, runs)
        points.append(point)
        # One process comes first of those with its batch.
        alone = next(each for each in points if each.shape == point.shape)
        rates = point.tokens_per_s_per_rank, alone.tokens_per_s_per_rank
        point.efficiency = of_all(lambda both: both[0] / both[1], rates)
    write_scaling(args.out, points, networks[-1], document)
    print((args.out / "scaling.md").read_text())
    print(f"Written to {args.out}/: scaling.md, .csv, .json, .png, .svg")
    failed = [point for point in points if point.failure is not None]
    return end(not_made, [f"{p.arm} at {p.world_size}: {p.failure}" for p in failed])


def _among(workload: Workload, network: Network) -> Workload:
    overrides = (
        *workload.overrides,
        *("--trainer.num_nodes", str(network.world_size)),
        *("--data.val_fraction", "0"),  # nothing is validated, and so many ranks want much of it
    )
    ranks = launcher(network, workload.accelerator)
    return replace(workload, overrides=overrides, launcher=ranks)


def _fill_in(point: Point, runs: Sequence[Run]) -> None:
    """What the runs have shown."""
    failures = [run.failure for run in runs if run.failure is not None]
    if failures:
        point.failure = failures[0]
        return
    point.tokens_per_s_per_rank = statistics.median(rate for run in runs for rate in run.rates)
    point.step_ms = 1e3 * statistics.median(step for run in runs for step in run.slowest_s)
    used = [run.ranks[0].simulated or _NOTHING for run in runs]
    point.exposed_ms = in_ms(statistics.fmean, [each["waited_s"] for each in used])
    point.busy_ms = in_ms(statistics.fmean, [each["busy_s"] for each in used])
    point.late_ms = in_ms(statistics.fmean, [each["late_s"] for each in used])
    point.calls, point.sent_bytes = used[0]["calls"], used[0]["sent_bytes"]


@dataclass
class _Study:
    points: list[Point]


def write_scaling(
    out: Path, points: Sequence[Point], largest: Network, document: dict[str, Any]
) -> None:
    """Write ``scaling.csv``, ``scaling.json``, ``scaling.md`` and the picture, in two forms."""
    assumptions = largest.assumptions(document["workload"]["accelerator"])
    found = {"network": largest, "assumptions": assumptions, "points": points}
    documents.write(out / "scaling.json", {**document, **found}, indent=1)
    documents.write_csv(out / "scaling.csv", points)
    sections = [
        describe(document),
        table_of(points, _COLUMNS, has_failed=lambda point: point.step_ms is None, num_names=2),
        *notes_on(document["workload"]["precision"]),
        "Simulated; this is assumed:",
        bullets(assumptions),
    ]
    (out / "scaling.md").write_text("\n\n".join(sections) + "\n")
    plot_style.save(draw(points), out, "scaling", dpi=150)


def redraw_scaling(folder: Path) -> None:
    """Make the picture of a ``scaling.json`` again.

    Raises:
        ValueError: It cannot be read, or is damaged.
    """
    path, expected = folder / "scaling.json", "a scaling study"
    points = documents.read(_Study, path, expected=expected, remedy=_REMEDY).points
    if not points:
        raise ValueError(f"{path}: expected {expected}, got no points. {_REMEDY}")
    plot_style.save(draw(points), folder, "scaling", dpi=150)


def _step(point: Point) -> str:
    is_late = (point.late_ms or 0.0) > _NOTED_LATE_SHARE * (point.step_ms or 0.0)
    return number(point.step_ms, ".0f") + (" (bound by this machine)" if is_late else "")


_COLUMNS: dict[str, Callable[[Point], str]] = {
    "arm": lambda point: point.arm,
    "ranks": lambda point: str(point.world_size),
    "tokens/s per rank": lambda point: number(point.tokens_per_s_per_rank, ",.0f"),
    "efficiency": lambda point: number(point.efficiency, ".0%"),
    "step ms": _step,
    "exposed ms": lambda point: number(point.exposed_ms, ".1f"),
    "on network ms": lambda point: number(point.busy_ms, ".1f"),
    "collectives per step": lambda point: listed(point.calls or {}),
    "MB sent per step": lambda point: number(point.sent_bytes or 0, ".1f", unit=1e6),
}


def draw(points: Sequence[Point]) -> Figure:
    """A figure that belongs to no window.

    Args:
        points: What failed is left out of the lines and named in the legend.
    """
    shapes = list(dict.fromkeys(point.shape for point in points))
    size = 13, 1.2 + 3.8 * len(shapes)
    figure, rows = plot_style.new_figure("", size, (len(shapes), len(_PANELS)))
    for shape, panels in zip(shapes, rows, strict=True):
        _draw_row(panels, [point for point in points if point.shape == shape])
        panels[1].set_title(f"each rank: {shape_label(shape)} sequences per step")
    if any(point.engine == "fsdp2" for point in points):
        plot_style.footnote(figure, [_OF_PADDING])
    plot_style.legend(figure, rows[:, 0], loc="outside upper center", ncols=4)
    return figure


_PANELS: dict[str, Callable[[Point], float | None]] = {
    "tokens per second and rank": lambda point: point.tokens_per_s_per_rank,
    "share of one unsharded process": lambda point: point.efficiency,
    "MB sent per step and rank": lambda point: plot_style.in_unit(point.sent_bytes, 1e6),
}


def _draw_row(panels: Sequence[Any], points: Sequence[Point]) -> None:
    sharing = [point for point in points if point.engine != "single"]
    for point in points:
        if point.engine == "single" and point.tokens_per_s_per_rank is not None:
            label = "one process, unsharded"
            panels[0].axhline(point.tokens_per_s_per_rank, color="black", lw=0.8, label=label)
    world_sizes = sorted({point.world_size for point in sharing})
    for axes, (title, value) in zip(panels, _PANELS.items(), strict=True):
        for kind in dict.fromkeys(point.kind for point in sharing):
            of = [point for point in sharing if point.kind == kind]
            known = [(p.world_size, y) for p in of if (y := value(p)) is not None]
            failed = [str(point.world_size) for point in of if point.failure is not None]
            label = kind_label(kind) + (f" (failed at {', '.join(failed)})" if failed else "")
            style = {**plot_style.line_style(kind), "label": label}
            axes.plot([x for x, _ in known], [y for _, y in known], **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(world_sizes, [str(n) for n in world_sizes])
        axes.minorticks_off()
        axes.set(xlabel="ranks (simulated)", ylabel=title, ylim=(0, None))
