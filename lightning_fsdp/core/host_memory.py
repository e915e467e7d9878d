"""What the C library does with host memory that tensors have freed: it keeps it, within bounds.

Whole parameters are allocated and freed many times a step. glibc gives blocks above 32 MB back at
once, and every page of a fresh one then costs a page fault. So it is told to keep freed memory. Not
all of that can be used again: one small object in the middle of a hole is enough. A process that
accumulates gradients grows by a tensor of logits per step, for want of a hole, whatever glibc
is told. So pages that lie unused are given back, seldom.

All of it is process-wide, for glibc alone: torch has no setting for its allocator on CPU.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from pathlib import Path

MOST_UNUSED_BYTES = 2**29
"""Resident beside what is in use, before pages are given back."""

_MMAP_MAX, _TRIM_THRESHOLD = -4, -1  # of mallopt
_unused_at_best: list[int] = []  # bytes, when pages were last given back; empty at first


class _Mallinfo(ctypes.Structure):
    """As ``mallinfo2`` returns it."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def keep_freed_memory() -> None:
    """No block is mapped on its own any more, and 2 GiB may be free at the end of the heap."""
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)  # the parameter is an int


def return_unused_memory(most: int = MOST_UNUSED_BYTES) -> None:
    """Give pages back to the kernel if more than ``most`` bytes of them came to lie unused."""
    libc = _glibc()
    if libc is None:
        return
    unused = _unused_bytes(libc)
    if not _unused_at_best:
        _unused_at_best.append(unused)
    elif unused > _unused_at_best[0] + most:
        libc.malloc_trim(0)
        _unused_at_best[0] = _unused_bytes(libc)


def _unused_bytes(libc: ctypes.CDLL) -> int:
    """Resident and not in use; programs and what else is not the heap's count as well."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    info = libc.mallinfo2()
    return resident - int(info.uordblks) - int(info.hblkhd)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is a glibc that can be told and asked: 2.33 or later."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = _Mallinfo
    return libc
