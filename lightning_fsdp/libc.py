"""How much host memory that tensors have freed the C library keeps.

Whole copies are allocated and freed many times a step. By default glibc returns what is free at the
end of its heap to the kernel at once, and every page of it costs a page fault when it is allocated
again; so glibc is told to keep it. Large blocks stay outside the heap all the same and are returned
when they are freed: inside they would leave holes that nothing else fits into, and a process that
trains a model of real size would hold much more than its tensors.

Each page of a large block costs a fault whenever the block is allocated, a good part of a step at a
real size. So blocks of the core are backed by pages of 2 MiB, and stay outside the heap from half
the size on.

Holes remain. Activations leave them in a backward, and the gradients that follow are larger; so the
process would hold most at the backward's end, when it needs neither. Unused pages are returned when
it is about to hold more than it needs at any time: as gradients arrive, and before those of a large
unit.

All of this goes for the whole process, and for glibc only: torch has no setting for its allocator
on CPU. :func:`leave_host_memory_alone` switches it off.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from pathlib import Path

import torch

# With a third of this, models of up to 100 M parameters returned the same pages and took them again
# in every step, and the peak of the process was no lower.
SLACK_BYTES = 3 * 2**27
"""How much a process may hold beyond the most that was in use, before pages are returned."""

LOOK_AFTER_BYTES = 2**25
"""How many bytes of gradients are written before the process is looked at again."""

LARGE_BYTES = 2**25
"""Blocks from this size on are mapped outside the heap; the largest threshold of glibc."""

OWN_BYTES = 2**24
"""The same threshold for blocks that the core allocates."""

HUGE_PAGE_BYTES = 2**21

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of mallopt
_written = 0  # bytes of gradients, since the process was last looked at
_most_in_use = 0  # bytes of the process, right after pages were given back
_is_left_alone = False
_keeps_freed_memory = False


def leave_host_memory_alone() -> None:
    """Leave the C library's memory settings alone. To be called before anything is sharded.

    For programs that set ``mallopt`` themselves, or share a process with something that does.
    """
    global _is_left_alone, _keeps_freed_memory
    _is_left_alone, _keeps_freed_memory = True, False


def keep_freed_memory() -> None:
    """Tell glibc to map large blocks outside the heap, and to keep up to 2 GiB free at its end."""
    global _keeps_freed_memory  # noqa: PLW0603 (of the process)
    libc = _glibc()
    if libc is not None and not _is_left_alone:
        _keeps_freed_memory = True
        libc.mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)  # the parameter is an int


def map_apart(storage: torch.UntypedStorage, num_bytes: int) -> None:
    """Allocate an empty storage's bytes outside the heap, in huge pages."""
    libc = _glibc()
    assert libc is not None, "it keeps freed memory"
    libc.mallopt(_MMAP_THRESHOLD, OWN_BYTES)
    try:
        storage.resize_(num_bytes)
    finally:
        libc.mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
    # Only huge pages that lie in the block entirely.
    begin = -(-storage.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    stop = (storage.data_ptr() + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(stop - begin), mmap.MADV_HUGEPAGE)


def is_mapped_apart(storage: torch.UntypedStorage, num_bytes: int) -> bool:
    """Whether :func:`map_apart` is to allocate so many bytes of a storage.

    Not of a fake tensor's, which is on the meta device whatever the device of the tensor.
    """
    return _keeps_freed_memory and num_bytes >= OWN_BYTES and storage.device.type == "cpu"


def return_unused_memory(
    written: int | None = None, slack: int = SLACK_BYTES, *, all_of_it: bool = False
) -> None:
    """Return unused pages to the kernel, if the process holds too many.

    That is ``slack`` bytes more than the most that was in use right after such a return, so that
    pages that the next step needs are seldom returned.

    Args:
        written: Bytes that were just written, of gradients or to a file. The process is looked at
            after every ``LOOK_AFTER_BYTES`` of them; with ``None``, at once.
        slack: In bytes.
        all_of_it: Return them however few they are, after something rare.
    """
    global _written, _most_in_use  # noqa: PLW0603 (of the process, as what they tell)
    _written += LOOK_AFTER_BYTES if written is None else written
    if _written < LOOK_AFTER_BYTES:
        return
    _written = 0
    libc = _glibc()
    if libc is None or not _keeps_freed_memory:
        return
    if all_of_it or _resident_bytes() > _most_in_use + slack:
        libc.malloc_trim(0)
        _most_in_use = max(_most_in_use, _resident_bytes())


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
