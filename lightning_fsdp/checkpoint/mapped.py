"""Mapped files: what was read of them need not stay in the memory of the process.

A page of a mapped file counts as the process's from the moment that it is touched, until the file
is closed. So who reads a checkpoint of 10 GB tensor by tensor seems to need 10 GB at the end,
though the kernel could take each page back at any time.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

STEP_BYTES = 2**28
"""What may be read before it is given back."""

_WORTH_BYTES = 2**20
"""Fewer are not given back: to be told which memory is mapped takes some 10 ms."""


class ReadOnce(Mapping[Any, Any]):
    """A mapping of tensors in mapped files that are read from first to last.

    Args:
        entries: Tensors, or dictionaries of them.
    """

    def __init__(self, entries: Mapping[Any, Any]) -> None:
        self._entries = entries

    @override
    def __getitem__(self, key: Any) -> Any:
        return self._entries[key]

    @override
    def __len__(self) -> int:
        return len(self._entries)

    @override
    def __iter__(self) -> Iterator[Any]:
        read: list[Tensor] = []
        for key, entry in self._entries.items():
            yield key
            read += tensors_of(entry)
            if sum(tensor.nbytes for tensor in read) >= STEP_BYTES:
                give_back(read)
                read.clear()
        give_back(read)


def tensors_of(entry: Any) -> list[Tensor]:
    """The plain tensors in a dictionary, or the one that it is: a file has no other kind."""
    values = entry.values() if isinstance(entry, Mapping) else [entry]
    return [value for value in values if type(value) is Tensor]


def give_back(tensors: Iterable[Tensor]) -> None:
    """Let the kernel take the pages of the files that tensors are mapped from.

    Their values stay: they are read from the file again when they are asked for. A file that was
    written to in memory keeps its pages, and so does memory that is no file's. Of less than 1 MiB
    nothing is given back.
    """
    here = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    nbytes = sum(tensor.nbytes for tensor in here)
    if not sys.platform.startswith("linux") or nbytes < _WORTH_BYTES:
        return
    addresses = [tensor.data_ptr() for tensor in here]
    for begin, stop in _unchanged_files():
        if any(begin <= address < stop for address in addresses):
            size = ctypes.c_size_t(stop - begin)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), size, mmap.MADV_DONTNEED)


def _unchanged_files() -> Iterator[tuple[int, int]]:
    """Addresses of the mapped files of which this process has no pages of its own."""
    area: tuple[int, int] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word, *words = line.split()
        if not word.endswith(":"):  # begin-stop permissions offset device inode path
            begin, stop = (int(address, 16) for address in word.split("-"))
            is_file = words[3] != "0"
            area = (begin, stop) if is_file else None
            own = 0
        elif word in ("Anonymous:", "Swap:"):
            own += int(words[0])
        elif word == "VmFlags:" and area is not None and own == 0:
            yield area
