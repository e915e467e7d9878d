"""What the C library does with host memory that tensors have freed: it keeps it, within bounds.

Whole parameters are allocated and freed many times a step. What is free at the end of glibc's heap
goes back at once, and every page of it costs a page fault when it is asked for again; so glibc is
told to keep it. Large blocks stay outside of the heap all the same and go back when they are freed:
inside they would leave holes that nothing else fits into, and a process that trains a model of real
size would hold much more than its tensors.

Each page of a large block costs a fault whenever it comes back, a good part of a step at a real
size. So the kernel is asked to back those of the core by pages of 2 MiB.

Holes remain. A process that accumulates gradients grows by a tensor of logits per step, for want of
a hole, whatever glibc is told. So pages that lie unused are given back, seldom.

All of it is process-wide, for glibc alone: torch has no setting for its allocator on CPU.
:func:`leave_host_memory_alone` switches it off.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from pathlib import Path

from torch import Tensor

MOST_GROWTH_BYTES = 2**29
"""Of the process, before pages are given back."""

LARGE_BYTES = 2**25
"""Blocks from here on have memory of their own; the most that glibc admits."""

HUGE_PAGE_BYTES = 2**21

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of mallopt
_resident_at_best: list[int] = []  # bytes, when pages were last given back; empty at first
_is_left_alone = False


def leave_host_memory_alone() -> None:
    """Change nothing about the C library's memory. Call it before anything is sharded.

    For programs that set ``mallopt`` themselves, or run beside other users of the heap that do.
    """
    global _is_left_alone  # noqa: PLW0603 (of the process, as what it switches off)
    _is_left_alone = True


def keep_freed_memory() -> None:
    """Large blocks are mapped on their own, and 2 GiB may be free at the end of the heap."""
    libc = _glibc()
    if libc is not None and not _is_left_alone:
        libc.mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)  # the parameter is an int


def ask_for_huge_pages(tensor: Tensor) -> None:
    """Of a tensor that was just allocated and not written to: a fault for 2 MiB, not for 4 KiB.

    Advice, for large blocks on the host alone; a kernel without huge pages passes over it.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() < LARGE_BYTES or storage.device.type != "cpu":
        return
    libc = _glibc()
    if libc is None or _is_left_alone:
        return
    begin = -(-storage.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    stop = (storage.data_ptr() + storage.nbytes()) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(stop - begin), mmap.MADV_HUGEPAGE)


def return_unused_memory(most: int = MOST_GROWTH_BYTES) -> None:
    """Give unused pages back to the kernel once the process has grown by ``most`` bytes."""
    libc = _glibc()
    if libc is None or _is_left_alone:
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
