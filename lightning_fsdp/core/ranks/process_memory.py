"""Reads the memory of another process of this host, in one copy, where the kernel permits it.

``process_vm_readv`` needs the same permission as a debugger. Yama (``ptrace_scope``) and the
seccomp filters of containers may refuse it, even between processes of one user. Nothing here widens
who may read this process.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_Range = ctypes.c_size_t * 2  # address and length: the kernel's struct iovec


class PeerLost(OSError):  # noqa: N818 (the lines catch it)
    """A peer cannot be read any more."""

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(why)
        self.peer = peer


class Process(NamedTuple):
    """What a rank tells the others of its process.

    Attributes:
        rank: Its rank.
        pid: Its process id.
        host: Equal on ranks of one host; see :func:`this_host`.
        inbox: Its file descriptor of the pipe that messages for it are written to.
        seal_address: Address of its seal.
        seal: Random bytes, which stay at that address as long as what it has posted may be read.
    """

    rank: int
    pid: int
    host: tuple[str, ...]
    inbox: int
    seal_address: int
    seal: bytes

    def check(self) -> None:
        """Return if its seal is whole; then what was read before was as it was posted.

        Raises:
            PeerLost: The seal is broken, or cannot be read.
        """
        found = ctypes.create_string_buffer(len(self.seal))
        Stretch(self, self.seal_address, len(found)).read(ctypes.addressof(found), len(found))
        if found.raw != self.seal:
            raise PeerLost(self.rank, "it has given up, or is another process")


class Stretch(NamedTuple):
    """A stretch of a process's memory.

    Attributes:
        owner: The process.
        address: Address of the first byte.
        nbytes: Number of bytes.
    """

    owner: Process
    address: int
    nbytes: int

    def read(self, into: int, nbytes: int, start: int = 0) -> None:
        """Copy ``nbytes``, from byte ``start`` on, to the address ``into`` of this process.

        Other threads run meanwhile, as the GIL is released.

        Raises:
            PeerLost: The peer has ended, has no such memory, or the kernel refuses.
        """
        pid, address = self.owner.pid, self.address + start
        while nbytes:
            read = _process_vm_readv()(pid, _Range(into, nbytes), 1, _Range(address, nbytes), 1, 0)
            if read <= 0:
                code = ctypes.get_errno() or errno.EFAULT
                what = f"[Errno {code}] process_vm_readv of process {pid}"
                raise PeerLost(self.owner.rank, f"{what}: {os.strerror(code)}")
            into, address, nbytes = into + read, address + read, nbytes - read


def this_host() -> tuple[str, ...]:
    """What is equal for two processes that may read each other: boot id, pid and network namespace.

    So containers of one machine count as different hosts, and so do network namespaces, by which a
    slow network is tried out on one machine.

    Raises:
        OSError: There is no Linux ``/proc``.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, *(str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "net"))


@functools.cache
def _process_vm_readv() -> Callable[..., int]:
    """The C library's function.

    Raises:
        AttributeError: It has no such function.
    """
    # ``CDLL`` releases the GIL during calls, and keeps errno per thread.
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    function.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)
    function.restype = ctypes.c_ssize_t
    return function
