"""Several hosts on one machine: network namespaces, and between them a network as slow as wanted.

    host 0                       switch                      host 1
    eth0 10.77.0.1 ---- port0 ---- bridge ---- port1 ---- eth0 10.77.0.2
         limited             limited      limited              limited

A namespace has devices, addresses and counters of its own, so nothing here meets the machine's own
network, or that of another run. Memory, processor and file system stay common. Everything is gone
when the ``with`` block ends, however it does; what a killed process left is removed by the next.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

REPOSITORY = Path(__file__).resolve().parents[2]
DEVICE = "eth0"
PREFIX = "lfsdp"
PORT = 29400  # of the rendezvous, on host 0
_NAMESPACES = Path("/run/netns")
_numbers = itertools.count()  # of the hosts of this process
_PARTING = (signal.SIGINT, signal.SIGTERM)
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_END_LIMIT_S = 20.0  # a killed process may be in the middle of giving memory back


class NoHosts(RuntimeError):  # noqa: N818 (a reason to skip)
    """This machine, or this user, has no network namespaces; says why, in one line."""


class Hosts:
    """A few hosts, joined by a switch.

    Args:
        num_hosts: 2 to 4.
        mbit_s: Of the line between a host and the switch, in each direction; ``None``: as fast as
            the machine.

    Raises:
        NoHosts: When it is entered.
    """

    def __init__(self, num_hosts: int = 2, *, mbit_s: float | None = None) -> None:
        self._num_hosts, self._mbit_s = num_hosts, mbit_s
        self._mark = f"{PREFIX}-{os.getpid()}-{next(_numbers)}-"
        self._jobs: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        if (refusal := _refusal()) is not None:
            raise NoHosts(refusal)
        try:
            _remove([name for name in _present() if not _is_of_the_living(name)])
            self._make()
        except BaseException as error:
            self._end()
            if isinstance(error, subprocess.CalledProcessError):
                says = error.stderr.decode(errors="replace").strip()
                raise NoHosts(f"expected network namespaces, got {says!r} of `ip`.") from error
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def name(self, host: int) -> str:
        """The namespace of a host."""
        return f"{self._mark}{host}"

    @staticmethod
    def address(host: int) -> str:
        """Of a host, for the others."""
        return f"10.77.0.{host + 1}"

    def start(
        self, host: int, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host.

        Args:
            host: Its number.
            command: Program and arguments.
            log: What it prints is written behind what is there.
            env: More variables.
        """
        with log.open("ab") as stream:
            job = subprocess.Popen(
                ["ip", "netns", "exec", self.name(host), *command],
                env=_environment() | dict(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is this process's, which ends the others
            )
        self._jobs.append(job)
        return job

    def torchrun(
        self, host: int, arguments: Sequence[str], *, nproc: int, log: Path, **env: str
    ) -> subprocess.Popen[bytes]:
        """Start the ranks of a host; they meet those of the others at host 0."""
        rendezvous = [f"--rdzv-endpoint={self.address(0)}:{PORT}", "--rdzv-backend=c10d"]
        rendezvous += [f"--rdzv-conf=is_host={host == 0},join_timeout=60,last_call_timeout=1"]
        launcher = [sys.executable, "-m", "torch.distributed.run", *rendezvous]
        launcher += [f"--nnodes={self._num_hosts}", f"--nproc-per-node={nproc}"]
        launcher += [f"--local-addr={self.address(host)}", "--rdzv-id=hosts"]
        return self.start(host, [*launcher, *arguments], log=log, env=env)

    def cut(self, host: int) -> None:
        """A host vanishes: its line goes down, and nothing of it says a last word."""
        _ip("-n", self.name(host), "link", "set", DEVICE, "down")
        _kill_all(self.name(host))

    def _make(self) -> None:
        switch = f"{self._mark}switch"
        for name in (switch, *map(self.name, range(self._num_hosts))):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host in range(self._num_hosts):
            name, port = self.name(host), f"port{host}"
            peer = ["peer", "name", port, "netns", switch]
            _ip("-n", name, "link", "add", DEVICE, "type", "veth", *peer)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", DEVICE)
            _ip("-n", name, "link", "set", DEVICE, "up")
            # bbr, which some kernels start with, sends less than such a line carries.
            _run("ip", "netns", "exec", name, "sh", "-c", f"echo reno > {_CONGESTION}")
            if self._mbit_s is not None:
                self._limit(name, DEVICE)
                self._limit(switch, port)

    def _limit(self, namespace: str, device: str) -> None:
        # A burst that holds the largest packet, which is then not cut; a queue that holds all that
        # senders may have on their way, so that nothing is dropped.
        limits = ["rate", f"{self._mbit_s}mbit", "burst", "256kb", "limit", "64mb"]
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limits)

    def _end(self) -> None:
        with _undisturbed():
            for job in self._jobs:  # one that has just begun is not in its namespace yet
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
            _remove([name for name in _present() if name.startswith(self._mark)])
            for job in self._jobs:
                job.wait()
            self._jobs.clear()


_CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"


def kernel_bytes(device: str = DEVICE) -> tuple[int, int]:
    """Sent and received over the line of the host that this process is on, so far."""
    folder = Path("/sys/class/net", device, "statistics")
    sent, received = (int((folder / f"{way}_bytes").read_text()) for way in ("tx", "rx"))
    return sent, received


def _refusal() -> str | None:
    """Why there can be no hosts here."""
    what = "expected network namespaces of Linux"
    if sys.platform != "linux":
        return f"{what}, got {sys.platform}."
    if os.geteuid() != 0:
        return f"{what}, which only root may make, got user {os.geteuid()}. Run it as root."
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"{what}, got no {', '.join(missing)}. Install iproute2." if missing else None


def _present() -> list[str]:
    names = [path.name for path in _NAMESPACES.glob(f"{PREFIX}-*")] if _NAMESPACES.is_dir() else []
    return [name for name in names if re.fullmatch(rf"{PREFIX}-\d+-\d+-\w+", name)]


def _is_of_the_living(name: str) -> bool:
    return Path("/proc", name.split("-")[1]).exists()


def _remove(names: Sequence[str]) -> None:
    for name in names:
        _kill_all(name)
    for name in names:  # devices go with the namespace that they are in, and so do their peers
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "del", name)


def _kill_all(name: str) -> None:
    """End all processes of a namespace, also those that they start meanwhile."""
    deadline = time.monotonic() + _END_LIMIT_S
    while (pids := _processes(name)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _processes(name: str) -> list[int]:
    """In a namespace, or about to enter it."""
    entering = processes_with(f"netns\0exec\0{name}\0")  # first: one that has entered has not ended
    try:
        return [*entering, *map(int, _ip("netns", "pids", name).split())]
    except subprocess.CalledProcessError:  # it is gone, or was never finished
        return [*entering]


def processes_with(words: str) -> dict[int, str]:
    """The commands that have some words in them, of all others that run, by process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            command = path.read_bytes().decode(errors="replace")
            if words in command and int(path.parent.name) != os.getpid():
                found[int(path.parent.name)] = command
    return found


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C and its like wait until the end; also in what is started meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PARTING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}
    return own | {
        "GLOO_SOCKET_IFNAME": DEVICE,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONUNBUFFERED": "1",
        # Or ranks that are started again could look for a store that was killed.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, check=True).stdout.decode()
