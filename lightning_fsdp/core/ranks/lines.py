"""Lines between processes of one host: messages that say when memory may be read, and was read.

Each two ranks share a socket of the kernel. A rank posts where its data lies; the other copies it
from there and acknowledges. Both go on in a thread that sleeps unless a message comes, so ranks do
not wait for each other to wait:

    sender                               receiver
    post: tag, where a table lies  --->  read the table, then the places that it lists
    (nothing of it changes)
    everything may change          <---  acknowledge: tag

Note: lifetimes
Data stays as it is until the sender's ``wait()`` has returned, and that needs the acknowledgement.
A rank that gives up after the timeout hangs up all its lines before its data can change, and so
does one whose gather was interrupted. A read counts only if the acknowledgement could be sent after
it: then the line was there all the time, and the data as it was posted. An interrupted reduction
needs nothing of the kind: what it reads is referred to here, and nobody else has it.

Note: order of memory
What was written before a message was sent is seen by whoever received it: on every architecture,
since the kernel's locks are between the two. No word is shared without one.

Note: ends
The kernel closes the sockets of a process that ends, however it ends, and tells the other side. A
child that was forked from it may have copies of them, so the process itself is watched as well.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from lightning_fsdp.core.ranks.process_memory import PeerLost, Place

# Kind; tag, or the rank that was waited for in vain; of a post, address and length of its table.
_MESSAGE = struct.Struct("<BQQQ")
_POST, _ACKNOWLEDGE, _GIVE_UP = 0, 1, 2
_PAUSE_MS = 1  # while a line is full


Places = dict[int, list[Place]]
"""By peer, in the order in which it posted them."""

Key = tuple[int, int]
"""Peer and tag. What has the same key is matched in the order in which it was started."""


@dataclass(eq=False)
class Exchange:
    """What one collective moves between this rank and all others.

    Attributes:
        tag: Of the collective, the same on all ranks.
        outgoing: What each peer gets, each ``(n,)``; stays as it is until the exchange is over.
        sizes: By peer, of what it has for this rank, in bytes.
        take: Reads it from the places where it lies, by peer; called in the thread of the lines.
        tables: Of the places of ``outgoing``, by peer.
        posts: Address of each peer's table and its length.
        is_taken: What the peers have posted is here.
        acknowledged: The peers that have taken theirs.
        deadline: When it has been waited for too long; set when it is first waited for.
        missed: The peer that did not do its part, where one did not.
        why: What it did not do.
    """

    tag: int
    outgoing: Mapping[int, Sequence[Tensor]]
    sizes: Mapping[int, list[int]]
    take: Callable[[Places], None]
    tables: dict[int, array[int]] = field(init=False)
    posts: dict[int, tuple[int, int]] = field(default_factory=dict)
    is_taken: bool = False
    acknowledged: set[int] = field(default_factory=set)
    deadline: float | None = None
    missed: int | None = None
    why: str = ""

    def __post_init__(self) -> None:
        self.tables = {
            peer: array("Q", [number for t in tensors for number in (t.data_ptr(), t.nbytes)])
            for peer, tensors in self.outgoing.items()
        }

    @property
    def is_over(self) -> bool:
        """Whether no rank needs anything of another any more."""
        return self.is_taken and len(self.acknowledged) == len(self.outgoing)

    def needs(self, peer: int) -> bool:
        """Whether a peer has something to do for it."""
        return not (self.is_taken and peer in self.acknowledged)


class Awaited(dist.Work):
    """One peer's part of an exchange."""

    def __init__(self, lines: Lines, exchange: Exchange, peer: int) -> None:
        super().__init__()
        self._lines, self._exchange, self._peer = lines, exchange, peer

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when the exchange is over, or failed for another peer, whose part says so.

        Raises:
            RuntimeError: The peer has ended, gave up, or did not take part within the timeout.
        """
        self._lines.wait_for(self._exchange, self._peer)
        return True


class Lines:
    """Those of one rank to all others of its group.

    Args:
        sockets: Of SOCK_SEQPACKET, connected, by peer; owned from now on.
        pids: Processes, by peer.
        processes: Descriptors of these processes, by peer; owned from now on.
        timeout_s: How long one exchange may be waited for.
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        pids: Mapping[int, int],
        processes: Mapping[int, int],
        timeout_s: float,
    ) -> None:
        self._sockets, self._pids, self._processes = sockets, pids, processes
        self._timeout_s = timeout_s
        # Reentrant, both: the garbage collector may close lines wherever it runs.
        self._changed = threading.Condition(threading.RLock())
        self._reading = threading.RLock()
        self._posts: defaultdict[Key, deque[tuple[int, int]]] = defaultdict(deque)
        self._started: defaultdict[Key, deque[Exchange]] = defaultdict(deque)
        self._unacknowledged: defaultdict[Key, deque[Exchange]] = defaultdict(deque)
        self._ready: deque[Exchange] = deque()  # all peers have posted
        self._lost: dict[int, str] = {}  # by peer, why its line is not there any more
        self._has_hung_up = self._ends = False
        self._owner = os.getpid()
        self._wake = os.eventfd(0)
        for line in sockets.values():
            line.setblocking(False)
        self._poll = select.poll()
        self._thread = threading.Thread(target=self._serve, name="lines", daemon=True)
        self._thread.start()

    def start(self, exchange: Exchange) -> list[tuple[dist.Work, str]]:
        """Start an exchange; ranks start what has one tag in one order.

        Returns:
            What to wait for, each with the rank that it depends on.
        """
        with self._changed:
            for peer in () if self._has_hung_up else self._sockets:
                self._started[peer, exchange.tag].append(exchange)
                self._unacknowledged[peer, exchange.tag].append(exchange)
                self._match((peer, exchange.tag))
        for peer, table in exchange.tables.items():
            self._send(peer, _POST, exchange.tag, *table.buffer_info(), waits=True)
        with self._changed:
            if self._ready and not self._ends:
                os.eventfd_write(self._wake, 1)
        return [(Awaited(self, exchange, peer), f"rank {peer}") for peer in self._sockets]

    def wait_for(self, exchange: Exchange, peer: int) -> None:
        """Wait for the end of an exchange; see :meth:`Awaited.wait`.

        Raises:
            RuntimeError: It did not come, and it was up to this peer.
        """
        if exchange.missed is None:
            if exchange.deadline is None:
                exchange.deadline = time.monotonic() + self._timeout_s
            with self._changed:
                self._changed.wait_for(
                    lambda: exchange.is_over or any(map(exchange.needs, self._lost)),
                    exchange.deadline - time.monotonic(),
                )
                if exchange.is_over:
                    return
                exchange.missed = self._who_missed(exchange)
            self._give_up(exchange, exchange.missed)
        if peer == exchange.missed:
            raise RuntimeError(
                f"line to rank {peer} (process {self._pids[peer]}): expected {exchange.why}."
            )

    def _give_up(self, exchange: Exchange, peer: int) -> None:
        what = "it to read what is here" if peer in exchange.posts else "its data"
        why = self._lost.get(peer, f"nothing came within {self._timeout_s:g} s")
        exchange.why = f"{what}, but {why}"
        for other in self._sockets:  # so that all name the same rank
            self._send(other, _GIVE_UP, peer)
        self.hang_up(f"this rank gave up when it waited for rank {peer}")

    def _who_missed(self, exchange: Exchange) -> int:
        """Whose line is gone; else who did not post; else who did not read."""
        lost = [peer for peer in self._lost if exchange.needs(peer)]
        absent = [peer for peer in self._sockets if peer not in exchange.posts]
        slow = [peer for peer in self._sockets if peer not in exchange.acknowledged]
        return next(iter((*lost, *absent, *slow, *self._sockets)))

    def hang_up(self, why: str) -> None:
        """End all lines. When this returns nothing here is written any more by a read."""
        if os.getpid() != self._owner:  # a forked child, which has copies of the lines
            return
        self._has_hung_up = True
        for peer, line in self._sockets.items():
            self._lose(peer, why)
            with contextlib.suppress(OSError):  # closed, or the peer is gone
                line.shutdown(socket.SHUT_RDWR)
        with self._reading:  # what is being read here has ended
            pass
        with self._changed:  # nobody takes these any more, and they keep gradients
            self._started.clear()
            self._unacknowledged.clear()

    def close(self) -> None:
        """Hang up, and give back thread and descriptors."""
        if os.getpid() != self._owner:  # a forked child has no such thread
            return
        self.hang_up("its process group was destroyed")
        with self._changed:
            if not self._ends:
                self._ends = True
                os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- in the thread ---------------------------------------------------------------------------

    def _serve(self) -> None:
        lines = [line.fileno() for line in self._sockets.values()]
        for descriptor in (*lines, *self._processes.values(), self._wake):
            self._poll.register(descriptor, select.POLLIN)
        try:
            while not self._ends:
                self._listen()
                while self._ready:
                    self._take(self._ready.popleft())
        except BaseException as error:  # noqa: BLE001 (whatever it is, who waits must hear of it)
            self.hang_up(f"the thread that reads has failed with {error!r}")
        finally:
            with self._changed:
                self._ends = True
                for line in self._sockets.values():
                    line.close()
                for descriptor in (*self._processes.values(), self._wake):
                    os.close(descriptor)

    def _listen(self, pause_ms: int | None = None) -> None:
        """Sleep until something comes, or a pause is over, and take it in."""
        came = {descriptor for descriptor, _ in self._poll.poll(pause_ms)}
        if self._wake in came:
            os.eventfd_read(self._wake)
        for peer, line in self._sockets.items():
            if line.fileno() in came:
                self._receive(peer)
            elif self._processes[peer] in came:  # all that it sent was received
                self._lose(peer, "it has ended")
            if peer in self._lost and came & {line.fileno(), self._processes[peer]}:
                self._poll.unregister(line.fileno())
                self._poll.unregister(self._processes[peer])

    def _receive(self, peer: int) -> None:
        message = b""  # the end, and so is an error
        with contextlib.suppress(OSError):
            message = self._sockets[peer].recv(_MESSAGE.size)
        if not message:
            self._lose(peer, "it has ended or given up")
            return
        kind, tag, address, length = _MESSAGE.unpack(message)
        with self._changed:
            if self._has_hung_up:
                return
            if kind == _GIVE_UP:
                if tag in self._sockets:
                    self._lose(tag, f"rank {peer} waited for it in vain")
                self._lose(peer, f"it waited for rank {tag} in vain")
                return
            if kind == _POST:
                self._posts[peer, tag].append((address, length))
                self._match((peer, tag))
                return
            exchange = self._unacknowledged[peer, tag].popleft()
            exchange.acknowledged.add(peer)
            if exchange.is_over:
                self._changed.notify_all()

    def _match(self, key: Key) -> None:
        posts, started = self._posts[key], self._started[key]
        if posts and started:
            exchange = started.popleft()
            exchange.posts[key[0]] = posts.popleft()
            if len(exchange.posts) == len(self._sockets):
                self._ready.append(exchange)

    def _take(self, exchange: Exchange) -> None:
        with self._reading:
            if self._has_hung_up:  # the memory to write into may be gone
                return
            try:
                exchange.take({peer: self._places(exchange, peer) for peer in exchange.posts})
            except PeerLost as lost:
                self._lose(lost.peer, lost.why)
                return
            # What was read counts if the lines are still there.
            if not all(
                self._send(peer, _ACKNOWLEDGE, exchange.tag, waits=True) for peer in exchange.posts
            ):
                return
        with self._changed:
            exchange.is_taken = True
            if exchange.is_over:
                self._changed.notify_all()

    def _places(self, exchange: Exchange, peer: int) -> list[Place]:
        (address, length), sizes = exchange.posts[peer], exchange.sizes[peer]
        table, pid = array("Q", bytes(16 * len(sizes))), self._pids[peer]
        if length == len(table):
            Place(peer, pid, address, 8 * length).read(table.buffer_info()[0], 8 * length)
        if length != len(table) or table[1::2].tolist() != sizes:
            raise PeerLost(peer, f"it posted other sizes than {sizes} bytes")
        return [Place(peer, pid, *each) for each in zip(table[::2], table[1::2], strict=True)]

    # -- in either ---------------------------------------------------------------------------------

    def _send(self, peer: int, *message: int, waits: bool = False) -> bool:
        packed = _MESSAGE.pack(*message, *(0,) * (4 - len(message)))
        deadline = time.monotonic() + waits * self._timeout_s
        while True:
            try:
                self._sockets[peer].send(packed)
            except ConnectionError:  # the thread hears of it, and of what the peer has said before
                return False
            except OSError as error:
                if not isinstance(error, BlockingIOError) or time.monotonic() >= deadline:
                    self._lose(peer, f"it has ended or given up ({error})")
                    return False
            else:
                return True
            # The line is full. The thread goes on to receive, or two could wait for each other.
            if threading.current_thread() is self._thread:
                self._listen(_PAUSE_MS)
            else:
                time.sleep(_PAUSE_MS / 1e3)

    def _lose(self, peer: int, why: str) -> None:
        with self._changed:
            self._lost.setdefault(peer, why)
            self._changed.notify_all()
