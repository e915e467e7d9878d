"""Command line of the conversion; see ``--help``."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from lightning_fsdp.checkpoint.contents import FORMS
from lightning_fsdp.checkpoint.convert import convert
from lightning_fsdp.harness.command_line import CommandParser, exit_with


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert, and tell what the new checkpoint does not hold.

    Returns:
        Exit code: 0 if it is written.
    """
    args = make_parser().parse(arguments)
    bar = tqdm(  # shown once the size is known: an error stands alone
        unit="B", unit_scale=True, desc=str(args.target), leave=False, delay=1e-3
    )
    with bar:

        def on_total(num_bytes: int) -> None:
            bar.delay = 0  # it is shown now, and so is to be cleared
            bar.reset(total=num_bytes)

        def on_bytes(num_bytes: int) -> None:
            bar.update(num_bytes)

        try:
            left_out = convert(
                args.source,
                args.target,
                to=args.to,
                prefix=args.prefix,
                config=args.config,
                max_shard_size=args.max_shard_size,
                on_total=on_total,
                on_bytes=on_bytes,
            )
        except (OSError, ValueError, NotImplementedError) as error:
            bar.close()
            says = re.sub(r"^(prefix|config|max_shard_size):", _option_of, str(error))
            print(f"error: {says}", file=sys.stderr)
            return 1
    print(f"{args.target}: {args.to}")
    for what in left_out:
        print(f"not in it: {what}")
    return 0


def _option_of(name: re.Match[str]) -> str:
    return f"--{name[0].replace('_', '-')}"


def make_parser() -> CommandParser:
    """The options."""
    parser = CommandParser(
        "lightning_fsdp.convert",
        "Write a checkpoint in another form; one process, no accelerator.",
        examples=[
            "epoch=3.ckpt shards --to sharded",
            "epoch=3.ckpt weights --to safetensors --prefix model. --config FOLDER",
        ],
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="SRC",
        help="checkpoint to read: a Trainer's file, a sharded folder, or safetensors",
    )
    parser.add_argument(
        "target", type=Path, metavar="DST", help="file or folder to write, which must not exist"
    )
    parser.add_argument("--to", required=True, choices=FORMS, help="form to write")
    parser.add_argument(
        "--prefix",
        default="",
        help="beginning of all names that safetensors leave out, such as model. (default: none)",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FOLDER",
        help="folder whose config.json and tokenizer are copied (default: none)",
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="AMOUNT", help="most bytes of a safetensors file"
    )
    return parser


if __name__ == "__main__":
    exit_with(main)
