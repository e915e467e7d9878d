"""Lines between processes of one host: messages that say when memory may be read, and was read.

Each two ranks share a socket of the kernel. A rank posts where its data for each of the others
lies. Once all have posted, each copies what is for it from there and tells the others; when all
have read, the exchange is over:

    sender                               receiver
    post: key, where a table lies  --->  read the table, then the places that it lists
    (nothing of it changes)
    everything may change          <---  acknowledge: key

Messages are received, and data is read, in a thread that sleeps unless a message comes, so ranks do
not wait for each other to wait. A rank that is the last to start posts to its own thread as well. A
key is a tag and how often it was used before, so what has one tag is matched in the order in which
it was started.

Note: lifetimes
Data stays as it is until the sender's ``wait()`` has returned, and that needs the acknowledgement.
A rank that gives up after the timeout hangs up all its lines before its data can change, and so
does one whose gather was interrupted. A read counts only if the acknowledgements could be sent
after it: then the lines were there all the time, and the data as it was posted. An interrupted
reduction needs nothing of the kind: what it reads is referred to here, and nobody else has it.

Note: order of memory
What was written before a message was sent is seen by whoever received it: on every architecture,
since the kernel's locks are between the two. No word is shared without one.

Note: ends
The kernel closes the sockets of a process that ends, however it ends, and tells the other side. A
child that was forked from it may have copies of them, so the process itself is watched as well.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import socket
import struct
import threading
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from lightning_fsdp.core.ranks.process_memory import PeerLost, Place

# Kind; key, or the rank that was waited for in vain; of a post, address and bytes of its table.
_MESSAGE = struct.Struct("<BQQQQ")
_POST, _ACKNOWLEDGE, _GIVE_UP = 0, 1, 2

# Of a rank at a time. Each has at most one post and one acknowledgement under way in a line, which
# holds some 200 messages.
_MAX_STARTED = 64


Places = dict[int, list[Place]]
"""By peer, in the order in which it posted them."""

Take = Callable[[Places], None]
"""Reads what peers have for this rank from the places where it lies."""

Key = tuple[int, int]
"""Tag, and number among the exchanges of this tag."""


@dataclass(eq=False)
class Exchange:
    """What one collective moves between this rank and all others.

    Attributes:
        outgoing: What each peer reads; nobody else may refer to it.
        sizes: By peer, of what it has for this rank, in bytes.
        take: Called in the thread of the lines.
        unread_by: The ranks that do not have all that is for them yet, this one included.
        posts: By rank that has posted, its table of places.
        tables: Of places of ``outgoing``; peers read them.
    """

    outgoing: Mapping[int, Sequence[Tensor]]
    sizes: Mapping[int, list[int]]
    take: Take
    unread_by: set[int]
    posts: Mapping[int, Place]
    tables: list[array[int]] = field(default_factory=list)


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
    """Those of one rank to all of its group.

    Args:
        rank: This one.
        sockets: Of SOCK_SEQPACKET, connected, by peer.
        processes: Descriptors of their processes, by peer.
        pids: Processes, by rank.
        opened: Closes sockets and descriptors; owned from now on.
        timeout_s: How long one exchange may be waited for.
    """

    def __init__(
        self,
        rank: int,
        sockets: Mapping[int, socket.socket],
        *,
        processes: Mapping[int, int],
        pids: Mapping[int, int],
        opened: contextlib.ExitStack,
        timeout_s: float,
    ) -> None:
        ends = [opened.enter_context(end) for end in socket.socketpair(type=socket.SOCK_SEQPACKET)]
        self._to, self._from = ({**sockets, rank: end} for end in ends)
        self._rank, self._timeout_s = rank, timeout_s
        self._pids, self._processes, self._opened = pids, processes, opened
        # Reentrant, both: the garbage collector may close lines wherever it runs.
        self._changed = threading.Condition(threading.RLock())
        self._reading = threading.Condition(threading.RLock())
        self._num_started: Counter[int] = Counter()  # by tag
        self._started: dict[Key, Exchange] = {}  # and not over
        self._posts: defaultdict[Key, dict[int, Place]] = defaultdict(dict)  # and not read yet
        self._lost: dict[int, str] = {}  # by rank, why its line is not there any more
        for line in (*self._to.values(), *self._from.values()):
            line.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="lines", daemon=True)
        self._thread.start()

    def start(
        self,
        tag: int,
        outgoing: Mapping[int, Sequence[Tensor]],
        sizes: Mapping[int, list[int]],
        take: Take,
    ) -> list[tuple[dist.Work, str]]:
        """Start an exchange; ranks start what has one tag in one order.

        Args:
            tag: Of the collective, the same on all ranks.
            outgoing: What each peer gets, each ``(n,)``; stays as it is until the exchange is over.
            sizes: See :class:`Exchange`.
            take: Likewise.

        Returns:
            What to wait for, each with the rank that it depends on.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._started) < _MAX_STARTED or self._lost, self._timeout_s
            )
            key = tag, self._num_started[tag]
            self._num_started[tag] += 1
            posts = self._posts[key]
            posts[self._rank] = Place(self._rank, self._pids[self._rank], 0, 0)
            all_have_posted = len(posts) == len(self._to)
            exchange = Exchange(outgoing, sizes, take, set(self._to), posts)
            self._started[key] = exchange
        for rank in self._to if all_have_posted else sizes:  # to its thread, or else to peers only
            places = [(data.data_ptr(), data.nbytes) for data in outgoing.get(rank, ())]
            table = array("Q", [number for place in places for number in place])
            exchange.tables.append(table)
            self._send(rank, _POST, *key, table.buffer_info()[0], len(table) * table.itemsize)
        return [(Awaited(self, exchange, peer), f"rank {peer}") for peer in sizes]

    def wait_for(self, exchange: Exchange, peer: int) -> None:
        """Wait for the end of an exchange; see :meth:`Awaited.wait`.

        Raises:
            RuntimeError: It did not come, and it was up to this peer.
        """

        def needed(rank: int) -> bool:  # it has something to do, or its data is to be read
            return rank != self._rank and not exchange.unread_by.isdisjoint((rank, self._rank))

        with self._changed:
            self._changed.wait_for(
                lambda: not exchange.unread_by or any(map(needed, self._lost)), self._timeout_s
            )
            if not exchange.unread_by:
                return
            # Who is lost; else who did not post; else who did not read.
            posts, unread_by = exchange.posts, exchange.unread_by
            if not any(map(needed, self._lost)):
                late = min(exchange.sizes, key=lambda p: (p in posts, p not in unread_by))
                self._lose(late, f"nothing came within {self._timeout_s:g} s")
            missed = next(filter(needed, self._lost))
            self._started.clear()  # or the next part would find another
        self.hang_up(f"this rank gave up when it waited for rank {missed}", missed)
        if peer == missed:
            what = "it to read what is here" if peer in posts else "its data"
            raise RuntimeError(
                f"line to rank {peer} (process {self._pids[peer]}): expected {what}, but "
                f"{self._lost[peer]}."
            )

    def hang_up(self, why: str, missed: int | None = None) -> None:
        """End all lines. When this returns nothing here is written any more by a read.

        Called by the garbage collector within a method here it returns before: the thread may wait
        for that method.

        Args:
            why: What messages say.
            missed: The peer that was waited for in vain; all ranks are to name the same.
        """
        if os.getpid() != self._pids[self._rank]:  # a forked child, which has copies of the lines
            return
        with self._changed:  # nobody takes these any more, and they keep gradients
            self._started.clear()
        for rank, line in self._to.items():
            if missed is not None:
                self._send(rank, _GIVE_UP, missed)
            self._lose(rank, why)
            _shut(line)
        if self._is_within():  # the thread would wait for this one
            return
        with self._reading:  # what is being read here has ended
            pass

    def close(self) -> None:
        """Hang up, and give back thread and descriptors."""
        self.hang_up("its process group was destroyed")
        if threading.current_thread() is not self._thread and not self._is_within():
            self._thread.join()

    def _is_within(self) -> bool:
        """Whether this thread holds a lock here: then the garbage collector came in between."""
        for lock in (self._changed, self._reading):
            with contextlib.suppress(RuntimeError):  # this thread does not hold it
                lock.notify_all()
                return True
        return False

    # -- in the thread ---------------------------------------------------------------------------

    def _serve(self) -> None:
        with self._opened:
            try:
                self._listen()
            except BaseException as error:  # noqa: BLE001 (whatever it is, who waits must hear of it)
                self.hang_up(f"the thread that reads has failed with {error!r}")

    def _listen(self) -> None:
        poll = selectors.PollSelector()
        for rank, line in self._from.items():
            poll.register(line, selectors.EVENT_READ, functools.partial(self._receive, rank))
        for peer, process in self._processes.items():  # when it ends, its line does
            end = functools.partial(_shut, self._from[peer])
            poll.register(process, selectors.EVENT_READ, end)
        while self._rank not in self._lost:
            for ready, _ in poll.select():
                if not ready.data():
                    poll.unregister(ready.fileobj)

    def _receive(self, rank: int) -> bool:
        """Take in one message; ``False`` where none will come any more."""
        message = b""  # the end, and so is an error
        with contextlib.suppress(OSError):
            message = self._from[rank].recv(_MESSAGE.size)
        if not message:
            self._lose(rank, "it has ended or given up")
            return False
        kind, tag, number, address, nbytes = _MESSAGE.unpack(message)
        key = tag, number
        with self._changed:
            if kind == _GIVE_UP:
                if tag != self._rank:
                    self._lose(tag, f"rank {rank} waited for it in vain")
                self._lose(rank, f"it waited for rank {tag} in vain")
            elif kind == _POST:
                self._posts[key][rank] = Place(rank, self._pids[rank], address, nbytes)
            else:
                self._note_read(key, rank)
        if kind == _POST and len(self._posts[key]) == len(self._to):
            self._take(key)
        return True

    def _take(self, key: Key) -> None:
        """Read what all have posted, and say so to all."""
        with self._reading:
            posts, exchange = self._posts.pop(key), self._started.get(key)
            if exchange is None:  # it was hung up, and the memory to write into may be gone
                return
            try:
                sizes = exchange.sizes.items()
                exchange.take({peer: _places(posts[peer], expected) for peer, expected in sizes})
            except PeerLost as lost:
                self._lose(lost.peer, lost.why)
                return
            # What was read counts if the lines are still there.
            if all(self._send(peer, _ACKNOWLEDGE, *key) for peer in exchange.sizes):
                self._note_read(key, self._rank)

    def _note_read(self, key: Key, rank: int) -> None:
        with self._changed:
            if key not in self._started:  # it was hung up
                return
            unread_by = self._started[key].unread_by
            unread_by.discard(rank)
            if not unread_by:
                del self._started[key]
                self._changed.notify_all()

    # -- in either ---------------------------------------------------------------------------------

    def _send(self, rank: int, kind: int, *words: int) -> bool:
        try:
            self._to[rank].send(_MESSAGE.pack(kind, *words, *(0,) * (4 - len(words))))
        except OSError as error:
            # If the line is gone the thread hears of it, and of what the peer has said before.
            if not isinstance(error, ConnectionError):
                self._lose(rank, f"it has ended or given up ({error})")
            return False
        return True

    def _lose(self, rank: int, why: str) -> None:
        with self._changed:
            self._lost.setdefault(rank, why)
            self._changed.notify_all()


def _shut(line: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed, or the peer is gone
        line.shutdown(socket.SHUT_RDWR)


def _places(table: Place, sizes: list[int]) -> list[Place]:
    """What a peer has posted.

    Raises:
        PeerLost: It has other sizes, or cannot be read.
    """
    numbers = array("Q", bytes(16 * len(sizes)))
    fits = table.nbytes == len(numbers) * numbers.itemsize
    if fits:
        table.read(numbers.buffer_info()[0], table.nbytes)
    if not fits or numbers[1::2].tolist() != sizes:
        raise PeerLost(table.peer, f"it posted other sizes than {sizes} bytes")
    places = zip(numbers[::2], numbers[1::2], strict=True)
    return [Place(table.peer, table.pid, *place) for place in places]
