"""Command line of the plan; see ``--help``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from lightning_fsdp.harness.amounts import bytes_argument
from lightning_fsdp.harness.command_line import CommandParser, exit_with, require_extra
from lightning_fsdp.plan.dry_run import Run, dry_run, largest_batch
from lightning_fsdp.plan.models import MODELS, config_of
from lightning_fsdp.plan.process import bytes_at_start
from lightning_fsdp.plan.report import as_json, format_plan, format_rest, format_search

_MAX_BATCH_SIZE = 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan, write the file.

    Returns:
        Exit code: 1 if not even the smallest batch fits.
    """
    parser = make_parser()
    args = parser.parse(arguments)
    if args.max_batch_size is not None and args.device_memory is None:
        parser.error("--max-batch-size: expected --device-memory with it, as it ends a search")
    if args.out is not None and (why := _why_not_a_file(args.out)) is not None:
        parser.error(_no_file(args.out, why))
    require_extra("recipes", "transformers")
    cap = _MAX_BATCH_SIZE if args.max_batch_size is None else args.max_batch_size
    search = plan = None
    try:
        config = config_of(args.model)
        run = Run(
            world_size=args.ranks,
            shard_size=args.shard_size,
            zero_stage=args.stage,
            precision=args.precision,
            batch_size=args.batch_size,
            seq_len=args.seq_len,
            grad_accum=args.grad_accum,
            state_over=args.state_over,
            activation_checkpointing=args.activation_checkpointing,
            optimizer=args.optimizer,
            loss=args.loss,
            backend=args.backend,
        )
        if args.device_memory is None:
            plan = dry_run(config, run)
        else:
            search, plan = largest_batch(config, run, device_bytes=args.device_memory, cap=cap)
    except ValueError as error:
        parser.error(str(error))
    at_start = bytes_at_start() if args.backend == "gloo" and plan is not None else None
    if plan is not None:
        print(format_plan(args.model, plan))
    if search is not None:
        print(f"\n{format_search(search, args.device_memory)}")
    print(f"\n{format_rest(plan, at_start)}")
    if args.out is not None:
        content = json.dumps(as_json(args.model, plan, search, at_start), indent=1) + "\n"
        try:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(content)
        except OSError as error:
            parser.error(_no_file(args.out, str(error.strerror)))
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
    return f"--out: expected a file to write, got {str(path)!r} ({why}). Name another."


def make_parser() -> CommandParser:
    """The options."""
    parser = CommandParser(
        "lightning_fsdp.plan",
        "What a rank holds in a training step, by owner and phase; nothing is allocated and no "
        "other rank is needed.",
        examples=[
            "--model gpt2-xl --ranks 8 --stage 3 --device-memory 80GB",
            "--model FOLDER --ranks 64 --batch-size 4 --precision bf16-mixed --out plan.json",
        ],
        old={"--world": "--ranks", "--json": "--out"},
    )
    parser.add_argument(
        "--model",
        required=True,
        help=f"one of {', '.join(MODELS)}; or a folder with a config.json of transformers",
    )
    parser.add_argument("--ranks", type=int, required=True, help="of the run")
    parser.add_argument(
        "--shard-size",
        type=int,
        metavar="RANKS",
        help="that hold one model together; each group of as many holds a replica (default: all)",
    )
    parser.add_argument("--stage", type=int, default=3, help="of ZeRO: 2 or 3")
    parser.add_argument(
        "--precision", default=Run.precision, help="of the Trainer: 32-true, bf16-true, bf16-mixed"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--batch-size", type=int, default=1, help="sequences per micro-batch")
    size.add_argument(
        "--device-memory",
        type=bytes_argument,
        metavar="AMOUNT",
        help="such as 80GB: look for the largest batch that fits (default: --batch-size is taken)",
    )
    parser.add_argument(
        "--max-batch-size",
        type=int,
        metavar="CAP",
        help=f"with --device-memory: where the search ends (default: {_MAX_BATCH_SIZE})",
    )
    parser.add_argument("--seq-len", type=int, default=Run.seq_len, help="tokens per sequence")
    parser.add_argument("--grad-accum", type=int, default=1, help="micro-batches per step")
    parser.add_argument(
        "--state-over",
        choices=("replica", "all"),
        default=Run.state_over,
        help="all: with --shard-size, shards and optimizer state are spread over all ranks, and "
        "each keeps the part of the weights that its group gathers from",
    )
    parser.add_argument(
        "--activation-checkpointing", action="store_true", help="compute the blocks again"
    )
    parser.add_argument(
        "--optimizer",
        choices=("adamw", "muon"),
        default=Run.optimizer,
        help="muon: of the blocks' matrices, each whole on one rank; AdamW of the rest",
    )
    parser.add_argument(
        "--loss",
        choices=("chunked", "plain"),
        default=Run.loss,
        help="chunked: as the recipes', logits of 128 positions at a time; plain: all, in fp32",
    )
    parser.add_argument(
        "--backend", choices=("nccl", "gloo"), default=Run.backend, help="of the process group"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON with everything (default: not written)"
    )
    return parser


if __name__ == "__main__":
    exit_with(main)
