"""Command line of the benchmarks; see ``--help``, ``optimizer --help`` and ``plot --help``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from lightning_fsdp.bench.arms import Workload
from lightning_fsdp.bench.options import parse
from lightning_fsdp.harness.command_line import exit_with, require_extra
from lightning_fsdp.harness.environment import environment

_OF_PICTURES = ("matplotlib", "pydantic", "tensorboard")


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the options ask for.

    Returns:
        Exit code: 0 if all of it ran and holds.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["optimizer"]:
        from lightning_fsdp.bench import optimizer

        return optimizer.main(given[1:])
    if given[:1] == ["plot"]:
        require_extra("bench", *_OF_PICTURES)
        from lightning_fsdp.bench import output

        return output.main(given[1:])
    parser, args = parse(given)
    require_extra("bench", *_OF_PICTURES, "jsonargparse", "psutil", "tokenizers", "transformers")
    from lightning_fsdp.bench import modes

    workload = Workload(
        config=args.config,
        num_ranks=args.nproc,
        accelerator=args.accelerator,
        precision=args.precision,
        warmup_steps=args.warmup,
        timed_steps=args.steps,
        profiled_steps=2,
        observed_steps=2,
        writes_traces=args.profile,
        writes_snapshots=args.snapshot,
    )
    command = shlex.join(["python", "-m", "lightning_fsdp.bench", *given])
    configuration = {key: _plain(value) for key, value in asdict(workload).items()}
    document = {"command": command, "workload": configuration, **environment()}
    unprofiled = replace(workload, profiled_steps=0)
    if args.simulate_world is not None:
        return modes.simulate(parser, args, unprofiled, document)
    if args.largest_batch is not None:
        return modes.search(args, unprofiled, document)
    return modes.compare(args, workload, document)


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    exit_with(main)
