"""What of the core one steady ZeRO-3 step goes through: what who reads along has to open.

    python -m benchmarks.step_trace

One process on torch's fake backend, as rank 0 of 2: five linear layers, each a unit, and AdamW.
Counted in the third step: calls of the core's functions, and how often two calls, one after the
other, are of two files.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import lightning_fsdp.core
from benchmarks.command import BenchmarkParser
from lightning_fsdp import fully_shard
from lightning_fsdp.harness.command_line import at_least
from lightning_fsdp.harness.tables import markdown_table
from lightning_fsdp.plan.torch_internals import open_fake_group

CORE = Path(lightning_fsdp.core.__file__).parent
Call = tuple[str, str]
"""File, relative to the core's folder, and qualified name of a function."""


def calls_of_a_step(num_units: int) -> list[Call]:
    """The core's functions that the third step of a small model calls, in order."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(num_units)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.ones(2, 8, requires_grad=True)
    calls: list[Call] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(CORE):
            calls.append((str(path.relative_to(CORE)), frame.f_code.co_qualname))

    for _ in range(3):
        calls.clear()
        gc.disable()  # what it finds calls functions of the core at no fixed place
        sys.setprofile(note)
        try:
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            sys.setprofile(None)
            gc.enable()
    return calls


def main() -> None:
    """Count, and print a table by file."""
    args = make_parser().parse(None)
    open_fake_group(args.ranks)
    calls = calls_of_a_step(args.units)
    by_file = Counter(file for file, _ in calls)
    functions = {file: len({name for f, name in calls if f == file}) for file in by_file}
    changes = sum(one[0] != other[0] for one, other in itertools.pairwise(calls))
    rows = [[file, str(functions[file]), str(number)] for file, number in by_file.most_common()]
    print(markdown_table(["file of the core", "functions", "calls"], rows))
    print(
        f"\n{len(by_file)} files, {sum(functions.values())} functions, {len(calls)} calls, "
        f"{changes} changes of file"
    )


def make_parser() -> BenchmarkParser:
    """The options."""
    parser = BenchmarkParser("step_trace", __doc__, examples=["--units 5", "--units 50 --ranks 8"])
    parser.add_argument(
        "--units", type=at_least(1), default=5, metavar="N", help="linear layers, each a unit"
    )
    parser.add_ranks(2, help="ranks of the fake group; only rank 0 is there")
    return parser


if __name__ == "__main__":
    main()
