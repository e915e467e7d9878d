"""Files that are summed up while they are written, and the marker that says what a folder holds.

An error of a write says which file it was (``naming``).

``complete.json`` is written last, so a folder that has it had everything::

    {"format": 1, "files": {"__0_0.distcp": {"bytes": 1641, "crc32": "0badcafe"}, ...}}

CRC-32 finds what disks, networks and interrupted copies do to a file. It does not stop somebody who
wants to deceive: nothing in a checkpoint is trusted to be harmless, whatever its sum (``tensors``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import glob
import io
import json
import mmap
import os
import secrets
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, cast

import torch

from lightning_fsdp.checkpoint.damage import DamagedCheckpoint

MARKER = "complete.json"
FORMAT = 1
_BLOCK_BYTES = 4 << 20
Stamps = dict[str, tuple[int, int, int]]
"""By name: the number of the file on its disk, its length, and when it was last written to."""
RESTORE = "Load another checkpoint, or restore this file from a copy."


@dataclass(frozen=True)
class Sum:
    """What a whole file is known by."""

    num_bytes: int
    crc32: int


class DiskFile:
    """A file that is on the disk when it is closed, and on its way there while it is written.

    A thread writes one block while the caller fills the other: what a save does beside (tensors are
    gathered and summed up) takes about as long. And it lets the kernel begin with the disk. By
    itself that would wait until a tenth of the memory is unwritten, or half a minute.

    Args:
        path: Of the file.
        mode: Of ``open``, for writing bytes.
    """

    def __init__(self, path: Path, mode: str) -> None:
        self._file = cast(io.FileIO, path.open(mode, buffering=0))
        # Of the system: memory that was not written to is not there.
        self._block, self._other = (memoryview(mmap.mmap(-1, _BLOCK_BYTES)) for _ in range(2))
        self._filled = 0
        self._writing: _Writing | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *others: object) -> None:
        if kind is None:
            self.close()
        else:  # what is there is of no use
            self._end()

    def write(self, data: Any) -> int:
        """Append bytes, given as anything with a buffer.

        Raises:
            OSError: They, or some before, could not be written.
        """
        view = memoryview(data).cast("B")
        done = 0
        while done < view.nbytes:
            part = view[done : done + _BLOCK_BYTES - self._filled]
            self._block[self._filled : self._filled + part.nbytes] = part
            self._filled += part.nbytes
            done += part.nbytes
            if self._filled == _BLOCK_BYTES:
                self._hand_over()
        return view.nbytes

    def flush(self) -> None:
        """Nothing yet: ``close`` does it once, torch asks after every tensor."""

    def close(self) -> None:
        """Push everything to the disk; a second call does nothing.

        Raises:
            OSError: Some of it could not be written.
        """
        if self._file.closed:
            return
        try:
            self._wait()
            self._write_out(self._block[: self._filled])
            os.fsync(self._file.fileno())
        finally:
            self._end()

    def _hand_over(self) -> None:
        self._wait()
        self._writing = _Writing(functools.partial(self._write_out, self._block))
        self._block, self._other, self._filled = self._other, self._block, 0

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.wait()

    def _write_out(self, block: memoryview) -> None:
        begin, num_bytes = self._file.tell(), block.nbytes
        while block:
            block = block[self._file.write(block) :]
        if num_bytes and hasattr(os, "posix_fadvise"):  # Linux begins to write it then
            os.posix_fadvise(self._file.fileno(), begin, num_bytes, os.POSIX_FADV_DONTNEED)

    def _end(self) -> None:
        if self._writing is not None:
            self._writing.join()
        self._file.close()


class _Writing(threading.Thread):
    """Writes one block.

    No executor: those take no work any more once a program ends, and a save in the background goes
    on then.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="lightning_fsdp write")
        self._work = work
        self._error: OSError | None = None
        self.start()

    def run(self) -> None:
        """Do it."""
        try:
            self._work()
        except OSError as error:
            self._error = error

    def wait(self) -> None:
        """Return when it is written.

        Raises:
            OSError: It could not be.
        """
        self.join()
        if self._error is not None:
            raise self._error


class SummedFile(DiskFile):
    """A new file that is summed up while it is written.

    Attributes:
        sum: Of what was written so far.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "xb")
        self.sum = Sum(0, 0)

    def write(self, data: Any) -> int:
        """Append bytes, given as anything with a buffer."""
        view = memoryview(data).cast("B")
        written = super().write(view)
        self.sum = Sum(self.sum.num_bytes + written, zlib.crc32(view, self.sum.crc32))
        return written


@contextlib.contextmanager
def naming(file: str) -> Iterator[None]:
    """Inside, an error of a write says which file it was: by itself it names none.

    Where a write fails inside of ``torch.save``, torch may raise an error about positions in its
    place. What is raised here is always the one that the system gave.

    Args:
        file: What is written inside.

    Raises:
        OSError: A write failed; with the ``errno`` that it failed with.
    """
    handled = sys.exception()  # by the caller, and none of ours
    try:
        yield
    except (OSError, RuntimeError) as error:
        behind: BaseException | None = error
        while behind is not None and behind is not handled:
            if isinstance(behind, OSError) and behind.errno is not None:
                words = behind.strerror or os.strerror(behind.errno)
                raise OSError(behind.errno, f"could not write {file!r}: {words}") from error
            behind = behind.__cause__ or behind.__context__
        raise


def write_file(path: Path, data: bytes) -> Sum:
    """Write a new file of ``data``; it is on the disk afterwards."""
    with naming(path.name), SummedFile(path) as file:
        file.write(data)
    return file.sum


def write_for_torch(path: Path, content: Any) -> None:
    """Write what ``torch.load`` reads, tensor by tensor, without a copy of all of it in memory.

    Args:
        path: Leads to what was there before, or to all of the new file.
        content: What ``torch.save`` takes.

    Raises:
        OSError: It cannot be written; says which file.
    """
    with naming(str(path)), _own_file_beside(path) as own:
        with DiskFile(own, "wb") as file:
            torch.save(content, cast(IO[bytes], file))
        own.replace(path)


def beside(path: Path, suffix: str) -> Path:
    """Where a save to ``path`` writes until all is there.

    For a job that SLURM starts again, Lightning takes the highest number of whatever has ``ckpt_``
    in its name for that of a checkpoint; so what a killed save leaves must not have it.
    """
    return path.with_name(f".{path.name.replace('ckpt_', 'ckpt-')}{suffix}")


@contextlib.contextmanager
def _own_file_beside(path: Path) -> Iterator[Path]:
    """A file of this save alone: another process may save to the same path, and the last one wins.

    It is locked, and removed at the end. Those of saves that were killed are not locked, and go.
    """
    with alone_in(path.parent):
        for left in path.parent.glob(f"{glob.escape(beside(path, '').name)}.*.partial"):
            with contextlib.suppress(OSError), left.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
        own = beside(path, f".{secrets.token_hex(4)}.partial")
        lock = own.open("xb")
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield own
    finally:
        own.unlink(missing_ok=True)
        lock.close()


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Inside, no other save begins in ``folder``: it would remove one that is not locked yet."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot lock a folder
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Push a folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder.name):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot, and need not
            raise
    finally:
        os.close(descriptor)


def write_marker(folder: Path, sums: Mapping[str, Sum]) -> None:
    """Say that ``folder`` is complete, after a look whether its files are there.

    Raises:
        RuntimeError: A file that some rank wrote is not there, or not as long.
    """
    for name, expected in sums.items():
        path = folder / name
        found = path.stat().st_size if path.exists() else None
        if found != expected.num_bytes:
            raise RuntimeError(
                f"expected {name!r} with the {expected.num_bytes} bytes that were written to it, "
                f"got {'no such file' if found is None else f'{found} bytes'} on rank 0. Save to "
                "a folder that all ranks share."
            )
    files = {n: {"bytes": s.num_bytes, "crc32": f"{s.crc32:08x}"} for n, s in sorted(sums.items())}
    write_file(folder / MARKER, json.dumps({"format": FORMAT, "files": files}, indent=1).encode())


def read_marker(folder: Path) -> dict[str, Sum]:
    """What a complete folder holds.

    Raises:
        DamagedCheckpoint: There is no marker, or it cannot be read.
    """
    path = folder / MARKER
    if not path.is_file():
        raise DamagedCheckpoint(
            f"{folder}: expected a finished checkpoint, got a folder without {MARKER!r}: its save "
            "was interrupted. Load another checkpoint; the next save removes this one."
        )
    try:
        content = json.loads(path.read_bytes())
        version = content["format"]
        files = content["files"].items() if version == FORMAT else ()
        sums = {str(n): Sum(int(s["bytes"]), int(s["crc32"], 16)) for n, s in files}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(
            f"{path}: expected the list of this checkpoint's files, got something else ({error}). "
            + RESTORE
        ) from error
    if version != FORMAT or any(Path(name).name != name for name in sums):
        raise DamagedCheckpoint(
            f"{path}: expected format {FORMAT} and plain file names, got format {version!r} and "
            f"{sorted(sums)}. Load it with the version of lightning_fsdp that saved it."
        )
    return sums


def check_sizes(folder: Path, sums: Mapping[str, Sum]) -> None:
    """See that all files are there and as long as they were.

    Raises:
        DamagedCheckpoint: One is not.
    """
    for name, expected in sums.items():
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpoint(f"{path}: expected this file, got none: it is gone. {RESTORE}")
        found = path.stat().st_size
        if found != expected.num_bytes:
            raise DamagedCheckpoint(
                f"{path}: expected {expected.num_bytes} bytes, got {found}. {RESTORE}"
            )


def read_stamps(folder: Path, names: Iterable[str]) -> Stamps:
    """By what it shows, without reading them, that files are written to."""
    stats = {name: (folder / name).stat() for name in names}
    return {name: (s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats.items()}


def check_content(path: Path, expected: Sum) -> None:
    """Read a file once, a block at a time, and see that it is what was written.

    Raises:
        DamagedCheckpoint: It is not.
    """
    crc32 = 0
    with path.open("rb", buffering=0) as file:
        block = bytearray(min(_BLOCK_BYTES, expected.num_bytes))
        while num_bytes := file.readinto(block):
            crc32 = zlib.crc32(memoryview(block)[:num_bytes], crc32)
    _compare(path, crc32, expected)


def read_listed(folder: Path, name: str, sums: Mapping[str, Sum]) -> bytes:
    """The content of a small file, as it was written.

    Raises:
        DamagedCheckpoint: It is not as it was, or the marker does not have it.
    """
    path = folder / name
    if name not in sums:
        raise DamagedCheckpoint(f"{path}: expected this file in {MARKER}, got none. {RESTORE}")
    expected = sums[name]
    check_sizes(folder, {name: expected})
    data = path.read_bytes()
    _compare(path, zlib.crc32(data), expected)
    return data


def _compare(path: Path, crc32: int, expected: Sum) -> None:
    if crc32 != expected.crc32:
        raise DamagedCheckpoint(
            f"{path}: expected the checksum {expected.crc32:08x}, got {crc32:08x}: the content has "
            f"changed since it was saved. {RESTORE}"
        )
