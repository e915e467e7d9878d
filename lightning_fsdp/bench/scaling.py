"""How engines scale: each arm in one process, among more and more ranks that are only modelled.

An arm runs as it does otherwise (the recipe's command line, the same callback) as the first of
``N`` hosts with one device each, which is all that Lightning has to be told. Its group is there
before the strategy asks for one, and simulated; see ``simulate/``. It is dealt ``1 / N`` of the
data, and its shards are ``1 / N`` of the model. The reference is one process that trains the whole
model on one rank's batches: what a rank could do if communication and sharding were free.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from lightning_fsdp.bench.arms import Arm, Workload
from lightning_fsdp.bench.documents import PerStep
from lightning_fsdp.bench.records import OfArm, Run, Shape, of_all
from lightning_fsdp.bench.runner import in_turns
from lightning_fsdp.simulate.among import launcher
from lightning_fsdp.simulate.network import Network


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


def run_scaling(
    arms: Sequence[Arm],
    workload: Workload,
    networks: Sequence[Network],
    run: Callable[[Arm, Workload, int, str], Run],
    *,
    repeats: int,
) -> tuple[list[Point], int]:
    """Run every arm among every number of ranks, and the references alone.

    All of it takes turns, so that a slow hour of the machine is nobody's.

    Args:
        arms: What is run.
        workload: What each does.
        networks: That they run over.
        run: Runs an arm once; given its workload, the round, and the name of a folder.
        repeats: Rounds over all.

    Returns:
        A point per arm and number of ranks; and how many runs were not made, after Ctrl-C.
    """
    alone = replace(workload, num_ranks=1)
    works = {1: alone} | {network.world_size: _among(alone, network) for network in networks}
    turns = [(1, arm) for arm in arms if arm.engine == "single"]
    turns += [(n.world_size, arm) for n in networks for arm in arms if arm.engine != "single"]

    def run_turn(turn: tuple[int, Arm], repeat: int) -> Run:
        world_size, arm = turn
        return run(arm, works[world_size], repeat, f"world{world_size}")

    named = {f"{arm.name} among {n}": (n, arm) for n, arm in turns}
    made, num_missing = in_turns(named, repeats, run_turn)
    points: list[Point] = []
    alone_rate: dict[Shape, float | None] = {}  # what one process reaches, by its batch
    for world_size, arm in turns:
        point = Point(arm=arm.name, **asdict(arm), world_size=world_size)
        runs = [done for turn, done in made if turn == (world_size, arm)]
        _fill_in(point, runs, alone_rate.get(point.shape))
        alone_rate.setdefault(point.shape, point.tokens_per_s_per_rank)
        points.append(point)
    return points, num_missing


def _among(workload: Workload, network: Network) -> Workload:
    overrides = (
        *workload.overrides,
        *("--trainer.num_nodes", str(network.world_size)),
        *("--data.val_fraction", "0"),  # nothing is validated, and so many ranks want much of it
    )
    ranks = launcher(network, workload.accelerator)
    return replace(workload, overrides=overrides, launcher=ranks)


def _fill_in(point: Point, runs: Sequence[Run], alone: float | None) -> None:
    """What the runs have shown; ``alone`` is the rate of the reference."""
    failures = [run.failure for run in runs if run.failure is not None]
    if failures or not runs:
        point.failure = failures[0] if failures else "not run"
        return
    rate = statistics.median(rate for run in runs for rate in run.rates)
    point.tokens_per_s_per_rank = rate
    point.step_ms = 1e3 * statistics.median(step for run in runs for step in run.slowest_s)
    if point.world_size == 1:
        point.exposed_ms = point.busy_ms = point.late_ms = point.sent_bytes = 0.0
        point.calls = {}
    if point.engine == "single":
        point.efficiency = 1.0
    elif alone is not None:
        point.efficiency = rate / alone
    used = [usage for run in runs if (usage := run.ranks[0].simulated) is not None]
    if used:
        point.exposed_ms = _mean_ms(each["waited_s"] for each in used)
        point.busy_ms = _mean_ms(each["busy_s"] for each in used)
        point.late_ms = _mean_ms(each["late_s"] for each in used)
        point.calls, point.sent_bytes = used[0]["calls"], used[0]["sent_bytes"]


def _mean_ms(seconds: Iterable[float | None]) -> float | None:
    return of_all(lambda known: 1e3 * statistics.fmean(known), seconds)
