"""Runs a command together with all the processes that it starts, and ends all of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_OF_LAUNCHERS = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK",
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip
_OF_CLUSTERS = ("SLURM_", "TORCHELASTIC_", "LSB_", "JSM_", "OMPI_COMM_")


@dataclass(frozen=True)
class Failure:
    """Why a command failed.

    Attributes:
        kind: ``timed out`` if it was ended for the time it took.
        says: In words.
    """

    kind: Literal["error", "timed out"]
    says: str


def run_command(
    command: Sequence[str], *, log: Path, timeout_s: float, cwd: Path | None = None
) -> Failure | None:
    """Run a command; nothing that it started outlives the call.

    Args:
        command: Program and arguments.
        log: File for everything that its processes print.
        timeout_s: Wall time after which all of them are ended.
        cwd: Folder that it runs in; default: that of this process.

    Returns:
        Why it failed, or ``None``.
    """
    process = None
    with log.open("wb") as stream:
        try:
            with held_back():
                # A session of its own, so that ending it also ends the ranks that it starts.
                process = subprocess.Popen(
                    command,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    cwd=cwd,
                    env=_environment(),
                )
            code = process.wait(timeout_s)
            if code == 0:
                return None
            is_killed = code == -signal.SIGKILL
            says = (
                "killed, as the system does when memory runs out" if is_killed else last_line(log)
            )
            return Failure("error", f"exit code {code}: {says}")
        except subprocess.TimeoutExpired:
            return Failure("timed out", f"took longer than {timeout_s:.0f} s")
        finally:
            if process is not None:
                _end(process)


@contextmanager
def held_back() -> Iterator[None]:
    """An interrupt that comes in the block is handled after it: what was started has a name then.

    Blocking the signals would not do: another thread may get them, and the child would inherit it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # which no handler interrupts
        return
    came: list[int] = []
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        for kind in before:
            signal.signal(kind, lambda number, _frame: came.append(number))
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
        for number in came:
            signal.raise_signal(number)


def run_module(module: Sequence[str], folder: Path, *, timeout_s: float) -> Failure | None:
    """The same of a module, by this process's Python; ``folder`` gets its ``log.txt``.

    Args:
        module: Its name and its arguments.
        folder: That is there.
        timeout_s: Wall time after which all processes are ended.
    """
    command = [sys.executable, "-m", *module]
    return run_command(command, log=folder / "log.txt", timeout_s=timeout_s)


def empty_folder(folder: Path) -> Path:
    """Make it, without what an earlier run has left in the same place."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _environment() -> dict[str, str]:
    """This process's, without what a launcher said of its own ranks: the command starts others."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_LAUNCHERS and not name.startswith(_OF_CLUSTERS)
    }
    # One thread per rank: more would let the arms with fewer processes use more of the machine.
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        if _signal_all(process, signal.SIGTERM):
            deadline = time.perf_counter() + 5.0
            while time.perf_counter() < deadline and process.poll() is None:
                time.sleep(0.05)
    finally:  # at once where a second Ctrl-C comes meanwhile
        _signal_all(process, signal.SIGKILL)
        process.wait()


def _signal_all(process: subprocess.Popen[bytes], kind: signal.Signals) -> bool:
    """To the process and to all that it started; returns whether there was any."""
    try:
        os.killpg(process.pid, kind)
    except ProcessLookupError:
        return False
    return True


def last_line(log: Path) -> str:
    """What a command printed last, for a message."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "no output"
