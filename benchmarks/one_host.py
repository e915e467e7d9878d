"""Time one training step where ranks of one host read each other's memory, and where they send.

    python -m benchmarks.one_host                                   # all of it, for a quiet machine
    python -m benchmarks.one_host --ranks 2 --threads 1 --cases 1x32 --huge-pages no  # a part

Every number of ranks runs with each number of threads, with and without huge pages for the C
library's heap (``GLIBC_TUNABLES=glibc.malloc.hugetlb=1``), in processes of its own. There all arms
train the same GPT-2 on the same random tokens and take turns, as in ``core_step.py``, so that a
slow moment of the machine falls on all of them:

============== =================================================================
arm            is
============== =================================================================
direct_zero3   the core, ``comm="direct"``; ``direct_zero2`` likewise
pairs_zero3    the core, ``comm="pairs"``; ``pairs_zero2`` likewise
fsdp2_zero3    torch's; ``fsdp2_zero2`` likewise
ddp            torch's
alone          no communication, the optimizer on one rank's share: the floor
============== =================================================================

Reported per arm: median and quartiles of the step, median of the processor's time of rank 0, and
the medians of the ratios to other arms of the same round.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.command import BenchmarkParser, write_record
from benchmarks.core_step import CASES, SHARD, VOCABULARY, build_model, train_one_step
from benchmarks.turns import take_turns
from lightning_fsdp import shard_model
from lightning_fsdp.config import plan_of_stage
from lightning_fsdp.harness.command_line import at_least
from lightning_fsdp.harness.tables import markdown_table

OUT = Path("benchmarks/results/one_host.json")
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
COMPARED_WITH = ("fsdp2", "ddp", "pairs", "alone")

Trained = tuple[nn.Module, torch.optim.Optimizer]


def _core(comm: str, stage: int) -> Trained:
    return _with_adamw(shard_model(build_model(), plan_of_stage(stage), comm=comm))


def _torch(arm: str) -> Trained:
    return _with_adamw(SHARD[arm](build_model()))


def _with_adamw(model: nn.Module) -> Trained:
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _alone() -> Trained:
    """Plain torch; as many elements of each parameter as a rank would own are stepped."""
    model = build_model()
    whole = list(model.parameters())
    share = [nn.Parameter(p.data.view(-1)[: -(-p.numel() // dist.get_world_size())]) for p in whole]
    optimizer = torch.optim.AdamW(share, lr=1e-4, fused=True)

    def take_gradients(*_: Any) -> None:
        for parameter, part in zip(whole, share, strict=True):
            assert parameter.grad is not None
            part.grad = parameter.grad.view(-1)[: part.numel()]

    optimizer.register_step_pre_hook(take_gradients)
    optimizer.register_step_post_hook(lambda *_: model.zero_grad())
    return model, optimizer


ARMS: dict[str, Callable[[], Trained]] = {
    **{
        f"{comm}_zero{stage}": functools.partial(_core, comm, stage)
        for comm in ("direct", "pairs")
        for stage in (3, 2)
    },
    **{arm: functools.partial(_torch, arm) for arm in ("fsdp2_zero3", "fsdp2_zero2", "ddp")},
    "alone": _alone,
}


def prepare(arm: str, rank: int) -> Callable[[tuple[int, int]], dict[str, float]]:
    """One arm on one rank: what it does at a turn, given sequences and tokens of each."""
    model, optimizer = ARMS[arm]()
    generator = torch.Generator().manual_seed(rank)  # the same tokens in every arm

    def take_turn(shape: tuple[int, int]) -> dict[str, float]:
        tokens = torch.randint(VOCABULARY, shape, generator=generator)
        start = time.perf_counter(), time.process_time()
        loss = train_one_step(model, optimizer, tokens)
        wall_s, processor_s = time.perf_counter() - start[0], time.process_time() - start[1]
        return {"wall_s": wall_s, "processor_s": processor_s, "loss": loss}

    return take_turn


def measure(
    num_ranks: int, threads: int, variables: Mapping[str, str], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """All arms in all cases; of rank 0 what each step took, and the last losses."""
    shapes = [tuple(map(int, case.split("x"))) for case in args.cases]
    turns = [shape for shape in shapes for _ in range(args.warmup + args.rounds)]
    with tempfile.TemporaryDirectory() as folder:
        found = take_turns(
            prepare, args.arms, num_ranks, turns, folder, threads=threads, variables=variables
        )
    results = []
    for number, (batch, seq) in enumerate(shapes):
        stop = (number + 1) * (args.warmup + args.rounds)
        timed = {arm: steps[stop - args.rounds : stop] for arm, steps in found.items()}
        taken = {
            what: {arm: [step[what] for step in steps] for arm, steps in timed.items()}
            for what in ("wall_s", "processor_s")
        }
        losses = {arm: steps[-1]["loss"] for arm, steps in timed.items()}
        results.append({"batch": batch, "seq": seq, **taken, "losses": losses})
    return results


def summarize(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per case and arm: medians, quartiles, and ratios round by round."""
    rows = []
    for case in cases:
        for name, wall in case["wall_s"].items():
            low, median, high = (1e3 * s for s in statistics.quantiles(wall, n=4))
            row = {
                "batch": case["batch"], "seq": case["seq"], "arm": name,
                "median_ms": median, "q1_ms": low, "q3_ms": high,
                "processor_ms": 1e3 * statistics.median(case["processor_s"][name]),
                "last_loss": case["losses"][name],
            }  # fmt: skip
            stage = name.partition("_")[2] or "zero3"
            for other in COMPARED_WITH:
                reference = case["wall_s"].get(other) or case["wall_s"].get(f"{other}_{stage}")
                row[f"of_{other}"] = reference and statistics.median(
                    a / b for a, b in zip(wall, reference, strict=True)
                )
            rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For a person."""
    head = ("ranks", "threads", "huge pages", "batch x tokens", "arm", "ms (quartiles)", "CPU ms")
    body = []
    for row in rows:
        ratios = [row[f"of_{other}"] for other in COMPARED_WITH]
        body.append([
            str(row["ranks"]), str(row["threads"]), "yes" if row["huge_pages"] else "no",
            f"{row['batch']} x {row['seq']}", row["arm"],
            f"{row['median_ms']:.0f} ({row['q1_ms']:.0f}..{row['q3_ms']:.0f})",
            f"{row['processor_ms']:.0f}",
            *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        ])  # fmt: skip
    return markdown_table([*head, *(f"of {other}" for other in COMPARED_WITH)], body)


def main() -> None:
    """Parse the command line, run, print, write JSON."""
    args = make_parser().parse(None)
    rows: list[dict[str, Any]] = []
    launches = []
    for ranks, threads, huge in itertools.product(args.ranks, args.threads, args.huge_pages):
        setting = {"ranks": ranks, "threads": threads, "huge_pages": huge == "yes"}
        cases = measure(ranks, threads, HUGE_PAGES if huge == "yes" else {}, args)
        new = [{**setting, **row} for row in summarize(cases)]
        print(table(new), flush=True)
        rows += new
        launches.append({**setting, "cases": cases})
    write_record(args.out, "one_host", {"rows": rows, "launches": launches})


def make_parser() -> BenchmarkParser:
    """The options."""
    parser = BenchmarkParser(
        "one_host",
        __doc__,
        examples=["--ranks 2 --threads 1 --huge-pages no", "--cases 1x32 --arms direct_zero3 ddp"],
    )
    parser.add_arms(ARMS)
    parser.add_argument(
        "--cases", nargs="+", default=[f"{batch}x{seq}" for batch, seq in CASES], metavar="BxT",
        help="sequences per rank and step x tokens per sequence; each is measured",
    )  # fmt: skip
    parser.add_ranks(2, 4, help="numbers of processes; each is measured")
    parser.add_argument(
        "--threads", type=at_least(1), nargs="+", default=[1, 2], metavar="N",
        help="threads of each process; each number is measured",
    )  # fmt: skip
    parser.add_argument(
        "--huge-pages", nargs="+", choices=["no", "yes"], default=["no", "yes"],
        help="whether the C library's heap has huge pages; each is measured",
    )  # fmt: skip
    parser.add_rounds(20, 3)
    parser.add_out(OUT)
    return parser


if __name__ == "__main__":
    main()
