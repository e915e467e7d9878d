"""How engines scale: each arm in one process, among more and more ranks that are only modelled.

An arm runs as it does otherwise (the recipe's command line, the same callback) as the first of
``N`` hosts with one device each, which is all that Lightning has to be told. Its group is there
before the strategy asks for one, and simulated; see ``simulate/``. It is dealt ``1 / N`` of the
data, and its shards are ``1 / N`` of the model. The reference is one process that trains the whole
model on one rank's batches: what a rank could do if communication and sharding were free.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_fsdp.bench.arms import Arm, Workload
from lightning_fsdp.bench.progress import in_turns
from lightning_fsdp.bench.results import step_rates
from lightning_fsdp.bench.runner import Run, run_arm
from lightning_fsdp.simulate.network import Network
from lightning_fsdp.simulate.scaling import launcher


@dataclass(frozen=True, kw_only=True)
class Point:
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

    arm: str
    engine: str
    zero_stage: int | None
    batch_size: int
    grad_accum: int
    world_size: int
    tokens_per_s_per_rank: float | None = None
    efficiency: float | None = None
    step_ms: float | None = None
    exposed_ms: float | None = None
    busy_ms: float | None = None
    late_ms: float | None = None
    calls: dict[str, float] | None = None
    sent_bytes: float | None = None
    failure: str | None = None


def run_scaling(
    arms: Sequence[Arm],
    workload: Workload,
    networks: Sequence[Network],
    *,
    repeats: int,
    out: Path,
    timeout_s: float,
) -> tuple[list[Point], int]:
    """Run every arm among every number of ranks, and the references alone.

    All of it takes turns, so that a slow hour of the machine is nobody's.

    Returns:
        A point per arm and number of ranks; and how many runs were not made, after Ctrl-C.
    """
    alone = replace(workload, num_ranks=1)
    works = {1: alone} | {network.world_size: _among(alone, network) for network in networks}
    turns = [_Turn(1, arm) for arm in arms if arm.engine == "single"]
    turns += [_Turn(n.world_size, arm) for n in networks for arm in arms if arm.engine != "single"]
    turn_to_runs: dict[_Turn, list[Run]] = {turn: [] for turn in turns}
    num_runs = 0
    try:
        for repeat, turn in in_turns(turns, repeats):
            folder = out / "runs" / f"world{turn.world_size}"
            run = run_arm(
                turn.arm, works[turn.world_size], repeat=repeat, out=folder, timeout_s=timeout_s
            )
            turn_to_runs[turn].append(run)
            num_runs += 1
    except KeyboardInterrupt:
        if not num_runs:
            raise
    shape_to_rate: dict[tuple[int, int], float | None] = {}
    points = []
    for turn, runs in turn_to_runs.items():
        shape = turn.arm.batch_size, turn.arm.grad_accum
        point = _point(turn, runs, shape_to_rate.get(shape))
        shape_to_rate.setdefault(shape, point.tokens_per_s_per_rank)
        points.append(point)
    return points, len(turns) * repeats - num_runs


@dataclass(frozen=True)
class _Turn:
    """An arm among some number of ranks."""

    world_size: int
    arm: Arm

    @property
    def name(self) -> str:
        return f"{self.arm.name} among {self.world_size}"

    @property
    def num_sequences(self) -> int:
        return self.arm.num_sequences


def _among(workload: Workload, network: Network) -> Workload:
    overrides = (
        *workload.overrides,
        *("--trainer.num_nodes", str(network.world_size)),
        *("--data.val_fraction", "0"),  # nothing is validated, and so many ranks want much of it
    )
    ranks = launcher(network, workload.accelerator)
    return replace(workload, overrides=overrides, launcher=ranks)


def _point(turn: _Turn, runs: Sequence[Run], alone: float | None) -> Point:
    arm = turn.arm
    base = Point(
        arm=arm.name,
        engine=arm.engine,
        zero_stage=arm.zero_stage,
        batch_size=arm.batch_size,
        grad_accum=arm.grad_accum,
        world_size=turn.world_size,
    )
    failures = [run.failure for run in runs if run.failure is not None]
    if failures or not runs:
        return replace(base, failure=failures[0] if failures else "not run")
    ranks = [run.ranks[0] for run in runs]
    median_s = statistics.median(s for rank in ranks for s in rank.step_s)
    rate = statistics.median(
        rate for rank in ranks for rate in step_rates([rank.step_tokens], [rank.step_s])
    )
    point = replace(
        base,
        tokens_per_s_per_rank=rate,
        efficiency=1.0 if arm.engine == "single" else None if alone is None else rate / alone,
        step_ms=median_s * 1e3,
    )
    if turn.world_size == 1:
        return replace(point, exposed_ms=0.0, busy_ms=0.0, late_ms=0.0, calls={}, sent_bytes=0.0)
    used = [rank.simulated for rank in ranks if rank.simulated is not None]
    if not used:
        return point
    return replace(
        point,
        exposed_ms=_mean_ms([each["waited_s"] for each in used]),
        busy_ms=_mean_ms([each["busy_s"] for each in used]),
        late_ms=_mean_ms([each["late_s"] for each in used]),
        calls=used[0]["calls"],
        sent_bytes=used[0]["sent_bytes"],
    )


def _mean_ms(seconds: Sequence[float | None]) -> float | None:
    known = [s for s in seconds if s is not None]
    return statistics.fmean(known) * 1e3 if len(known) == len(seconds) else None
