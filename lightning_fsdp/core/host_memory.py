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

MOST_GROWTH_BYTES = 2**29
"""Of the process, before pages are given back."""

_MMAP_MAX, _TRIM_THRESHOLD = -4, -1  # of mallopt
_resident_at_best: list[int] = []  # bytes, when pages were last given back; empty at first


def keep_freed_memory() -> None:
    """No block is mapped on its own any more, and 2 GiB may be free at the end of the heap."""
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)  # the parameter is an int


def return_unused_memory(most: int = MOST_GROWTH_BYTES) -> None:
    """Give unused pages back to the kernel once the process has grown by ``most`` bytes."""
    libc = _glibc()
    if libc is None:
        return
    if not _resident_at_best:
        _resident_at_best.append(_resident_bytes())
    elif _resident_bytes() > _resident_at_best[0] + most:
        libc.malloc_trim(0)
        _resident_at_best[0] = _resident_bytes()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
