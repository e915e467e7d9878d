"""Commands in processes that have torch and Lightning already, so without the time of imports.

For tests of what a command does, not of how its processes start.
"""

import contextlib
import importlib
import math
import multiprocessing
import os
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path

import torch

from lightning_fsdp.harness.processes import Failure, last_line
from tests.support.processes import RanksFailed, run_forked, told_by_torchrun

_RECIPE = "recipes.train"
_GRACE_S = 4.0  # how long the others may go on after one rank failed


def run_command(
    command: Sequence[str], *, log: Path, timeout_s: float, cwd: Path | None = None
) -> Failure | None:
    """In the place of that of ``lightning_fsdp.harness.processes``, for ``python -m MODULE ...``.

    What the module forks from a server of its own is forked from its process; and so are the ranks
    of a recipe, each of which is told what torchrun tells.
    """
    assert list(command[:2]) == [sys.executable, "-m"], command
    log.write_bytes(b"")
    try:
        code = run_forked(_main, command[2], list(command[3:]), cwd, log=log, timeout_s=timeout_s)
    except RanksFailed:
        return Failure("timed out", f"took longer than {timeout_s:.0f} s")
    return None if code == 0 else Failure("error", f"exit code {code}: {last_line(log)}")


def _main(module: str, arguments: list[str], cwd: Path | None) -> int:
    torch.set_num_threads(1)
    if cwd is not None:
        os.chdir(cwd)
    fork_always()
    num_ranks = 1
    if module == _RECIPE and "--trainer.devices" in arguments:
        num_ranks = int(arguments[arguments.index("--trainer.devices") + 1])
    return run_module(module, arguments) if num_ranks == 1 else _ranks(num_ranks, arguments)


def fork_always() -> None:
    """A fork of this process, where a fork of a server is asked for."""
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context(  # type: ignore[assignment]
        "fork" if method == "forkserver" else method
    )


def run_module(module: str, arguments: list[str]) -> int:
    """``python -m MODULE ARGUMENTS`` in this process; returns its exit code."""
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stopped:
        if stopped.code is None or isinstance(stopped.code, int):
            return stopped.code or 0
        print(stopped.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001 (as the interpreter)
        traceback.print_exc()
        return 1
    return 0


def _ranks(num_ranks: int, arguments: list[str]) -> int:
    """All of a recipe's ranks; after one that failed, the others may say so too, and are ended."""
    importlib.import_module(_RECIPE)  # once for all of them
    context = multiprocessing.get_context("fork")
    with _held_port() as port:
        ranks = [
            context.Process(target=_rank, args=(rank, num_ranks, port, arguments))
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        running, code, deadline_s = list(ranks), 0, math.inf
        while running and time.monotonic() < deadline_s:
            wait([process.sentinel for process in running], 1.0)
            codes = {process: process.exitcode for process in running}  # each asked for once
            running = [process for process, ended in codes.items() if ended is None]
            failed = [abs(ended) for ended in codes.values() if ended]
            if failed and not code:
                code, deadline_s = max(failed), time.monotonic() + _GRACE_S
    for process in ranks:
        process.kill()
        process.join()
    return code


@contextlib.contextmanager
def _held_port() -> Iterator[int]:
    """A port that nobody else is given until the first rank listens to it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the rank, who may have it
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def _rank(rank: int, num_ranks: int, port: int, arguments: list[str]) -> None:
    os.environ.update(told_by_torchrun(rank, num_ranks, port=port), GLOO_SOCKET_IFNAME="lo")
    sys.exit(run_module(_RECIPE, arguments))
