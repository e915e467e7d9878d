"""What the commands of the benchmarks share: options that several have, and the record they write.

Run each as ``python -m benchmarks.NAME``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_fsdp.harness.command_line import CommandParser, at_least, write_whole
from lightning_fsdp.harness.environment import environment

_OLD = {"--nproc": "--ranks", "--world-sizes": "--ranks", "--folder": "--scratch"}
_OLD |= {"--batch": "--batch-size", "--seq": "--seq-len"}


class BenchmarkParser(CommandParser):
    """The options of ``python -m benchmarks.NAME``.

    Args:
        name: Of the benchmark.
        doc: Of its module; the first paragraph is the description.
        examples: What follows the command in each example.
    """

    def __init__(self, name: str, doc: str | None, *, examples: Sequence[str]) -> None:
        super().__init__(f"benchmarks.{name}", (doc or "").partition("\n")[0], examples=examples)

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Read the options, also in their earlier spellings."""
        options = {option for action in self._actions for option in action.option_strings}
        self.old |= {old: new for old, new in _OLD.items() if new in options and old not in options}
        return super().parse(arguments)

    def add_arms(self, arms: Iterable[str]) -> None:
        """``--arms``: what is compared."""
        self.add_some("--arms", arms, "engines or ways to compare")

    def add_rounds(self, rounds: int, warmup: int | None = None) -> None:
        """``--rounds`` and ``--warmup``: in each round every arm has one turn."""
        self.add_argument(
            "--rounds", type=at_least(2), default=rounds, metavar="N",  # or there are no quartiles
            help="timed rounds; in each, every arm has one turn",
        )  # fmt: skip
        if warmup is not None:
            self.add_argument(
                "--warmup", type=at_least(0), default=warmup, metavar="N",
                help="rounds before the timed ones",
            )  # fmt: skip

    def add_ranks(self, *ranks: int, help: str = "processes that train together") -> None:  # noqa: A002
        """``--ranks``: one number, or several where there are several defaults."""
        several: dict[str, Any] = {"nargs": "+"} if len(ranks) > 1 else {}
        default = ranks if several else ranks[0]
        self.add_argument(
            "--ranks", type=at_least(1), default=default, metavar="N", help=help, **several
        )

    def add_batch(self, batch_size: int | None, seq_len: int | None, note: str = "") -> None:
        """``--batch-size`` and ``--seq-len``."""
        for option, default, says in (
            ("--batch-size", batch_size, "sequences in a micro-batch of one rank"),
            ("--seq-len", seq_len, "tokens per sequence"),
        ):
            self.add_argument(
                option, type=at_least(1), default=default, metavar="N", help=says + note
            )

    def add_out(
        self, default: Path | None = None, says: str = "the table's rows and every round"
    ) -> None:
        """``--out``: the file of the record."""
        note = "" if default else " (default: not written)"
        self.add_argument(
            "--out",
            type=Path,
            metavar="FILE",
            default=default,
            help=f"JSON file to write: {says}{note}",
        )


def write_record(
    out: Path | None, name: str, parts: dict[str, Any], given: Sequence[str] | None = None
) -> dict[str, Any]:
    """What a benchmark found, with command, date, machine and versions; written where it is to be.

    Args:
        out: The file; None: nothing is written.
        name: Of the benchmark.
        parts: JSON.
        given: The options; None: those of the process.
    """
    words = ["python", "-m", f"benchmarks.{name}", *(sys.argv[1:] if given is None else given)]
    document = {"command": shlex.join(words), **environment(), **parts}
    if out is not None:
        write_whole(out, (json.dumps(document, indent=1) + "\n").encode())
        print(f"written to {out}")
    return document
