"""The command ``run``: trains all arms in turns, prints the table, writes the report."""

from __future__ import annotations

import argparse
from typing import Any

from lightning_fsdp.bench import output
from lightning_fsdp.bench.arms import Arm, Workload, choose_arms
from lightning_fsdp.bench.limits import measure_limits
from lightning_fsdp.bench.records import Run
from lightning_fsdp.bench.report import summarize
from lightning_fsdp.bench.report_page import format_table
from lightning_fsdp.bench.results import Results
from lightning_fsdp.bench.runner import in_turns, run_arm
from lightning_fsdp.harness.command_line import end
from lightning_fsdp.harness.environment import describe


def compare(args: argparse.Namespace, workload: Workload, document: dict[str, Any]) -> int:
    """Returns the exit code: 0 if every arm ran and holds."""
    arms = choose_arms(args.engines, args.stages, args.batch_sizes, args.grad_accum)
    folder = args.out / "runs"

    def run(arm: Arm, repeat: int) -> Run:
        return run_arm(arm, workload, repeat=repeat, out=folder, timeout_s=args.timeout)

    made, not_made = in_turns({arm.name: arm for arm in arms}, args.repeats, run)
    ran, runs = list(dict.fromkeys(arm for arm, _ in made)), [done for _, done in made]
    try:
        limits = None if not_made else measure_limits(workload, runs, args.out / "limits")
    except KeyboardInterrupt:  # what was trained is written without them
        limits, not_made = None, "the limits were not measured"
    peak_flops = args.peak_flops or (None if limits is None else limits.flops_per_s)
    rows = summarize(ran, runs, workload, limits=limits, peak_flops=peak_flops)
    results = Results(
        **document, interrupted=not_made, rows=rows, runs=runs, limits=limits,
        config=next((run.config for run in runs if run.config is not None), None),
        peak_flops_from="given" if args.peak_flops else "measured products" if limits else None,
    )  # fmt: skip
    output.write(args.out, results)
    table = format_table(rows)
    print(f"\n{describe(vars(results))}\n\n{table}\n\nWritten to {args.out}/: {output.WRITTEN}")
    if limits is None and not_made is None:
        print(f"The limits were not measured; see {args.out / 'limits' / 'log.txt'}")
    # Of an arm's first run, or rather of its first that failed.
    logs = {r.arm: r.log for r in sorted(runs, key=lambda r: (r.failure is not None, -r.repeat))}
    wrong = [row for row in rows if row.failure]
    return end(not_made, [f"{row.arm}: {row.failure}; see {logs.get(row.arm)}" for row in wrong])
