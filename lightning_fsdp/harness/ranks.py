"""Ranks of one process group on this machine, each in a process of its own."""

from __future__ import annotations

import json
import multiprocessing
import pkgutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes  # type: ignore[attr-defined]

from lightning_fsdp.harness.processes import Failure, empty_folder, run_module

_START = "forkserver"


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
        start_processes(  # type: ignore[no-untyped-call]
            _rank_main, args=arguments, nprocs=num_ranks, start_method=_START
        )


def run_ranks_apart(
    function: Callable[..., object],
    num_ranks: int,
    *given: Any,
    folder: Path,
    timeout_s: float,
    device_type: str = "cpu",
) -> Failure | None:
    """The same below a process of its own, so that nothing of them outlives the call.

    Args:
        function: Likewise.
        num_ranks: Likewise.
        *given: Likewise; JSON.
        folder: Is emptied, and gets their ``log.txt``.
        timeout_s: Wall time after which all of them are ended.
        device_type: Likewise.

    Returns:
        Why it failed, or ``None``.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    module = [f"{__package__}.ranks", name, str(num_ranks), device_type, json.dumps(given)]
    return run_module(module, empty_folder(folder), timeout_s=timeout_s)


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


if __name__ == "__main__":
    name, num_ranks, device_type, given = sys.argv[1:]
    # Each rank would take seconds to import all that it needs.
    preload = [f"{__package__}.ranks", name.partition(":")[0]]
    multiprocessing.get_context(_START).set_forkserver_preload(preload)
    function = pkgutil.resolve_name(name)
    run_ranks(function, int(num_ranks), *json.loads(given), device_type=device_type)
