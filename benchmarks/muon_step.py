"""Time Muon under sharding: owners, beside what is done elsewhere, and one process, in one run.

    python -m benchmarks.muon_step --out benchmarks/results/muon_step.json

Two gloo ranks with one thread each train the same GPT-2 (6 layers, width 512), the matrices of its
blocks by ``torch.optim.Muon`` and the rest by AdamW. All arms live in the same processes and take
turns, a round of one step each. Reported per arm: medians and quartiles of the whole step and of
the optimizers' part of it.

================  ==================================================================================
scratch           this core: each matrix whole on its owner
fsdp2_full        torch's FSDP2, ``full_tensor()`` of each gradient: every rank steps all matrices
fsdp2_rows        torch's FSDP2, an all-to-all of row shards for as many equal matrices as there are
                  ranks: each rank steps one of them, and sends the rows back
one               one process alone; the other waits
================  ==================================================================================
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.command import BenchmarkParser, write_record
from benchmarks.core_step import SHARD, VOCABULARY, blocks_of, build_model
from lightning_fsdp.harness.ranks import run_ranks
from lightning_fsdp.harness.tables import markdown_table

LR = 1e-3


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of blocks, and all other parameters."""
    matrices = [p for block in blocks_of(model) for p in block.parameters() if p.ndim == 2]
    chosen = set(map(id, matrices))
    return matrices, [p for p in model.parameters() if id(p) not in chosen]


def of_torch(model: nn.Module) -> Callable[[], None]:
    """Both optimizers as they are."""
    matrices, others = split(model)
    muon, adamw = torch.optim.Muon(matrices, lr=LR), torch.optim.AdamW(others, lr=LR)

    def step() -> None:
        muon.step()
        adamw.step()

    return step


class _OnEveryRank:
    """Whole gradients on every rank, which steps whole copies and keeps its rows."""

    def __init__(self, model: nn.Module) -> None:
        self.matrices, others = split(model)
        self.wholes = [nn.Parameter(_full(p)) for p in self.matrices]
        self.muon, self.adamw = (
            torch.optim.Muon(self.wholes, lr=LR),
            torch.optim.AdamW(others, lr=LR),
        )

    def __call__(self) -> None:
        for parameter, whole in zip(self.matrices, self.wholes, strict=True):
            assert parameter.grad is not None, "the backward was run"
            whole.grad = _full(parameter.grad)
        self.muon.step()
        for parameter, whole in zip(self.matrices, self.wholes, strict=True):
            start, stop = rows_of(len(whole), dist.get_rank())
            local_of(parameter).copy_(whole.detach()[start:stop])
        self.adamw.step()


class _RowsToOwners:
    """Of as many equal matrices as there are ranks, each rank gets one whole."""

    def __init__(self, model: nn.Module) -> None:
        matrices, others = split(model)
        self.adamw = torch.optim.AdamW(others, lr=LR)
        world_size, me = dist.get_world_size(), dist.get_rank()
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in matrices:
            by_shape.setdefault(parameter.shape, []).append(parameter)
        self.batches: list[tuple[list[nn.Parameter], nn.Parameter | None]] = []
        for equal in by_shape.values():
            for first in range(0, len(equal), world_size):
                batch = equal[first : first + world_size]
                wholes = [_full(p) for p in batch]
                mine = nn.Parameter(wholes[me]) if me < len(batch) else None
                self.batches.append((batch, mine))
        self.muon = torch.optim.Muon([p for _, p in self.batches if p is not None], lr=LR)

    def __call__(self) -> None:
        for batch, mine in self.batches:
            gradients = [local_of(p.grad) for p in batch if p.grad is not None]
            whole = to_owners(gradients, batch[0].shape)
            if mine is not None:
                mine.grad = whole
        self.muon.step()
        for batch, mine in self.batches:
            from_owners([local_of(p) for p in batch], mine)
        self.adamw.step()


def to_owners(locals_: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """The rows of the ``rank``-th of some matrices from all ranks; empty, if there are fewer."""
    world_size, me = dist.get_world_size(), dist.get_rank()
    is_owner = me < len(locals_)
    counts = [(b - a) * shape[1] for a, b in (rows_of(shape[0], r) for r in range(world_size))]
    received = locals_[0].new_empty(sum(counts) if is_owner else 0)
    sent = torch.cat([local.reshape(-1) for local in locals_])
    sizes = [local.numel() for local in locals_] + [0] * (world_size - len(locals_))
    dist.all_to_all_single(received, sent, counts if is_owner else [0] * world_size, sizes)
    return received.view(shape) if is_owner else received


def from_owners(locals_: Sequence[Tensor], mine: Tensor | None) -> None:
    """The other way."""
    world_size = dist.get_world_size()
    counts = [local.numel() for local in locals_] + [0] * (world_size - len(locals_))
    received = locals_[0].new_empty(sum(counts))
    if mine is None:
        sent, sizes = received[:0], [0] * world_size
    else:
        sent = mine.detach().reshape(-1)
        rows = [rows_of(len(mine), rank) for rank in range(world_size)]
        sizes = [(stop - start) * mine.shape[1] for start, stop in rows]
    dist.all_to_all_single(received, sent, counts, sizes)
    for local, part in zip(locals_, torch.split(received, counts[: len(locals_)]), strict=True):
        local.copy_(part.view(local.shape))


def rows_of(num_rows: int, rank: int) -> tuple[int, int]:
    """Those that FSDP2 gives a rank."""
    each = -(-num_rows // dist.get_world_size())
    return min(rank * each, num_rows), min((rank + 1) * each, num_rows)


def local_of(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.detach().to_local()


def _full(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.detach().full_tensor()


ARMS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Callable[[], None]]]] = {
    "scratch": (lambda: SHARD["scratch_zero3"](build_model()), of_torch),
    "fsdp2_full": (lambda: SHARD["fsdp2_zero3"](build_model()), _OnEveryRank),
    "fsdp2_rows": (lambda: SHARD["fsdp2_zero3"](build_model()), _RowsToOwners),
    "one": (build_model, of_torch),
}


def measure(rank: int, args: argparse.Namespace, out: str) -> None:
    """Run all arms on one rank; rank 0 writes seconds and losses."""
    models = {name: ARMS[name][0]() for name in args.arms}
    steps = {name: ARMS[name][1](model) for name, model in models.items()}
    gc.collect()
    gc.freeze()
    generator = torch.Generator().manual_seed(rank)
    found: dict[str, dict[str, list[float]]] = {
        name: {"step": [], "optimizers": [], "loss": []} for name in args.arms
    }
    for round_index in range(args.warmup + args.rounds):
        tokens = torch.randint(VOCABULARY, (args.batch_size, args.seq_len), generator=generator)
        for name, model in models.items():
            dist.barrier()
            if name == "one" and rank != 0:
                continue
            seconds = one_step(model, steps[name], tokens, alone=name == "one")
            if round_index >= args.warmup:
                for what, value in seconds.items():
                    found[name][what].append(value)
    if rank == 0:
        Path(out).write_text(json.dumps(found))


def one_step(
    model: nn.Module, step: Callable[[], None], tokens: Tensor, *, alone: bool
) -> dict[str, float]:
    """Seconds of all, and of what follows the backward on all ranks."""
    begin = time.perf_counter()
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    computed = time.perf_counter()
    if not alone:
        dist.barrier()
    stepped = time.perf_counter()
    step()
    if not alone:
        dist.barrier()  # the slowest counts
    end = time.perf_counter()
    model.zero_grad()
    waited = stepped - computed
    return {"step": end - begin - waited, "optimizers": end - stepped, "loss": loss.item()}


def summarize(found: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Medians and quartiles per arm."""
    rows = []
    for name, seconds in found.items():
        row: dict[str, Any] = {"arm": name, "last_loss": seconds["loss"][-1]}
        for what in ("step", "optimizers"):
            low, median, high = statistics.quantiles(seconds[what], n=4)
            row |= {f"{what}_ms": median * 1e3, f"{what}_q1": low * 1e3, f"{what}_q3": high * 1e3}
        rows.append(row)
    return rows


SAYS = {
    "scratch": "this core: the rank that owns it",
    "fsdp2_full": "FSDP2: every rank",
    "fsdp2_rows": "FSDP2: the rank that all send its rows to",
    "one": "the only process",
}


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    one = next((row for row in rows if row["arm"] == "one"), None)
    body = []
    for row in rows:
        times = [
            f"{row[f'{what}_ms']:.0f} ({row[f'{what}_q1']:.0f}..{row[f'{what}_q3']:.0f})"
            for what in ("step", "optimizers")
        ]
        of_half = "" if one is None else f"{2 * row['optimizers_ms'] / one['optimizers_ms']:.2f}"
        body.append([row["arm"], SAYS[row["arm"]], *times, of_half])
    head = ["arm", "a matrix is stepped by", "step, median (quartiles) ms"]
    head += ["optimizers' part of it, ms", "that part / half of `one`'s"]
    return markdown_table(head, body)


def main() -> None:
    """Parse the command line, run, print, write JSON."""
    args = make_parser().parse(None)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        run_ranks(measure, args.ranks, args, str(out))
        found = json.loads(out.read_text())
    rows = summarize(found)
    print(table_of(rows))
    write_record(args.out, "muon_step", {"rows": rows, "rounds": found})


def make_parser() -> BenchmarkParser:
    """The options."""
    parser = BenchmarkParser(
        "muon_step", __doc__, examples=["--rounds 4", "--arms scratch one --seq-len 128"]
    )
    parser.add_arms(ARMS)
    parser.add_batch(1, 32)
    parser.add_rounds(12, 2)
    parser.add_ranks(2)
    parser.add_out()
    return parser


if __name__ == "__main__":
    main()
