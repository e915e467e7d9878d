"""Scripts run as users run them, in processes that must not outlive them."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import REPOSITORY
from tests.support.standing import where_they_stand

# Its store finds a port by itself; one that is only looked up may be another's a moment later.
BY_TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

_PAUSE_S = 0.05
_STACKS_S = 5.0  # for writing Python's stacks
_LEFT_S = 20.0  # for what ends after the last output; reached only where something is left
_KILLED_S = 30.0  # for what was told to end


def mind_interrupts() -> None:
    """For ``preexec_fn``: a runner started in the background ignores Ctrl-C, and passes that on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _prepare() -> None:
    mind_interrupts()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # SIGABRT is to show stacks only


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
            PYTHONFAULTHANDLER="1",  # shows Python's stacks on SIGABRT
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
            errors="replace",  # what two processes say at once may be cut anywhere
            start_new_session=True,
            preexec_fn=_prepare,
        )

        self._began_s = self._heard_s = time.monotonic()
        self._said: list[tuple[float, str]] = []  # lines, and when they came
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._heard_s = time.monotonic()
                self._said.append((self._heard_s - self._began_s, line))

    @property
    def output(self) -> str:
        """What all its processes have said so far."""
        return "".join(line for _, line in self._said)

    def wait_for(self, text: str, timeout_s: float = 200.0, silent_s: float = 60.0) -> None:
        """Return when it has said something."""
        self._wait(lambda: text in self.output, timeout_s, silent_s)
        assert text in self.output, f"ended without {text!r}:\n{self.output}"

    def wait(self, timeout_s: float = 200.0, silent_s: float = 60.0) -> tuple[int, str]:
        """Return its status and output when all its processes have ended.

        Args:
            timeout_s: How long it may take from now on: several times what it takes alone, for
                imports, and the end of an interpreter that has imported much, take long among
                many processes.
            silent_s: How long it may say nothing; what hangs says nothing.
        """
        self._wait(lambda: False, timeout_s, silent_s)
        self.check_nothing_is_left(self.output)
        return self.process.wait(), self.output

    def _wait(self, is_enough: Callable[[], bool], timeout_s: float, silent_s: float) -> None:
        """Until it is enough, or there is no more to come."""
        start_s = time.monotonic()
        while (self._reader.is_alive() or self.process.poll() is None) and not is_enough():
            now_s = time.monotonic()
            if now_s - start_s > timeout_s:
                self._fail(f"still running after {timeout_s:g} s")
            if now_s - self._heard_s > silent_s:
                self._fail(f"still running, and silent for {silent_s:g} s")
            time.sleep(_PAUSE_S)

    def _fail(self, why: str) -> None:
        """Kill it, and tell where it stood, and when it said what."""
        where = where_they_stand(self._members())
        self._show_stacks()
        self._kill()
        self._reader.join()
        self.process.wait()
        said = "".join(f"{when_s:7.2f} s  {line}" for when_s, line in self._said)
        pytest.fail(f"{why}:\n{where}\n{said}")

    def check_nothing_is_left(self, output: str) -> None:
        deadline = time.monotonic() + _LEFT_S
        while left := self._members():
            if time.monotonic() > deadline:
                where = where_they_stand(left)
                self._kill()
                pytest.fail(f"left processes {left} behind:\n{where}\n{output}")
            time.sleep(0.1)

    def _show_stacks(self) -> None:
        """Python's, one process after the other: what two say at once is cut anywhere."""
        deadline_s = time.monotonic() + _STACKS_S
        for pid in self._members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
            while pid in self._members() and time.monotonic() < deadline_s:
                time.sleep(_PAUSE_S)

    def _kill(self) -> None:
        """Return when none is left: the kernel takes its time to end what was told to end."""
        deadline_s = time.monotonic() + _KILLED_S
        while (left := self._members()) and time.monotonic() < deadline_s:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_PAUSE_S)

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
