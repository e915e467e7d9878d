"""Time saving and loading of sharded checkpoints beside torch's own path over FSDP2, in one run.

    python -m benchmarks.checkpoint_speed --out benchmarks/results/checkpoint_speed.json

Two gloo ranks with one thread each hold the GPT-2 of ``core_step.py`` with AdamW's state (284 MB
in all). Three arms live in the same processes and take turns, each first in a third of the rounds:

    scratch   lightning_fsdp.save_sharded, load_sharded    of this core
    fsdp2     the same                                     of torch's FSDP2
    dcp       get_state_dict, set_state_dict and torch.distributed.checkpoint's save, load, of FSDP2

    save to the disk    everything is pushed to the disk (fsync), as all of them do by default
    save to the cache   the same with ``os.fsync`` doing nothing: what is not the disk's
    load                from the page cache, where the save has left the files
    load from the disk  the files' pages dropped before (what a virtual disk's host caches, stays)
    async save          until training may go on, with everything copied
    async save, all     until the checkpoint is in place

A time ends when the last rank is done. Ours sum up every byte written, verify every byte read, and
put the folder in place in one step; torch's do nothing of the kind, and write tied weights once per
name. MB/s are of the state, not of the files. Memory, in a round of its own, is the most bytes that
tensors of rank 0 had beside those of the run; bytes that torch's reader holds outside of tensors
(a whole stored slice at a time) are not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from benchmarks.command import BenchmarkParser, write_record
from benchmarks.core_step import ARMS as MODELS
from benchmarks.core_step import VOCABULARY
from benchmarks.update_tables import checkpoint_table
from lightning_fsdp import async_save_sharded, load_sharded, save_sharded
from lightning_fsdp.callbacks.storages import Observer
from lightning_fsdp.harness.ranks import run_ranks

OPERATIONS = (
    "save to the disk", "save to the cache", "load", "load from the disk",
    "async save", "async save, all",
)  # fmt: skip


class Ours:
    """Module and optimizer of an engine, saved by this package."""

    def __init__(self, engine: str) -> None:
        self.model = MODELS[f"{engine}_zero3"]()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        tokens = torch.randint(VOCABULARY, (1, 8))
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, path: Path) -> None:
        save_sharded(path, self.model, [self.optimizer])

    def async_save(self, path: Path) -> Callable[[], Any]:
        return async_save_sharded(path, self.model, [self.optimizer]).wait

    def save_behind(self, path: Path) -> None:
        self.async_save(path)()

    def load(self, path: Path) -> None:
        load_sharded(path, self.model, [self.optimizer])

    def tensors(self) -> list[Tensor]:
        """What this rank has of them."""
        values = [*self.model.parameters(), *self.model.buffers()]
        values += [v for state in self.optimizer.state.values() for v in state.values()]
        return [_local(value.detach()) for value in values]


class Torch(Ours):
    """The same with torch's own functions."""

    def __init__(self, engine: str) -> None:
        super().__init__(engine)
        self.group = dist.new_group(backend="gloo")  # a save must not meet training's collectives

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: Path) -> None:
        dcp.save(self._state(), checkpoint_id=path)

    def async_save(self, path: Path) -> Callable[[], Any]:
        saving: Any = dcp.async_save(self._state(), checkpoint_id=path, process_group=self.group)
        return saving.result  # type: ignore[no-any-return]

    def load(self, path: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


ARMS: dict[str, Callable[[], Ours]] = {
    "scratch": lambda: Ours("scratch"),
    "fsdp2": lambda: Ours("fsdp2"),
    "dcp": lambda: Torch("fsdp2"),
}


def _local(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


@contextlib.contextmanager
def _no_fsync() -> Iterator[None]:
    plain, os.fsync = os.fsync, lambda descriptor: None
    try:
        yield
    finally:
        os.fsync = plain


def _files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file() and "current" not in file.parts]


def _on_first(work: Callable[[], Any]) -> None:
    """Between two timings."""
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def _drop_pages(path: Path) -> None:
    os.sync()
    for file in _files(path):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _seconds(work: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def time_arm(arm: Ours, folder: Path) -> dict[str, float]:
    """Seconds of each operation, once. Collective."""
    seconds = {}
    seconds["save to the disk"] = _seconds(lambda: arm.save(folder / "a"))
    seconds["load"] = _seconds(lambda: arm.load(folder / "a"))
    _on_first(lambda: _drop_pages(folder / "a"))
    seconds["load from the disk"] = _seconds(lambda: arm.load(folder / "a"))
    with _no_fsync():
        seconds["save to the cache"] = _seconds(lambda: arm.save(folder / "b"))
    _on_first(os.sync)  # not in the time of what comes next
    waits: list[Callable[[], Any]] = []
    seconds["async save"] = _seconds(lambda: waits.append(arm.async_save(folder / "c")))
    seconds["async save, all"] = seconds["async save"] + _seconds(waits[0])
    _on_first(lambda: shutil.rmtree(folder))
    _on_first(os.sync)
    return seconds


def _extra_bytes(arm: Ours, work: Callable[[], Any]) -> int:
    """Most bytes of this thread's tensors beside those of the run, on this rank."""
    present = arm.tensors()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in present}
    observer = Observer(present)
    observer.start()
    work()
    return observer.stop().peak_bytes - sum(storages.values())


def inspect_arm(arm: Ours, folder: Path) -> dict[str, Any]:
    """Bytes and memory, and whether what is loaded is what was saved. Collective."""
    expected = [value.clone() for value in arm.tensors()]
    found: dict[str, Any] = {"extra_bytes": {}}
    found["extra_bytes"]["save"] = _extra_bytes(arm, lambda: arm.save(folder / "a"))
    found["extra_bytes"]["async save"] = _extra_bytes(arm, lambda: arm.save_behind(folder / "b"))
    for value in arm.tensors():
        value.zero_()
    found["extra_bytes"]["load"] = _extra_bytes(arm, lambda: arm.load(folder / "a"))
    for value, saved in zip(arm.tensors(), expected, strict=True):
        assert torch.equal(value, saved), "another value than was saved"
    dist.barrier()
    found["written_bytes"] = sum(file.stat().st_size for file in _files(folder / "a"))
    found["state_bytes"] = _sum_over_ranks(sum(value.nbytes for value in expected))
    _on_first(lambda: shutil.rmtree(folder))
    return found


def _sum_over_ranks(number: int) -> int:
    total = torch.tensor(number)
    dist.all_reduce(total)
    return int(total)


def measure(rank: int, folder: str, args: argparse.Namespace) -> None:
    """Run all arms on one rank; rank 0 writes what it found."""
    torch.manual_seed(rank)
    arms = {name: ARMS[name]() for name in args.arms}
    gc.collect()
    gc.freeze()
    about = {name: inspect_arm(arm, Path(folder) / name) for name, arm in arms.items()}
    rounds: list[dict[str, dict[str, float]]] = []
    for index in range(args.warmup + args.rounds):
        names = list(arms)
        first = index % len(names)
        times = {n: time_arm(arms[n], Path(folder) / n) for n in names[first:] + names[:first]}
        if index >= args.warmup:
            rounds.append({name: times[name] for name in names})
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps({"about": about, "rounds": rounds}))


def summarize(found: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per operation and arm; the ratio to torch's path is the median of those per round."""
    rows = []
    for operation in OPERATIONS:
        for name, about in found["about"].items():
            seconds = [times[name][operation] for times in found["rounds"]]
            low, median, high = statistics.quantiles(seconds, n=4)
            ratios = [
                times[name][operation] / times["dcp"][operation]
                for times in found["rounds"]
                if "dcp" in times
            ]
            rows.append({
                "operation": operation, "arm": name,
                "median_s": median, "q1_s": low, "q3_s": high,
                "bytes_per_s": about["state_bytes"] / median,
                "ratio_to_dcp": statistics.median(ratios) if ratios else None,
            })  # fmt: skip
    return rows


def main() -> None:
    """Parse the command line, run, print a table in Markdown, write JSON."""
    args = make_parser().parse(None)
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        run_ranks(measure, args.ranks, folder, args)
        found = json.loads((Path(folder) / "found.json").read_text())
    document = {"world_size": args.ranks, "rows": summarize(found), **found}
    print("\n".join(checkpoint_table(document)))
    write_record(args.out, "checkpoint_speed", document)


def make_parser() -> BenchmarkParser:
    """The options."""
    parser = BenchmarkParser(
        "checkpoint_speed",
        __doc__,
        examples=["--rounds 5", "--arms scratch dcp --scratch /mnt/disk --out runs/disk.json"],
    )
    parser.add_arms(ARMS)
    parser.add_rounds(15, 1)
    parser.add_ranks(2)
    parser.add_argument(
        "--scratch",
        metavar="DIR",
        help="a folder on the disk to measure (default: where temporary files are)",
    )
    parser.add_out()
    return parser


if __name__ == "__main__":
    main()
