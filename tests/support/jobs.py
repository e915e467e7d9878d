"""Scripts run as users run them, in processes that must not outlive them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import REPOSITORY


def mind_interrupts() -> None:
    """For ``preexec_fn``: a runner started in the background ignores Ctrl-C, and passes that on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Job:
    """A script whose processes are all marked, so that whatever it leaves behind can be found.

    A session would not do: torchrun gives each rank one of its own.

    Args:
        folder: Gets the script, which is told the folder as its first argument.
        launcher: Further arguments of Python; empty to run the script itself.
        script: Its text.
        arguments: Of the script.
    """

    def __init__(self, folder: Path, launcher: list[str], script: str, *arguments: str) -> None:
        path = folder / "train.py"
        path.write_text(script)
        hidden = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        environment = {k: v for k, v in os.environ.items() if k not in hidden}
        environment.update(
            PYTHONPATH=str(REPOSITORY),
            OMP_NUM_THREADS="1",
            GLOO_SOCKET_IFNAME="lo",
            PYTHONUNBUFFERED="1",
            TESTED_JOB=str(folder),
        )
        self._mark = f"TESTED_JOB={folder}".encode()
        self.process = subprocess.Popen(
            [sys.executable, *launcher, str(path), str(folder), *arguments],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=mind_interrupts,
        )

    def wait(self, timeout_s: float) -> tuple[int, str]:
        try:
            output, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._kill()
            output, _ = self.process.communicate()
            pytest.fail(f"still running after {timeout_s} s:\n{output}")
        self.check_nothing_is_left(output)
        return self.process.returncode, output

    def check_nothing_is_left(self, output: str) -> None:
        deadline = time.monotonic() + 5.0
        while left := self._members():
            if time.monotonic() > deadline:
                self._kill()
                pytest.fail(f"left processes {left} behind:\n{output}")
            time.sleep(0.1)

    def _kill(self) -> None:
        for pid in self._members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _members(self) -> list[int]:
        members = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                is_zombie = (
                    process.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "Z"
                )
                environment = process.joinpath("environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if self._mark in environment and not is_zombie:
                members.append(int(process.name))
        return members
