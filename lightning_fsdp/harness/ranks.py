"""Ranks of one process group on this machine, each in a process of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn  # type: ignore[attr-defined]


def run_ranks(
    function: Callable[..., object], num_ranks: int, *given: Any, device_type: str = "cpu"
) -> None:
    """Run ``function(rank, *given)`` on every rank, in a default process group, and wait for all.

    Args:
        function: Of a module, as the ranks import it.
        num_ranks: How many.
        *given: What each of them gets.
        device_type: Whose tensors the group moves: ``cpu``, or ``cuda``, of which each rank has its
            own.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (function, num_ranks, device_type, f"{folder}/ranks", given)
        spawn(_rank_main, args=arguments, nprocs=num_ranks)  # type: ignore[no-untyped-call]


def _rank_main(
    rank: int,
    function: Callable[..., object],
    num_ranks: int,
    device_type: str,
    meeting: str,
    given: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)  # another number of threads, another order of sums
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=num_ranks,
    )
    function(rank, *given)
    dist.destroy_process_group()
