"""Kill ranks at a moment of their work that is given by name, as a power cut would.

    rank 0: exchange 2              before a collective
    rank 0: open __0_0.distcp       before a file is made
    rank 1: write __1_0.distcp      with half of the first write done
    rank 0: sync version-2          before a flush of a file or folder to the disk
    rank 0: rename version-2        before a rename; also link, replace, make, remove

The moments are seen where Python calls the system and torch, not in the code under test.
"""

import io
import os
import signal
from collections import Counter
from pathlib import Path

import torch.distributed as dist

SCOPES = ("one rank", "all ranks")


def watch(rank: int, kill_at: str | None, scope: str) -> list[str]:
    """From now on this process notes its moments, and ends at one of them. Collective.

    Args:
        rank: Of this process.
        kill_at: The moment; the rank that comes to it is killed.
        scope: ``"all ranks"`` kills the others before.

    Returns:
        The moments, to which more are added.
    """
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    moments: list[str] = []
    counts: Counter[str] = Counter()

    def is_here(moment: str) -> bool:
        counts[moment] += 1
        name = f"rank {rank}: {moment}"
        if moment == "exchange":
            name += f" {counts[moment]}"
        elif counts[moment] > 1:
            return False
        moments.append(name)
        return name == kill_at

    def end() -> None:
        if scope == "all ranks":
            for pid in pids:
                if pid != os.getpid():
                    os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def noting(function, verb, argument=0):
        def call(*args, **kwargs):
            if is_here(verb if argument is None else f"{verb} {_name(args[argument])}"):
                end()
            return function(*args, **kwargs)

        return call

    class File:
        """A file for writing that may be left half written."""

        def __init__(self, file, name):
            self._file, self._name = file, name

        def write(self, data):
            view = memoryview(data).cast("B")
            if is_here(f"write {self._name}"):
                self._file.write(view[: len(view) // 2])
                self._file.flush()
                end()
            return self._file.write(view)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self._file.close()

        def __getattr__(self, name):
            return getattr(self._file, name)

    plain_open = io.open

    def noting_open(path, mode="r", *args, **kwargs):
        is_new = "x" in mode or "w" in mode
        if is_new and is_here(f"open {_name(path)}"):
            end()
        file = plain_open(path, mode, *args, **kwargs)
        return File(file, _name(path)) if is_new else file

    io.open = noting_open
    os.mkdir = noting(os.mkdir, "make")
    os.fsync = noting(os.fsync, "sync")
    os.rename = noting(os.rename, "rename")
    os.replace = noting(os.replace, "replace")
    os.symlink = noting(os.symlink, "link", 1)
    os.unlink = noting(os.unlink, "remove")
    os.rmdir = noting(os.rmdir, "remove")
    dist.all_gather_object = noting(dist.all_gather_object, "exchange", None)
    return moments


def _name(path) -> str:
    return (
        Path(f"/proc/self/fd/{path}").resolve().name if isinstance(path, int) else Path(path).name
    )
