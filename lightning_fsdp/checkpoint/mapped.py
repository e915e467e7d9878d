"""Mapped files: what was read of them need not stay in the memory of the process.

A page of a mapped file counts as the process's from the moment that it is touched, until the file
is closed. So who reads a checkpoint of 10 GB tensor by tensor seems to need 10 GB at the end,
though the kernel could take each page back at any time.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from io import RawIOBase
from pathlib import Path
from typing import Any

from torch import Tensor, UntypedStorage
from typing_extensions import override

STEP_BYTES = 2**28
"""What may be read before it is given back."""


_OF_A_FILE = re.compile(rb"[\xa0-\xbf]+")
"""Pages by the byte that says: in memory, not in swap, of a file or shared. The process has written
to none of these, which would make it the process's own."""

_HIGHEST = 7 if sys.byteorder == "little" else 0
"""That byte, of the eight that the kernel tells of a page."""


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

    Their values stay: they are read from the file again when they are asked for. Pages that were
    written to in memory are kept, and so is memory that is no file's. Where the kernel does not
    tell which these are, nothing is given back.
    """
    try:
        page_map = Path("/proc/self/pagemap").open("rb", buffering=0)  # noqa: SIM115 (may fail)
    except OSError:
        return
    madvise = ctypes.CDLL(None).madvise
    with page_map:
        for tensor in tensors:
            if tensor.device.type == "cpu" and tensor.nbytes >= mmap.PAGESIZE:
                for begin, nbytes in _read(tensor.untyped_storage(), page_map):
                    madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)


def _read(storage: UntypedStorage, page_map: RawIOBase) -> Iterator[tuple[int, int]]:
    """Address and bytes of stretches of a storage's pages that were read from a file."""
    size, begin = mmap.PAGESIZE, storage.data_ptr()
    first, stop = begin // size, -(-(begin + storage.nbytes()) // size)
    page_map.seek(8 * first)
    told = page_map.read(8 * (stop - first)) or b""
    for stretch in _OF_A_FILE.finditer(told[_HIGHEST::8]):
        yield (first + stretch.start()) * size, len(stretch[0]) * size
