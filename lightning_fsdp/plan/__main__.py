"""Command line of the plan; see ``--help``."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from lightning_fsdp.harness.amounts import bytes_argument
from lightning_fsdp.harness.command_line import exit_with, require_extra
from lightning_fsdp.plan.dry_run import Run, dry_run, largest_batch
from lightning_fsdp.plan.models import MODELS, config_of
from lightning_fsdp.plan.process import bytes_at_start
from lightning_fsdp.plan.report import as_json, format_plan, format_rest, format_search
from lightning_fsdp.strategies.precision import POLICIES

_MAX_BATCH_SIZE = 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan, write the file.

    Returns:
        Exit code: 1 if not even the smallest batch fits.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.max_batch_size is not None and args.device_memory is None:
        parser.error("--max-batch-size: expected --device-memory with it, as it ends a search")
    if args.json is not None and (why := _why_not_a_file(args.json)) is not None:
        parser.error(_no_file(args.json, why))
    require_extra("recipes", "transformers")
    cap = _MAX_BATCH_SIZE if args.max_batch_size is None else args.max_batch_size
    search = plan = None
    try:
        config = config_of(args.model)
        run = Run(
            world_size=args.world,
            zero_stage=args.stage,
            precision=args.precision,
            batch_size=args.batch_size,
            seq_len=args.seq_len,
            grad_accum=args.grad_accum,
            activation_checkpointing=args.activation_checkpointing,
            backend=args.backend,
        )
        if args.device_memory is None:
            plan = dry_run(config, run)
        else:
            search, plan = largest_batch(config, run, device_bytes=args.device_memory, cap=cap)
    except ValueError as error:
        parser.error(str(error))
    at_start = bytes_at_start() if args.backend == "gloo" else None
    if plan is not None:
        print(format_plan(args.model, plan))
    if search is not None:
        print(f"\n{format_search(search, args.device_memory)}")
    print(f"\n{format_rest(plan, args.backend, at_start)}")
    if args.json is not None:
        content = json.dumps(as_json(args.model, plan, search, at_start), indent=1) + "\n"
        try:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(content)
        except OSError as error:
            parser.error(_no_file(args.json, str(error.strerror)))
    return 1 if plan is None else 0


def _why_not_a_file(path: Path) -> str | None:
    """What keeps a path from being written; creates nothing. Missing folders are no hindrance."""
    try:
        if path.is_dir():
            return "a folder"
        nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
        if nearest != path and not nearest.is_dir():
            return f"{str(nearest)!r} is no folder"
    except OSError as error:  # a folder that may not be looked into, a name that is too long
        return error.strerror
    return None if os.access(nearest, os.W_OK) else f"no leave to write {str(nearest)!r}"


def _no_file(path: Path, why: str) -> str:
    return f"--json: expected a file to write, got {str(path)!r} ({why}). Name another."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_fsdp.plan",
        description="What a rank holds in a training step, by owner and phase; nothing is "
        "allocated and no other rank is needed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--model",
        required=True,
        help=f"{', '.join(MODELS)}; or a folder with a config.json of transformers",
    )
    parser.add_argument("--world", type=int, required=True, help="ranks")
    parser.add_argument("--stage", type=int, default=3, help="of ZeRO: 2 or 3")
    parser.add_argument(
        "--precision", default=Run.precision, help=f"of the Trainer: {', '.join(POLICIES)}"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--batch-size", type=int, default=1, help="sequences per micro-batch")
    size.add_argument(
        "--device-memory",
        type=bytes_argument,
        metavar="AMOUNT",
        help="such as 80GB: look for the largest batch that fits, in place of --batch-size",
    )
    parser.add_argument(
        "--max-batch-size",
        type=int,
        metavar="CAP",
        help=f"with --device-memory: where to stop looking; without it {_MAX_BATCH_SIZE}",
    )
    parser.add_argument("--seq-len", type=int, default=Run.seq_len, help="tokens per sequence")
    parser.add_argument("--grad-accum", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--activation-checkpointing", action="store_true", help="of the blocks")
    parser.add_argument(
        "--backend", default=Run.backend, choices=["nccl", "gloo"], help="of the process group"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    return parser


if __name__ == "__main__":
    exit_with(main)
