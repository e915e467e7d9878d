"""Processes that are no ranks: a fresh interpreter, or one that has torch and Lightning already.

Ranks, too, are forked from the server that has them; where a function runs forked, its ranks are
forked from its process.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]

context: Any = multiprocessing.get_context("forkserver")
"""Starts processes that have torch."""
context.set_forkserver_preload(["tests.support.preload"])

filters: list[Any] | None = None
"""Of warnings, where a process that is no pytest set them: those of its ranks."""


class RanksFailed(AssertionError):  # noqa: N818 (as pytest's own)
    """At least one rank failed, died or hung, or another process hung; the text shows all."""


def told_by_torchrun(
    rank: int,
    world_size: int,
    *,
    port: int,
    host: int = 0,
    num_hosts: int = 1,
    address: str = "127.0.0.1",
) -> dict[str, str]:
    """The environment variables that torchrun gives a rank."""
    per_host = world_size // num_hosts
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - host * per_host),
        "GROUP_RANK": str(host),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(per_host),
        "TORCHELASTIC_RUN_ID": "tests",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def run_snippet(
    code: str, *, timeout_s: float = 60.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python source in a fresh interpreter, in the repository's root; returns exit status,
    stdout and stderr.

    Raises:
        RanksFailed: It ran past ``timeout_s``; it and its children were killed.
    """
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)],
        cwd=REPOSITORY,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill_session(process)
        stdout, stderr = process.communicate()
        raise RanksFailed(f"snippet ran past {timeout_s} s\n{stdout}\n{stderr}") from None
    except BaseException:
        _kill_session(process)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def run_forked(fn: Callable[..., int], *args: Any, log: Path, timeout_s: float) -> int:
    """Call a function in a process that has torch and Lightning already; returns its exit status.

    Args:
        fn: Returns the exit status. The ranks that it starts are forked from its process.
        args: Picklable.
        log: Gets what is printed.
        timeout_s: Seconds.

    Raises:
        RanksFailed: It ran past ``timeout_s``; it and its children were killed.
    """
    process = context.Process(target=_forked_main, args=(fn, args, str(log)))
    process.start()
    try:
        process.join(timeout_s)
        if process.exitcode is None:
            raise RanksFailed(f"{fn.__name__} ran past {timeout_s} s\n{log.read_text()}")
        return process.exitcode
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def _forked_main(fn: Callable[..., int], args: tuple[Any, ...], log: str) -> None:
    global context, filters
    os.setsid()
    stream = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    context = multiprocessing.get_context("fork")
    filters = list(warnings.filters)  # pytest will have others, and ranks would inherit them
    code = fn(*args)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _kill_session(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
