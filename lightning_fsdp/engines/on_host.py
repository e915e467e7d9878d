"""Whole values once per host: one of its ranks writes them, all of them map what it wrote.

    first rank of a host    gathers, and writes into files in memory that have no name
    its other ranks         gather, and drop; then open those files as ``/proc/PID/fd/N``
    each of them            maps the files privately: what it writes is its own, page by page

The files cannot be written to any more once values are shown, and go with the last mapping. Where
the kernel refuses such files, or the way to another process's, each rank of a host keeps a copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
from collections.abc import Hashable, Iterable, Sequence
from contextlib import ExitStack
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_fsdp.core.ranks.process_memory import this_host
from lightning_fsdp.engines.rank_grid import all_gather_objects

K = TypeVar("K", bound=Hashable)

FILE_NAME = "lightning_fsdp-values"
"""What ``/proc/PID/maps`` shows."""

WINDOW_BYTES = 2**30
"""How much a file holds, whose memory is freed when no value in it is left; a larger value alone
may be longer."""

_ALIGNMENT = 64  # as torch allocates
_NO_CHANGES = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def one_per_host(wholes: Iterable[tuple[K, Tensor]]) -> dict[K, Tensor]:
    """Values on the CPU that all ranks of a host have in memory once, until one writes. Collective.

    Args:
        wholes: Gathers them, one after the other; the same ones, with the same values, in the same
            order on every rank.

    Returns:
        Them, contiguous. Their storages cannot be resized, as those of ``torch.load(mmap=True)``.

    Raises:
        RuntimeError: A rank could not keep them; raised on every rank. (What the gathers raise is
            raised where it happens.)
    """
    if dist.get_world_size() == 1:
        return {key: whole.cpu().contiguous() for key, whole in wholes}
    with ExitStack() as opened:
        writer = _find_writer(opened)
        kept: _Copies[K] = _Copies() if writer is None else _Mapped(writer, opened)
        problem: Exception | None = None
        for key, whole in wholes:  # to the end, as the other ranks gather
            try:
                if problem is None:
                    kept.add(key, whole)
            except Exception as error:  # noqa: BLE001 (the other ranks go on to _agree)
                problem = error
        files = _agree(problem, kept.files)
        try:
            kept.show(files)
        except Exception as error:  # noqa: BLE001
            problem = error
        _agree(problem, [])  # before files are closed
        return kept.values


class _Process(NamedTuple):
    """What a rank tells the others: a file of its own, and what is in it."""

    rank: int
    host: tuple[str, ...]
    pid: int
    file: int
    token: bytes

    def open(self, file: int) -> int:
        """A file of that process, to read."""
        return os.open(f"/proc/{self.pid}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)


class _Slot(NamedTuple):
    """Where a value lies: in which file, from which byte on."""

    file: int
    start: int
    shape: torch.Size
    dtype: torch.dtype


class _Copies(Generic[K]):
    """A copy of each value on this rank.

    Attributes:
        values: They, once they are shown.
        files: What this rank has written for others of its host.
    """

    def __init__(self) -> None:
        self.values: dict[K, Tensor] = {}
        self.files: list[int] = []

    def add(self, key: K, whole: Tensor) -> None:
        """Keep a value."""
        self.values[key] = whole.cpu().contiguous()

    def show(self, files: Sequence[Sequence[int]]) -> None:
        """Make ``values``, from the files of each rank."""


class _Mapped(_Copies[K]):
    """Files that one rank of the host writes."""

    def __init__(self, writer: _Process, opened: ExitStack) -> None:
        super().__init__()
        self._writer, self._opened = writer, opened
        self._slots: dict[K, _Slot] = {}
        self._sizes: list[int] = []  # of the files, in bytes

    @override
    def add(self, key: K, whole: Tensor) -> None:
        if whole.nbytes == 0:  # nothing to map
            self._slots[key] = _Slot(-1, 0, whole.shape, whole.dtype)
            return
        start = -(-self._sizes[-1] // _ALIGNMENT) * _ALIGNMENT if self._sizes else WINDOW_BYTES
        is_new = start + whole.nbytes > WINDOW_BYTES
        if is_new:
            self._sizes.append(0)
            start = 0
        self._sizes[-1] = start + whole.nbytes
        self._slots[key] = _Slot(len(self._sizes) - 1, start, whole.shape, whole.dtype)
        if self._writer.rank == dist.get_rank():
            if is_new:
                self.files.append(_new_file(self._opened))
            _write(self.files[-1], whole.detach().cpu().contiguous(), start)

    @override
    def show(self, files: Sequence[Sequence[int]]) -> None:
        for file in self.files:
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _NO_CHANGES)
        is_writer = self._writer.rank == dist.get_rank()
        maps = list[mmap.mmap]()
        for file, size in zip(files[self._writer.rank], self._sizes, strict=True):
            own = os.dup(file) if is_writer else self._writer.open(file)
            try:
                maps.append(_map(own, size))
            finally:
                os.close(own)
        for key, slot in self._slots.items():
            nbytes = slot.shape.numel() * slot.dtype.itemsize
            if nbytes == 0:
                self.values[key] = torch.empty(slot.shape, dtype=slot.dtype)
                continue
            memory = maps[slot.file]
            data = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=slot.start)
            self.values[key] = data.view(slot.dtype).view(slot.shape)


def _new_file(opened: ExitStack) -> int:
    file = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    opened.callback(os.close, file)
    return file


def _write(file: int, value: Tensor, start: int) -> None:
    data = memoryview((ctypes.c_char * value.nbytes).from_address(value.data_ptr()))
    while data:  # the kernel takes some 2 GiB at a time
        written = os.pwrite(file, data, start)
        data, start = data[written:], start + written


def _map(file: int, size: int) -> mmap.mmap:
    """Writable memory that begins as the file is."""
    return mmap.mmap(file, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)


def _find_writer(opened: ExitStack) -> _Process | None:
    """The rank that writes for this one; none if each of this host keeps copies. Collective."""
    mine: _Process | None = None
    with contextlib.suppress(OSError, AttributeError):  # no Linux, or its kernel refuses
        mine = _introduce(opened)
    every: list[_Process | None] = all_gather_objects(mine)
    here = [other for other in every if mine and other and other.host == mine.host]
    can_open: list[bool] = all_gather_objects(bool(here) and _can_open(here[0]))
    if len(here) < 2 or not all(can_open[other.rank] for other in here):
        return None
    return here[0]


def _introduce(opened: ExitStack) -> _Process:
    file, token = _new_file(opened), secrets.token_bytes(16)
    os.write(file, token)
    return _Process(dist.get_rank(), this_host(), os.getpid(), file, token)


def _can_open(process: _Process) -> bool:
    """Whether a file of another process can be opened, and is that one's."""
    try:
        file = process.open(process.file)
        try:
            return os.read(file, len(process.token)) == process.token
        finally:
            os.close(file)
    except OSError:
        return False


def _agree(problem: Exception | None, files: list[int]) -> list[list[int]]:
    """What each rank has written. Collective.

    Raises:
        RuntimeError: A rank has a problem; raised on every rank.
    """
    text = None if problem is None else f"{type(problem).__name__}: {problem}"
    answers: list[tuple[str | None, list[int]]] = all_gather_objects((text, files))
    for rank, (theirs, _) in enumerate(answers):
        if theirs is not None:
            raise RuntimeError(
                f"whole values on the host: expected memory, and files in it, for all of them, got "
                f"on rank {rank}: {theirs}. The module stays sharded; free memory (or raise ulimit "
                "-n, where files are too many), or save a sharded checkpoint."
            ) from problem
    return [written for _, written in answers]
