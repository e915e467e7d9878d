"""What `plan --suggest` proposes from 8 to 1024 ranks, beside flat ZeRO-3: speed and memory.

    python -m benchmarks.scaling_suggested
    python -m benchmarks.update_tables scaling-suggested benchmarks/results/scaling_suggested.json

The network is that of docs/scaling.md, and the training that of its picture: GPT-2 nano with 4,096
tokens, 4 x 128 of them per rank and step, in fp32. All of it is computed, so it is the same on any
machine: operations at a stated speed, collectives by the network's model.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.command import BenchmarkParser, write_record
from lightning_fsdp.harness.command_line import positive
from lightning_fsdp.harness.gpt2 import gpt2_config
from lightning_fsdp.harness.tables import markdown_table
from lightning_fsdp.plan.dry_run import Run
from lightning_fsdp.plan.report import format_units
from lightning_fsdp.plan.suggest import Suggestion, suggest, worth_trying
from lightning_fsdp.simulate.network import networks_of

OUT = Path("benchmarks/results/scaling_suggested.json")
WORLD_SIZES = (8, 64, 256, 1024)
NETWORKS = networks_of(
    WORLD_SIZES, num_hosts=128, bandwidth_gb_s=10.0, latency_us=3.0, host_bandwidth_gb_s=1.25
)
TFLOPS = 0.07  # 8,000 tokens/s of one process that trains alone, as in the picture
GOAL = 0.80  # at the most ranks
BYTES_ENOUGH = 10**9
CONFIG = gpt2_config(num_layers=4, width=128, num_heads=4, vocabulary=4096, num_positions=128)


def rows(tflops: float) -> list[dict[str, Any]]:
    """Of each number of ranks: flat ZeRO-3 with the units that are found, and what is proposed."""
    found = []
    for network in NETWORKS:
        run = Run(world_size=network.world_size, precision="32-true", seq_len=128, batch_size=4)
        fitting = suggest(
            CONFIG, run, network=network, flops_per_s=1e12 * tflops, device_bytes=BYTES_ENOUGH
        ).fitting
        flat = next(each for each in fitting if each.plan.run == run)
        proposed = [_numbers(each) for each in worth_trying(fitting)]
        found.append({
            "world_size": network.world_size, "flat": _numbers(flat), "proposed": proposed,
        })  # fmt: skip
    return found


def _numbers(suggestion: Suggestion) -> dict[str, Any]:
    run = suggestion.plan.run
    return {
        "zero_stage": run.zero_stage, "shard_size": run.shard_size or run.world_size,
        "state_over": "all" if run.shard_size is None else run.state_over,
        "units": format_units(run),
        "share": suggestion.share, "peak_bytes": suggestion.plan.peak_bytes,
        "waited_ms": 1e3 * suggestion.timing.waited_s, "sent_bytes": suggestion.timing.sent_bytes,
    }  # fmt: skip


def table(document: dict[str, Any]) -> str:
    """For a person."""
    head = ["ranks", "stage", "shard size", "state over", "units"]
    head += ["of one process", "memory, MB", "its price"]
    body = []
    for row in document["rows"]:
        flat = row["flat"]
        for each in [*row["proposed"], *([] if flat in row["proposed"] else [flat])]:
            price = "flat ZeRO-3"
            if each != flat:
                price = f"{each['peak_bytes'] / flat['peak_bytes'] - 1:+.0%}"
            body.append([
                str(row["world_size"]), str(each["zero_stage"]), str(each["shard_size"]),
                each["state_over"], each["units"], f"{each['share']:.2f}",
                f"{each['peak_bytes'] / 1e6:.1f}", price,
            ])  # fmt: skip
    return markdown_table(head, body)


def main() -> int:
    """Compute, print, write JSON.

    Returns:
        Exit code: 1 where the goal is missed.
    """
    args = make_parser().parse(None)
    document = {"tflops": args.tflops, "rows": rows(args.tflops)}
    print(table(document))
    write_record(args.out, "scaling_suggested", document)
    reached = document["rows"][-1]["proposed"][0]["share"]
    print(f"at {WORLD_SIZES[-1]} ranks {reached:.2f}, wanted {GOAL:.2f}")
    return 0 if reached >= GOAL else 1


def make_parser() -> BenchmarkParser:
    """The options."""
    parser = BenchmarkParser(
        "scaling_suggested", __doc__, examples=["--tflops 0.5", "--out runs/suggested.json"]
    )
    parser.add_argument(
        "--tflops", type=positive, default=TFLOPS, metavar="TFLOPS",
        help="speed that a rank reaches, in 10^12 operations per second",
    )  # fmt: skip
    parser.add_out(OUT, says="rows")
    return parser


if __name__ == "__main__":
    sys.exit(main())
