"""Let arms take turns, each in processes of its own, as the program that trains a model has them.

In one process they would get into each other's way: what one frees leaves holes in the heap that
another one's tensors come to lie in, and the process holds the memory of all.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Prepare = Callable[[str, int], Callable[[Any], Any]]
"""Of an arm's name and a rank: builds what that rank trains, and gives what to do at a turn."""


def take_turns(
    prepare: Prepare,
    arms: Sequence[str],
    num_ranks: int,
    turns: Iterable[Any],
    folder: str,
    *,
    threads: int = 1,
    variables: Mapping[str, str] | None = None,
) -> dict[str, list[Any]]:
    """Start all arms, and give each its turn, one after the other, for each of ``turns``.

    Args:
        prepare: Runs on each rank, in its gloo group; can be pickled, and so can the rest.
        arms: Names.
        num_ranks: Of each arm.
        turns: What each is told at its turns.
        folder: For the groups to meet in.
        threads: Of each rank.
        variables: Of the environment that ranks are started in.

    Returns:
        By arm, what rank 0 gave back at each turn.

    Raises:
        torch.multiprocessing.ProcessRaisedException: A rank failed.
    """
    found: dict[str, list[Any]] = {arm: [] for arm in arms}
    lines: dict[str, list[Connection]] = {}
    started: list[mp.ProcessContext] = []
    try:
        with _environment({"OMP_NUM_THREADS": str(threads), **(variables or {})}):
            for arm in arms:
                ours, theirs = zip(*(mp.Pipe() for _ in range(num_ranks)), strict=True)
                rendezvous = str(Path(folder) / f"rendezvous-{arm}")
                lines[arm] = list(ours)
                context = mp.spawn(
                    _serve,
                    (prepare, arm, theirs, rendezvous, threads),
                    nprocs=num_ranks,
                    join=False,
                )
                assert context is not None, "it is not joined"
                started.append(context)
        for turn in turns:
            for context, (arm, ranks) in zip(started, lines.items(), strict=True):
                for rank in ranks:
                    rank.send((turn,))
                of_rank_0, *_ = [_answer(rank, context) for rank in ranks]
                found[arm].append(of_rank_0)
        for rank in (rank for ranks in lines.values() for rank in ranks):
            rank.send(None)
        for context in started:
            while not context.join():
                pass
    finally:
        for process in (process for context in started for process in context.processes):
            process.kill()
    return found


def _answer(rank: Connection, context: mp.ProcessContext) -> Any:
    while not rank.poll(1.0):
        context.join(0)  # raises what a rank has ended with
    return rank.recv()


def _serve(
    rank: int,
    prepare: Prepare,
    arm: str,
    lines: Sequence[Connection],
    rendezvous: str,
    threads: int,
) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=len(lines)
    )
    take_turn = prepare(arm, rank)
    # Python's collector would walk every module ever imported, now and then, in some turn.
    gc.collect()
    gc.freeze()
    while (told := lines[rank].recv()) is not None:
        dist.barrier()
        lines[rank].send(take_turn(*told))
    dist.destroy_process_group()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
