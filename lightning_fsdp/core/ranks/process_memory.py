"""Memory of another process of this host, read in one copy, where the kernel permits it.

``process_vm_readv`` asks for the same permission as a debugger. Yama (``ptrace_scope``) and the
seccomp filters of containers may refuse it to processes of one user. Nothing here widens who may
read this process.
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
        self.peer, self.why = peer, why


class Process(NamedTuple):
    """What a rank tells the others of its process.

    Attributes:
        rank: The rank.
        pid: The process.
        host: Equal on ranks of one host.
        inbox: Descriptor there of the pipe that messages for it are written to.
        seal_address: Where its seal lies.
        seal: Random bytes, which lie there as long as what it posts may be read.
    """

    rank: int
    pid: int
    host: tuple[str, ...]
    inbox: int
    seal_address: int
    seal: bytes

    def check(self) -> None:
        """Return if its seal is whole; what was read before was then as it was posted.

        Raises:
            PeerLost: It is not, or the kernel does not permit to look.
        """
        found = ctypes.create_string_buffer(len(self.seal))
        Place(self, self.seal_address, len(found)).read(ctypes.addressof(found), len(found))
        if found.raw != self.seal:
            raise PeerLost(self.rank, "it has given up, or is another process")


class Place(NamedTuple):
    """Memory of a process.

    Attributes:
        owner: Whose.
        address: First byte.
        nbytes: How many.
    """

    owner: Process
    address: int
    nbytes: int

    def read(self, into: int, nbytes: int, start: int = 0) -> None:
        """Copy ``nbytes``, from ``start`` on, to an address of this process.

        Other threads run meanwhile.

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


def host_of_this_process() -> tuple[str, ...]:
    """Equal for two processes that may read each other: boot, and namespaces of pids and network.

    Containers of one machine count as hosts of their own, and so do network namespaces, which stand
    for hosts where a slow network is tried out.

    Raises:
        OSError: There is no Linux ``/proc``.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, *(str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "net"))


@functools.cache
def _process_vm_readv() -> Callable[..., int]:
    """Of the C library.

    Raises:
        AttributeError: It has none.
    """
    # ``CDLL`` lets go of the GIL while it calls, and keeps errno per thread.
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    function.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)
    function.restype = ctypes.c_ssize_t
    return function
