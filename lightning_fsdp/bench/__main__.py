"""Command line of the benchmarks; see ``--help``, and that of each sub-command."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from lightning_fsdp.bench.arms import Workload
from lightning_fsdp.bench.options import parse
from lightning_fsdp.harness.command_line import exit_with, require_extra

_OF_PICTURES = ("matplotlib", "pydantic", "tensorboard")
_TO_TRAIN = (*_OF_PICTURES, "jsonargparse", "psutil", "tokenizers", "transformers")


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the options ask for.

    Returns:
        Exit code: 0 if all of it ran and holds.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    name, args = parse(given)
    require_extra("bench", *(_OF_PICTURES if name == "plot" else _TO_TRAIN))
    # Pictures, tables and recipes need what --help works without.
    from lightning_fsdp.bench import documents, largest_batch, output, run, scaling
    from lightning_fsdp.harness.environment import environment

    if name == "plot":
        return output.redraw(args.folder)
    command = shlex.join(["python", "-m", "lightning_fsdp.bench", *given])
    document: dict[str, Any] = {"command": command, **environment()}
    workload = _workload(name, args)
    document["workload"] = documents.plain(workload)
    commands = {
        "run": run.compare, "scaling": scaling.simulate, "largest-batch": largest_batch.search,
    }  # fmt: skip
    return commands[name](args, workload, document)


def _workload(name: str, args: Namespace) -> Workload:
    is_run = name == "run"
    return Workload(
        config=args.config, accelerator=args.device, precision=args.precision,
        num_ranks=1 if name == "scaling" else args.ranks, shard_size=args.shard_size,
        warmup_steps=args.warmup, timed_steps=args.steps,
        profiled_steps=2 if is_run else 0, observed_steps=2,
        writes_traces=is_run and args.profile, writes_snapshots=is_run and args.snapshot,
    )  # fmt: skip


if __name__ == "__main__":
    exit_with(main)
