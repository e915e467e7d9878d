"""Hold the simulated network against a real one: predicted and measured step times at two ranks.

    python -m benchmarks.simulation_check --out benchmarks/results/simulation_check.json
    python -m benchmarks.update_tables simulation benchmarks/results/simulation_check.md

A round measures, and then predicts from what it measured:

    two gloo ranks, one core each    seconds of all-gathers, reduce-scatters and all-reduces of
                                     several sizes; seconds per step of every engine
    least squares, per collective    latency, bandwidth, and how long the processor is busy
    two simulations, one core each   seconds per step, each as rank 0 of 2 that talks to nobody

gloo moves data with the processor, so a transfer that overlaps takes time from what it overlaps
with: hence the core of its own for each rank, and for its simulation. Two simulations run at once
because two ranks share caches and memory too. gloo is entered under another name, or else this core
would send pairs instead of the collectives that it uses on any other backend. Two controls that
must be noticed are predicted as well: twice the bytes, and a schedule that waits for every
collective at once. At four ranks only calls and bytes are compared, as cores would be shared.

The step is that of ``core_step.py``. Run it on a machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.command import BenchmarkParser, write_record
from benchmarks.core_step import ARMS, CASES, VOCABULARY, train_one_step
from lightning_fsdp.core.torch_internals import all_gather_single, reduce_scatter_single
from lightning_fsdp.harness.command_line import at_least
from lightning_fsdp.harness.environment import describe
from lightning_fsdp.harness.tables import markdown_table
from lightning_fsdp.simulate.groups import SimulatedGroup, simulated
from lightning_fsdp.simulate.network import Cost, Network
from tests.support.counting import CollectiveCounter
from tests.support.ranks import PLAIN, run_on_ranks

CONTROL_CASES = CASES[:1]  # what goes wrong in communication has to show there
SIZES = tuple(2**n for n in (12, 16, 18, 20, 22, 23, 24, 25))  # bytes of whole tensors
CALLS = 12  # per size
CACHES_BYTES = 2**28  # written to empty them
WORLD_SIZE = 2
TOLERANCE = 0.15
LIMIT_S = 1200.0  # for one start of processes
CONTROLS = ("twice the bytes", "no overlap")


# -- on every rank -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Link:
    """What one kind of collective costs: a step, a byte, and the part that the processor works."""

    latency_us: float
    gb_s: float
    host_share: float


@dataclass(frozen=True, kw_only=True)
class MeasuredNetwork(Network):
    """A network on which kinds of collectives differ, as gloo's algorithms do.

    Attributes:
        links: By kind.
        byte_factor: Of all costs; 1 but in a control.
    """

    links: Mapping[str, Link] = field(default_factory=dict)
    byte_factor: int = 1

    def cost(self, kind: str, nbytes: int, *ranks: int | None) -> Cost:
        nbytes *= self.byte_factor
        link = self.links.get(kind)
        if link is None:
            return super().cost(kind, nbytes, *ranks)
        network = Network(
            world_size=self.world_size,
            bandwidth_gb_s=link.gb_s,
            latency_us=link.latency_us,
            host_share=link.host_share,
        )
        return network.cost(kind, nbytes, *ranks)


def run_on_gloo(rank: int, world_size: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure collectives, steps, and collectives again."""
    os.sched_setaffinity(0, {args.cores[rank]})
    before = time_collectives()
    steps = time_steps(args, CASES)
    return {"collectives": [*before, *time_collectives()], "steps": steps}


def run_simulated(
    rank: int, world_size: int, args: argparse.Namespace, links: dict[str, Link], control: str
) -> dict[str, dict[str, list[float]]]:
    """Time the steps of the first of two ranks; ``rank`` says on which core."""
    os.sched_setaffinity(0, {args.cores[rank]})
    network = MeasuredNetwork(
        world_size=WORLD_SIZE,
        bandwidth_gb_s=links["all_gather"].gb_s,
        latency_us=links["all_gather"].latency_us,
        links=links,
        byte_factor=2 if control == "twice the bytes" else 1,
    )
    waiting = wait_at_once() if control == "no overlap" else nullcontext()
    with waiting, simulated(network):
        return time_steps(args, CONTROL_CASES if control else CASES)


def wait_at_once() -> AbstractContextManager[object]:
    """A schedule in which no collective overlaps with anything."""
    start = SimulatedGroup._start

    def start_and_wait(self: SimulatedGroup, *args: Any, **kwargs: Any) -> dist.Work:
        work = start(self, *args, **kwargs)
        work.wait()
        return work

    return mock.patch.object(SimulatedGroup, "_start", start_and_wait)


def time_collectives() -> list[tuple[str, int, float, float]]:
    """Kind, bytes, seconds and processor seconds of one call after the other.

    Before each one the caches are emptied, as by the computation between collectives of a step.
    """
    calls, in_caches = [], torch.zeros(CACHES_BYTES // 4)
    world_size = dist.get_world_size()
    for nbytes in SIZES:
        whole = torch.ones(nbytes // 4)
        shard = torch.ones(nbytes // 4 // world_size)
        kind_to_call: dict[str, Callable[[], object]] = {
            "all_gather": lambda: all_gather_single(whole, shard),  # noqa: B023 (used here)
            "reduce_scatter": lambda: reduce_scatter_single(shard, whole),  # noqa: B023
            "all_reduce": lambda: dist.all_reduce(whole),  # noqa: B023
        }
        for kind, call in kind_to_call.items():
            call()
            for _ in range(CALLS):
                in_caches.add_(1)
                dist.barrier()
                start_s, start_cpu_s = time.perf_counter(), time.process_time()
                call()
                seconds = time.perf_counter() - start_s
                calls.append((kind, nbytes, seconds, time.process_time() - start_cpu_s))
    return calls


def time_steps(
    args: argparse.Namespace, cases: Sequence[tuple[int, int]]
) -> dict[str, dict[str, list[float]]]:
    """Case -> arm -> seconds per step. All arms live in one process and take turns."""
    models = {name: ARMS[name]() for name in args.arms}
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        for name, model in models.items()
    }
    gc.collect()
    gc.freeze()  # or the collector walks all modules ever imported, in the middle of some arm
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for batch, seq in cases:
        tokens = torch.randint(VOCABULARY, (batch, seq))
        for round_index in range(args.warmup + args.steps):
            for name, model in models.items():
                dist.barrier()
                start = time.perf_counter()
                train_one_step(model, optimizers[name], tokens)
                if round_index >= args.warmup:
                    seconds[f"{batch} x {seq}"][name].append(time.perf_counter() - start)
    return {case: dict(arms) for case, arms in seconds.items()}


def count_on_gloo(rank: int, world_size: int, arm: str) -> dict[str, Any]:
    """Calls and sent bytes of the third step, as torch's dispatcher sees them."""
    step = _stepper(arm)
    with CollectiveCounter() as counter:
        step()
    # A small all-reduce is not of gradients: ranks agree on what was used.
    reduced = [c for c in counter.calls if c.kind == "all_reduce" and c.nbytes > 4096]
    calls = {
        "all_gather": len(counter.of("all_gather")),
        "reduce_scatter": len(counter.of("reduce_scatter")),
        "all_reduce": len(reduced),
    }
    sent = counter.gathered_bytes(world_size) + counter.reduced_bytes(world_size)
    sent += sum(2 * call.nbytes * (world_size - 1) / world_size for call in reduced)
    return {"calls": {kind: n for kind, n in calls.items() if n}, "sent_bytes": sent}


def count_simulated(rank: int, world_size: int, arm: str) -> dict[str, Any]:
    """The same of the first of four ranks."""
    with simulated(Network(world_size=4, bandwidth_gb_s=1e3, latency_us=0.0)) as usage:
        step = _stepper(arm)
        before = usage.copy()
        step()
        used = usage.per_step_since(before, 1)
    return {"calls": used["calls"], "sent_bytes": used["sent_bytes"]}


def _stepper(arm: str) -> Callable[[], object]:
    """What makes a step of an arm, after two that teach it the order of its collectives."""
    model = ARMS[arm]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    for _ in range(2):
        train_one_step(model, optimizer, tokens)
    return lambda: train_one_step(model, optimizer, tokens)


# -- afterwards --------------------------------------------------------------------------------


def fit(calls: Sequence[tuple[str, int, float, float]]) -> dict[str, Link]:
    """Latency and bandwidth by kind: least squares of relative errors, over medians of calls."""
    unit = Network(world_size=WORLD_SIZE, bandwidth_gb_s=1.0, latency_us=1.0)
    links = {}
    for kind in dict.fromkeys(kind for kind, *_ in calls):
        rows, busy = [], []
        for nbytes in SIZES:
            mine = [(s, cpu) for k, n, s, cpu in calls if (k, n) == (kind, nbytes)]
            seconds = statistics.median(s for s, _ in mine)
            cost = unit.cost(kind, nbytes, WORLD_SIZE)
            steps = (cost.duration_s - cost.sent_bytes / 1e9) / 1e-6
            rows.append([steps / seconds, cost.sent_bytes / seconds])
            busy.append(min(1.0, sum(cpu for _, cpu in mine) / sum(s for s, _ in mine)))
        matrix = torch.tensor(rows, dtype=torch.float64)
        ones = torch.ones(len(rows), 1, dtype=torch.float64)
        latency_s, s_per_byte = torch.linalg.lstsq(matrix, ones).solution.flatten().tolist()
        links[kind] = Link(
            latency_us=max(0.0, latency_s * 1e6),
            gb_s=1e-9 / s_per_byte,
            host_share=statistics.median(busy[-3:]),  # of the sizes that take time
        )
    return links


def compare(
    measured: Mapping[str, Mapping[str, list[float]]],
    predicted: Mapping[str, Mapping[str, Mapping[str, list[float]]]],
) -> list[dict[str, Any]]:
    """A row per case and arm: medians and their distance, and that of the controls."""
    rows = []
    for case, arms in measured.items():
        for arm, seconds in arms.items():
            low, median, high = (s * 1e3 for s in statistics.quantiles(seconds, n=4))
            medians = {
                control: statistics.median(cases[case][arm]) * 1e3
                for control, cases in predicted.items()
                if case in cases
            }
            error = medians[""] / median - 1
            rows.append({
                "case": case, "arm": arm, "measured_ms": median, "q1_ms": low, "q3_ms": high,
                "predicted_ms": medians[""], "error": error, "is_within": abs(error) <= TOLERANCE,
                "control_errors": {c: medians[c] / median - 1 for c in CONTROLS if c in medians},
            })  # fmt: skip
    return rows


def report(document: Mapping[str, Any]) -> str:
    """Markdown of what is written as JSON."""
    head = ["batch x tokens", "engine", "measured ms (quartiles)", "predicted ms", "off by"]
    head += [f"off by, {control}" for control in CONTROLS]
    lines = [
        [
            row["case"],
            row["arm"],
            f"{row['measured_ms']:.0f} ({row['q1_ms']:.0f}..{row['q3_ms']:.0f})",
            f"{row['predicted_ms']:.0f}",
            f"{row['error']:+.0%}",
            *(
                f"{row['control_errors'][control]:+.0%}" if row["control_errors"] else ""
                for control in CONTROLS
            ),
        ]
        for row in document["rows"]
    ]
    counts = document["four_ranks"]
    differing = [count["arm"] for count in counts if not count["is_equal"]]
    verdict = f"differ for {', '.join(differing)}" if differing else "are those of gloo"
    return (
        f"{describe(document)}\n\n{markdown_table(head, lines)}\n\n"
        f"At four ranks, simulated calls and bytes {verdict} ({len(counts)} engines).\n"
    )


def main() -> int:
    """Run, print, write JSON.

    Returns:
        Exit code: 0 if every prediction holds, wrong bytes are noticed, calls and bytes are equal.
    """
    parser = make_parser()
    args = parser.parse(None)
    args.cores = sorted(os.sched_getaffinity(0))[:WORLD_SIZE]
    if len(args.cores) < WORLD_SIZE:
        parser.error(f"expected {WORLD_SIZE} cores, got {len(args.cores)}: each rank wants its own")
    measured: Any = defaultdict(lambda: defaultdict(list))
    predicted: Any = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    fits, loads = [], []
    for _ in range(args.rounds):
        loads.append(os.getloadavg()[0])
        ranks = run_on_ranks(run_on_gloo, WORLD_SIZE, args, backend=PLAIN, timeout_s=LIMIT_S)
        links = fit([call for rank in ranks for call in rank["collectives"]])
        fits.append({kind: vars(link) for kind, link in links.items()})
        _collect(measured, [rank["steps"] for rank in ranks])
        for control in ("", *CONTROLS):
            ranks = run_on_ranks(
                run_simulated, WORLD_SIZE, args, links, control, backend=None, timeout_s=LIMIT_S
            )
            _collect(predicted[control], ranks)
    rows = compare(measured, predicted)
    counts = []
    for arm in args.arms:
        real = run_on_ranks(count_on_gloo, 4, arm, backend=PLAIN, timeout_s=LIMIT_S)
        (model,) = run_on_ranks(count_simulated, 1, arm, backend=None, timeout_s=LIMIT_S)
        counts.append({"arm": arm, **model, "is_equal": all(rank == model for rank in real)})
    document = {
        "load_before": loads,  # of one minute: above 0.5 others were at work
        "links": fits,
        "rows": rows,
        "four_ranks": counts,
    }
    written = write_record(args.out, "simulation_check", document)
    print(report(written))
    if args.out:
        args.out.with_suffix(".md").write_text(report(written))
    holds = [row["is_within"] for row in rows] + [count["is_equal"] for count in counts]
    # Not of the other control: where the processor moves the data, overlap may save little.
    wrong_bytes = [row["control_errors"].get(CONTROLS[0]) for row in rows]
    holds += [abs(error) > TOLERANCE for error in wrong_bytes if error is not None]
    return 0 if all(holds) else 1


def make_parser() -> BenchmarkParser:
    """The options."""
    parser = BenchmarkParser(
        "simulation_check",
        __doc__,
        examples=["--rounds 1 --arms scratch_zero3", "--out runs/simulation_check.json"],
    )
    parser.add_arms(ARMS)
    for option, default, least, says in (
        ("--steps", 6, 2, "timed steps of each arm, in each case and round"),  # for quartiles
        ("--warmup", 2, 1, "steps before the timed ones"),
        ("--rounds", 3, 1, "times that all is measured and predicted"),
    ):
        parser.add_argument(option, type=at_least(least), default=default, metavar="N", help=says)
    parser.add_out(says="rows and what was fitted; the table is written beside it")
    return parser


def _collect(into: Any, ranks: Sequence[Mapping[str, Mapping[str, list[float]]]]) -> None:
    for rank in ranks:
        for case, arms in rank.items():
            for arm, seconds in arms.items():
                into[case][arm] += seconds


if __name__ == "__main__":
    sys.exit(main())
