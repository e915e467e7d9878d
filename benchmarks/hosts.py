"""Time one training step over a real, slow network between hosts: flat, and with replicas.

    python -m benchmarks.hosts                                  # the table; as root, on Linux
    python -m benchmarks.hosts --mbit 200 --rounds 4 --arms flat_core hsdp_core --out FILE.json

Hosts are network namespaces of this machine, joined by lines of limited bandwidth
(``tests/support/hosts.py``), with a torchrun on each; they share processors and memory, which real
hosts do not. All arms (``hosts_ranks.py``) live in the same processes and take turns. Reported per
arm and bandwidth: seconds of a step (the slowest rank's), and the bytes that a host sends in it,
three times:

    kernel     /sys/class/net/*/statistics: with headers, acknowledgements, and agreements of ranks
    counted    what ranks handed over for other hosts, by the core's counters or torch's dispatcher
    theory     from the model's units
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import BenchmarkParser, write_record
from benchmarks.hosts_ranks import ARMS, Shape, theory
from lightning_fsdp.harness.command_line import exit_with, positive
from lightning_fsdp.harness.tables import markdown_table
from tests.support.hosts import Hosts, NoHosts

OUT = Path("benchmarks/results/hosts.json")
LIMIT_S = 900.0  # for the steps at one bandwidth
RATIOS = {  # arm -> what it is compared with, round by round
    "flat_core": ("flat_fsdp2",),
    "hsdp_core": ("hsdp_fsdp2", "flat_core"),
    "hsdp_fsdp2": ("flat_fsdp2",),
    "flat_core_x4s": ("flat_core_x4",),
    "hsdp_core_x4": ("flat_core_x4", "flat_core_x4s", "hsdp_fsdp2_x4"),
    "hsdp_core_x4l": ("flat_core_x4", "hsdp_core_x4"),
    "hfsdp_core": ("hsdp_core", "flat_core"),
    "hfsdp_core_x4": ("hsdp_core_x4", "flat_core_x4"),
}
GOALS = (  # of four micro-batches, each beside the flat step that accumulates likewise
    ("hsdp_core", "hsdp_fsdp2", 0.95),
    ("hsdp_core_x4", "flat_core_x4s", 0.40),
    ("hsdp_core_x4l", "flat_core_x4", 0.40),
)


def run(mbit_s: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All arms at one bandwidth; what each rank measured."""
    with (
        tempfile.TemporaryDirectory(prefix="hosts-") as name,
        Hosts(args.hosts, mbit_s=mbit_s) as h,
    ):
        folder = Path(name)
        settings, logs = folder / "settings.json", []
        keys = ("hosts", "ranks", "arms", "warmup", "rounds")
        settings.write_text(json.dumps({key: getattr(args, key) for key in keys}))
        jobs = []
        for host in range(args.hosts):
            logs.append(folder / f"host{host}.log")
            command = ["-m", "benchmarks.hosts_ranks", str(settings)]
            jobs.append(h.torchrun(host, command, nproc=args.ranks, log=logs[-1]))
        if not _all_end(jobs):
            tails = "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)
            raise RuntimeError(
                f"hosts: expected all ranks to end within {LIMIT_S:.0f} s, got exit codes "
                f"{[job.poll() for job in jobs]}. What they printed:\n{tails}"
            )
        num_ranks = args.hosts * args.ranks
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def _all_end(jobs: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Whether all end well, in time; at the first that does not, the others are not waited for."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        codes = [job.poll() for job in jobs]
        if any(codes):
            return False
        if None not in codes:
            return True
        time.sleep(0.1)
    return False


def summarize(ranks: Sequence[dict[str, Any]], mbit_s: float, shape: Shape) -> list[dict[str, Any]]:
    """A row for each arm."""
    seconds = {
        name: [max(step) for step in zip(*(rank[name]["seconds"] for rank in ranks), strict=True)]
        for name in ranks[0]
    }
    rows = []
    for name, steps in seconds.items():
        low, median, high = statistics.quantiles(steps, n=4)
        by_host = [rank[name]["kernel_bytes"] for rank in ranks[:: shape.ranks]]
        sent = [statistics.mean(s for s, _ in step) for step in zip(*by_host, strict=True)]
        on_host_0 = [rank[name]["counted_bytes"] for rank in ranks[: shape.ranks]]
        rows.append({
            "mbit_s": mbit_s, "arm": name, "median_s": median, "q1_s": low, "q3_s": high,
            "kernel_bytes": statistics.median(sent),
            "counted_bytes": sum(on_host_0),
            "theory_bytes": theory(ARMS[name], shape),
            "way": ranks[0][name]["way"], "loss": ranks[0][name]["loss"],
            "ratios": {
                other: statistics.median(a / b for a, b in zip(steps, seconds[other], strict=True))
                for other in RATIOS.get(name, ())
                if other in seconds
            },
        })  # fmt: skip
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For a person."""
    head = ["Mbit/s", "arm", "step, s (quartiles)", "of", "kernel MB", "counted MB", "theory MB"]
    head += ["kernel over counted"]
    body = []
    for row in rows:
        counted = row["counted_bytes"]
        body.append([
            f"{row['mbit_s']:.0f}", row["arm"],
            f"{row['median_s']:.2f} ({row['q1_s']:.2f}..{row['q3_s']:.2f})",
            ", ".join(f"{other} {ratio:.2f}" for other, ratio in row["ratios"].items()),
            *(f"{row[key] / 1e6:.2f}" for key in ("kernel_bytes", "counted_bytes", "theory_bytes")),
            f"{row['kernel_bytes'] / counted - 1:+.2%}",
        ])  # fmt: skip
    return markdown_table(head, body)


def goals(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each that is wanted, and what was found."""
    lines = []
    for row in rows:
        for arm, other, wanted in GOALS:
            if row["arm"] == arm and other in row["ratios"]:
                ratio = row["ratios"][other]
                word = "reached" if ratio <= wanted else "missed"
                where = f"{arm} of {other} at {row['mbit_s']:.0f} Mbit/s"
                lines.append(f"{where}: {ratio:.2f}, wanted {wanted:.2f}: {word}")
    return lines


def main() -> int:
    """Parse the command line, run, print, write JSON.

    Returns:
        Exit code: 2 where there are no namespaces.
    """
    args = make_parser().parse(None)
    shape = Shape(args.hosts, args.ranks)
    rows: list[dict[str, Any]] = []
    launches = []
    for mbit_s in args.mbit:
        try:
            ranks = run(mbit_s, args)
        except NoHosts as error:
            print(f"hosts: {error}", file=sys.stderr)
            return 2
        new = summarize(ranks, mbit_s, shape)
        print(table(new), flush=True)
        rows += new
        launches.append({"mbit_s": mbit_s, "ranks": ranks})
    document = {
        "hosts": args.hosts, "ranks": args.ranks,
        "rows": rows,
        "goals": goals(rows),
        "launches": launches,
    }  # fmt: skip
    print("\n".join(document["goals"]))
    write_record(args.out, "hosts", document)
    return 0


def make_parser() -> BenchmarkParser:
    """The options."""
    parser = BenchmarkParser(
        "hosts",
        __doc__,
        examples=["--mbit 200 --rounds 4", "--hosts 4 --ranks 1 --arms flat_core hsdp_core"],
    )
    parser.add_argument(
        "--mbit", type=positive, nargs="+", default=[1000.0, 200.0], metavar="MBIT_S",
        help="megabits per second of each host's line; each is measured",
    )  # fmt: skip
    parser.add_arms(ARMS)
    parser.add_argument(
        "--hosts", type=int, choices=(2, 3, 4), default=2, metavar="N", help="number of hosts"
    )
    parser.add_ranks(2, help="processes on each host")
    parser.add_rounds(8, 3)
    parser.add_out(OUT)
    return parser


if __name__ == "__main__":
    exit_with(main)
