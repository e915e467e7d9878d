"""What the loss of a language model's head takes, with and without whole logits.

    python -m benchmarks.head_loss --out benchmarks/results/head_loss.json

Forward and backward over a head of the shape of Qwen2.5-0.5B's, in fp32 and in bf16. The peak of
tensors beside the head's inputs is counted on tensors without values; the weight's gradient is a
part of it that every way needs. For seconds every run is a process of its own, and ways take turns.
The first step of a process tells by how much it grows over what it held before; the second and
third, which find memory where training finds it, tell the seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from benchmarks.command import BenchmarkParser, write_record
from lightning_fsdp import linear_cross_entropy
from lightning_fsdp.harness.command_line import at_least, exit_with
from lightning_fsdp.harness.tables import markdown_table
from lightning_fsdp.plan.ledger import FakeLedger
from lightning_fsdp.plan.torch_internals import fake_tensors

WIDTH, VOCABULARY, POSITIONS = 896, 151_936, 1024
CHUNK = 128


def _plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def _recomputed(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    def of_chunk(h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, weight).float(), y, reduction="sum")

    pairs = zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True)
    losses = [checkpoint(of_chunk, h, y, use_reentrant=False) for h, y in pairs]
    return torch.stack(losses).sum() / len(labels)


def _torchs(batch_chunk_size: int | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        # Since torch 2.13.
        own = torch.nn.LinearCrossEntropyOptions()
        given = torch.nn.LinearCrossEntropyOptions(
            batch_chunk_size=batch_chunk_size, chunking_method=None
        )
        options = own if batch_chunk_size is None else given
        result: Tensor = F.linear_cross_entropy(hidden, weight, labels, options=options)
        return result

    return loss


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plain logits": _plain,
    f"chunks of {CHUNK} under checkpoint": _recomputed,
    "torch's linear_cross_entropy, batch_chunk_size=256": _torchs(256),
    "lightning_fsdp.linear_cross_entropy": linear_cross_entropy,
}
SLOW = {"torch's linear_cross_entropy, its own chunks": _torchs(None)}
DTYPES = ("float32", "bfloat16")


def run(way: str, dtype: str) -> dict[str, Any]:
    """Three steps in this process: the loss, bytes that it grew by, seconds of the later two."""
    torch.manual_seed(0)
    hidden = torch.randn(POSITIONS, WIDTH).to(getattr(torch, dtype)).requires_grad_()
    weight = torch.nn.Parameter((torch.randn(VOCABULARY, WIDTH) * 0.02).to(hidden.dtype))
    labels = torch.randint(VOCABULARY, (POSITIONS,))

    def step() -> float:
        hidden.grad = weight.grad = None
        loss = (WAYS | SLOW)[way](hidden, weight, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, loss = _status("VmRSS"), step()
    return {
        "loss": loss,
        "grown_bytes": _status("VmHWM") - before,
        "s": [timeit.timeit(step, number=1) for _ in range(2)],
    }


def _status(key: str) -> int:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def peak_bytes(way: str, dtype: str) -> int:
    """Of tensors in a step, beside those that it is given."""
    with fake_tensors():
        hidden, weight = (
            torch.empty(num, WIDTH, dtype=getattr(torch, dtype), requires_grad=True)
            for num in (POSITIONS, VOCABULARY)
        )
        labels = torch.zeros(POSITIONS, dtype=torch.int64)
        ledger = FakeLedger()
        ledger.tell("given", [hidden, weight, labels])
        before = ledger.live_bytes
        ledger.start()
        (WAYS | SLOW)[way](hidden, weight, labels).backward()  # type: ignore[no-untyped-call]
        return ledger.stop().peak_bytes - before


def measure(ways: list[str], dtypes: list[str], repeats: int) -> list[dict[str, Any]]:
    """A row per dtype and way; those of other dtypes have no seconds."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {
        (dtype, way): [] for dtype in dtypes for way in ways
    }
    for _ in tqdm(range(repeats), unit="round"):
        for (dtype, way), found in runs.items():
            command = [sys.executable, "-m", "benchmarks.head_loss", "--one", way, dtype]
            found.append(json.loads(subprocess.check_output(command)))
    rows = []
    for dtype in DTYPES:
        for way in ways:
            row = {"dtype": dtype, "way": way, "peak_bytes": peak_bytes(way, dtype)}
            if found := runs.get((dtype, way)):
                row["s"] = [s for each in found for s in each["s"]]
                row["grown_bytes"] = max(each["grown_bytes"] for each in found)
                row["loss"] = found[0]["loss"]
            rows.append(row)
    return rows


def table_of(rows: list[dict[str, Any]]) -> str:
    """Rows as on the page."""
    plain = {row["dtype"]: row for row in reversed(rows)}  # the first way
    body = []
    for row in rows:
        first = plain[row["dtype"]]
        gradient = getattr(torch, row["dtype"]).itemsize * WIDTH * VOCABULARY
        share = (row["peak_bytes"] - gradient) / (first["peak_bytes"] - gradient)
        cells = [
            row["dtype"],
            row["way"],
            f"{row['peak_bytes'] / 1e6:,.0f}",
            f"{gradient / 1e6:,.0f}",
            f"{share:.2f}",
        ]
        if "s" in row:
            median = statistics.median(row["s"])
            cells += [
                f"{row['grown_bytes'] / 1e6:,.0f}",
                f"{median:.1f} ({min(row['s']):.1f}..{max(row['s']):.1f})",
                f"{median / statistics.median(first['s']):.2f}",
            ]
        body.append(cells + [""] * (8 - len(cells)))
    head = (
        "dtype", "way", "peak, MB", "of it the weight's gradient, MB", "the rest, of plain's",
        "process grows by, MB", "s, median (least..most)", "of plain's",
    )  # fmt: skip
    return markdown_table(head, body)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table and write the JSON."""
    args = make_parser().parse(arguments)
    if args.one is not None:
        print(json.dumps(run(*args.one)))
        return 0
    rows = measure([*WAYS, *(SLOW if args.slow else ())], args.timed, args.repeats)
    print(table_of(rows))
    write_record(args.out, "head_loss", {"rows": rows}, arguments)
    return 0


def make_parser() -> BenchmarkParser:
    """The options."""
    parser = BenchmarkParser(
        "head_loss",
        __doc__,
        examples=["--out benchmarks/results/head_loss.json", "--repeats 1 --slow"],
    )
    parser.add_argument(
        "--repeats", type=at_least(1), default=3, metavar="N", help="runs of each way"
    )
    parser.add_argument(
        "--timed", nargs="+", choices=DTYPES, default=list(DTYPES), metavar="DTYPE",
        help="dtypes whose seconds are measured; bfloat16 takes a quarter of an hour a step where "
        "the processor has no products of it",
    )  # fmt: skip
    parser.add_argument(
        "--slow", action="store_true", help="measure also torch's own loss that works in chunks"
    )
    parser.add_out(says="rows")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    exit_with(main)
