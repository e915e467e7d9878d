"""Lines between processes of one host: messages that say when memory may be read, and was read.

Each rank has a pipe, to which all ranks write and which only it reads. A rank posts where its data
for each of the others is. Once all have posted, each copies what is for it from there and tells
the others; when all have read, the exchange is over:

    sender                               receiver
    post: key, where a table lies  --->  read the table, then the memory that it lists
    (nothing of it changes)
    everything may change          <---  acknowledge: key

Messages are received, and data is read, in a thread that sleeps until a message comes, so a rank's
data can be read before that rank waits. A key is a tag and the number of earlier uses of that tag,
so exchanges with the same tag are matched in the order in which they were started.

Note: lifetimes
Data stays as it is until the sender's ``wait()`` has returned, and that needs acknowledgements. A
rank that gives up after the timeout breaks its seal, random bytes that all ranks know, before its
data can change; so does one whose gather was interrupted. A read counts only if the seals are
whole after it: then the data was as it was posted. An interrupted reduction needs nothing of the
kind: its data is referred to here, and by nobody else.

Note: order of memory
Whoever received a message sees what was written before it was sent, and whoever finds a seal whole
has seen nothing that was written after it was broken. This holds on every architecture, since the
kernel takes locks between the two; no memory is shared without one.

Note: ends
The kernel tells when a process has ended, whatever the reason. What that process wrote to the pipe
before is received first.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import secrets
import selectors
import struct
import threading
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_fsdp.core import torch_internals
from lightning_fsdp.core.engine.communicator import Works
from lightning_fsdp.core.ranks.pairs import Parts
from lightning_fsdp.core.ranks.process_memory import PeerLost, Process, Stretch, this_host

# Kind; sender; key (two words), or the rank that was waited for in vain; table of a post (two).
_MESSAGE = struct.Struct("<BBQQQQ")
_POST, _ACKNOWLEDGE, _GIVE_UP = 0, 1, 2

# Exchanges that a rank has under way at a time. Each has at most one post and one acknowledgement
# under way to each other rank, whose pipe holds some 1,900 messages: enough for 8 ranks, so that no
# write has to wait.
_MAX_STARTED, _PIPE_BYTES = 64, 2**16


Stretches = dict[int, list[Stretch]]
"""By peer, where its data lies, in the order in which it posted that."""

Take = Callable[[Stretches], None]
"""Reads what peers have for this rank from where it lies."""

Key = tuple[int, int]
"""Tag, and number among the exchanges of this tag."""


class Refused(Exception):  # noqa: N818 (it is none where ranks may choose)
    """Ranks cannot read each other's memory; raised with the same reason on all of them."""


@dataclass(eq=False)
class Exchange:
    """What one collective moves between this rank and all others.

    Attributes:
        sizes: By peer, the sizes of what it has for this rank, in bytes.
        take: Reads it; called in the thread of the lines.
        posts: By rank that has posted, the table of its data.
        unread_by: The ranks, this one included, that have not read all that is for them.
        kept: What peers read, and the tables of it, kept alive; nobody else may refer to these.
    """

    sizes: Mapping[int, list[int]]
    take: Take
    posts: Mapping[int, Stretch]
    unread_by: set[int]
    kept: list[object]


class Lines:
    """The lines of one rank to all of its group, itself included. Collective.

    Each rank tells the others about its process, tries to read theirs, and tells them whether it
    could. If one of them could not, none does.

    Args:
        group: The ranks; its timeout is that of an exchange.

    Raises:
        Refused: They cannot read each other's memory; on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank = dist.get_rank(group)
        self._timeout_s = torch_internals.group_timeout(group).total_seconds()
        self._seal = ctypes.create_string_buffer(secrets.token_bytes(16), 16)
        with contextlib.ExitStack() as opened:
            self._processes = _on_all(group, lambda: self._introduce(opened))
            if len({process.host for process in self._processes}) > 1:
                raise Refused("they are on several hosts, or in several namespaces")
            self._pipes, self._ends = list[FileIO](), list[FileIO]()
            _on_all(group, lambda: self._reach(opened))
            self._opened = opened.pop_all()
        # Locked by C code: in a lock written in Python, an interrupt could come after it is locked
        # and before ``with`` is sure to unlock it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._reading = threading.Lock()
        self._num_started: Counter[int] = Counter()  # by tag
        self._started: dict[Key, Exchange] = {}  # those not over yet
        self._posts: defaultdict[Key, dict[int, Stretch]] = defaultdict(dict)  # those not read yet
        self._lost: dict[int, str] = {}  # by rank, why it takes part no more, in order
        self._why_ended: str | None = None
        self._thread = threading.Thread(target=self._serve, name="lines", daemon=True)
        self._thread.start()

    def start(self, tag: int, outgoing: Parts, sizes: Mapping[int, list[int]], take: Take) -> Works:
        """Start an exchange. Ranks start those of one tag in the same order.

        Args:
            tag: Tag of the collective, the same on all ranks.
            outgoing: What each peer gets, each ``(n,)``; must not change until the exchange is
                over.
            sizes: See :class:`Exchange`.
            take: See :class:`Exchange`.

        Returns:
            For each peer, a function that waits for the end of the exchange; it raises if the
            exchange failed because of that peer.
        """
        ranks = set(range(len(self._processes)))
        with self._lock:
            self._changed.wait_for(
                lambda: len(self._started) < _MAX_STARTED or self._lost, self._timeout_s
            )
            key = tag, self._num_started[tag]
            self._num_started[tag] += 1
            exchange = Exchange(sizes, take, self._posts[key], ranks.copy(), [outgoing])
            self._started[key] = exchange
        for rank in ranks:
            parts = outgoing.get(rank, ())
            table = array("Q", [n for part in parts for n in (part.data_ptr(), part.nbytes)])
            exchange.kept.append(table)
            self._send(rank, _POST, *key, table.buffer_info()[0], len(table) * table.itemsize)
        return [(functools.partial(self._wait, exchange, peer), f"rank {peer}") for peer in sizes]

    def hang_up(self, why: str, missed: int | None = None) -> None:
        """End all lines. When this returns, no read writes to memory of this process any more.

        Args:
            why: The reason, for messages.
            missed: The peer that was waited for in vain, so that all ranks name the same one.
        """
        self._end(why, self._rank if missed is None else missed)
        with self._reading if os.getpid() == self._pid else contextlib.nullcontext():
            pass  # a read that was under way has ended

    def close(self) -> None:
        """Hang up, and end the thread, which closes the descriptors."""
        self._end("its process group was destroyed", self._rank)
        if threading.current_thread() is not self._thread:
            # With a timeout: the garbage collector may call this while a lock is held that the
            # thread waits for.
            self._thread.join(timeout=1.0)

    def _end(self, why: str, missed: int) -> None:
        """Break the seal, so that no peer counts what it reads from now on, and tell all ranks."""
        if os.getpid() != self._pid:  # a forked child, which has copies of all this
            return
        self._why_ended = self._why_ended or why
        ctypes.memset(self._seal, 0, len(self._seal))
        for step in range(1, len(self._processes) + 1):  # its own thread last, which then ends
            self._send(self._rank - step, _GIVE_UP, missed, 0, 0, 0)

    def _wait(self, exchange: Exchange, peer: int) -> None:
        """Return when an exchange is over, or failed because of a peer other than this one.

        Raises:
            RuntimeError: The peer has ended, gave up, or did not take part within the timeout.
        """

        def needed(rank: int) -> bool:  # it has yet to read, or this rank has
            return rank != self._rank and not unread_by.isdisjoint((rank, self._rank))

        def ended() -> bool:
            return not unread_by or self._why_ended is not None or any(map(needed, self._lost))

        posts, unread_by = exchange.posts, exchange.unread_by
        with self._lock:
            self._changed.wait_for(ended, self._timeout_s)
            if not unread_by:
                return
            # Name a rank that is lost, else one that did not post, else one that did not read.
            if not any(map(needed, self._lost)):
                late = min(sorted(exchange.sizes), key=lambda p: (p in posts, p not in unread_by))
                self._lose(late, f"nothing came within {self._timeout_s:g} s")
            missed = next(filter(needed, self._lost))
            given_up, self._started = self._started, {}  # so that no more of them end meanwhile
        self.hang_up(f"this rank gave up when it waited for rank {missed}", missed)
        given_up.clear()  # frees their data, which peers may read until the seal is broken
        if peer == missed:
            what = "it to read what is here" if peer in posts else "its data"
            raise RuntimeError(
                f"line to rank {peer} (process {self._processes[peer].pid}): expected {what}, but "
                f"{self._lost[peer]}."
            )

    def _introduce(self, opened: contextlib.ExitStack) -> Process:
        """Open this rank's pipe, and return what the others have to know of this process.

        Raises:
            OSError: Pipes hold too little.
        """
        pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for descriptor in pipe:
            opened.callback(os.close, descriptor)
        from fcntl import F_GETPIPE_SZ, fcntl  # on Linux alone, where os.pipe2 is

        if fcntl(pipe[0], F_GETPIPE_SZ) < _PIPE_BYTES:
            raise OSError("pipes are short, as this user has more than pipe-user-pages-soft")
        seal = ctypes.addressof(self._seal), self._seal.raw
        # If /proc belongs to another pid namespace, this number is another process there, which has
        # no such seal.
        self._pid = int(Path("/proc/self").readlink().name)
        return Process(self._rank, self._pid, this_host(), pipe[0], *seal)

    def _reach(self, opened: contextlib.ExitStack) -> None:
        """Try to read every process, and open its pipe and a descriptor that tells its end.

        Raises:
            OSError: The kernel does not permit it.
        """
        for process in self._processes:
            process.check()
            # Opened for reading as well, so that a write after the peer has ended does not end this
            # process (SIGPIPE).
            pipe = os.open(f"/proc/{process.pid}/fd/{process.inbox}", os.O_RDWR | os.O_NONBLOCK)
            self._pipes.append(opened.enter_context(FileIO(pipe, "w")))
            self._ends.append(opened.enter_context(FileIO(os.pidfd_open(process.pid))))

    # -- in the thread ---------------------------------------------------------------------------

    def _serve(self) -> None:
        """Handle messages until this rank's lines end, and notice processes that have ended."""
        inbox, poll = self._processes[self._rank].inbox, selectors.PollSelector()
        for rank, descriptor in (None, inbox), *enumerate(self._ends):
            poll.register(descriptor, selectors.EVENT_READ, rank)
        try:
            while self._rank not in self._lost:
                ended = [key for key, _ in poll.select() if key.data is not None]
                with contextlib.suppress(BlockingIOError):  # the pipe is empty
                    while True:
                        self._receive(*_MESSAGE.unpack(os.read(inbox, _MESSAGE.size)))
                for key in ended:
                    poll.unregister(key.fileobj)
                    self._lose(key.data, "it has ended")
        except BaseException as error:  # noqa: BLE001 (whatever it is, who waits must hear of it)
            self._end(f"the thread that reads has failed with {error!r}", self._rank)
        with self._lock, self._opened:  # locked: a write could hit a new file of the same number
            self._started.clear()  # nobody takes these any more, and they keep gradients alive
            self._lose(self._rank, "")  # wakes whoever waits; the reason is known

    def _receive(self, kind: int, rank: int, word: int, number: int, *table: int) -> None:
        """Handle one message."""
        key, missed = (word, number), word  # the kind tells which of these was sent
        with self._lock:
            if kind == _POST:
                self._posts[key][rank] = Stretch(self._processes[rank], *table)
            elif kind == _ACKNOWLEDGE and key in self._started:  # else these lines have ended
                unread_by = self._started[key].unread_by
                unread_by.discard(rank)
                if not unread_by:
                    del self._started[key]
                    self._changed.notify_all()
            elif kind == _GIVE_UP:
                vain = f"waited for rank {missed} in vain" if missed != rank else "has given up"
                for lost in (missed, rank):
                    if lost != self._rank or rank == self._rank:
                        self._lose(lost, f"rank {rank} {vain}")
        if kind == _POST and len(self._posts[key]) == len(self._processes):
            self._take(key)

    def _take(self, key: Key) -> None:
        """Read what all ranks have posted, and acknowledge it to all."""
        with self._reading:
            posts, exchange = self._posts.pop(key), self._started.get(key)
            # After the lines have ended, the memory to write to may be freed.
            if exchange is None or self._why_ended is not None:
                return
            try:
                exchange.take({p: _listed_in(posts[p], each) for p, each in exchange.sizes.items()})
                for peer in exchange.sizes:
                    self._processes[peer].check()
                for rank in range(len(self._processes)):
                    self._send(rank, _ACKNOWLEDGE, *key, 0, 0)
            except PeerLost as lost:
                # A peer that has ended or given up is heard of in another way, which also tells
                # the rank that it missed, so that all name the same one.
                with contextlib.suppress(PeerLost):
                    self._processes[lost.peer].check()
                    self._lose(lost.peer, str(lost))

    # -- in either ---------------------------------------------------------------------------------

    def _send(self, rank: int, kind: int, *words: int) -> None:
        # If the rank has ended, messages stay in its pipe.
        with self._lock, contextlib.suppress(ValueError):  # raised if these lines are closed
            os.write(self._pipes[rank].fileno(), _MESSAGE.pack(kind, self._rank, *words))

    def _lose(self, rank: int, why: str) -> None:
        with self._lock:
            self._lost.setdefault(rank, self._why_ended or why)
            self._changed.notify_all()


def _on_all(group: dist.ProcessGroup, step: Callable[[], Any]) -> list[Any]:
    """Run a step on all ranks, and return its results by rank. Collective.

    Raises:
        Refused: It has failed on one of them.
    """
    every: list[Any] = [None] * dist.get_world_size(group)
    try:
        mine = step()
    except (OSError, AttributeError) as error:  # AttributeError: a name that only Linux has
        mine = f"rank {dist.get_rank(group)}: {error}"
    dist.all_gather_object(every, mine, group=group)
    if refusals := [each for each in every if isinstance(each, str)]:
        raise Refused(refusals[0])
    return every


def _listed_in(table: Stretch, sizes: list[int]) -> list[Stretch]:
    """Read the table of a peer's data.

    Raises:
        PeerLost: The sizes in it differ from ``sizes``, in bytes, or it cannot be read.
    """
    numbers = array("Q", bytes(16 * len(sizes)))
    if table.nbytes == len(numbers) * numbers.itemsize:
        table.read(numbers.buffer_info()[0], table.nbytes)
    if numbers[1::2].tolist() != sizes:
        raise PeerLost(table.owner.rank, f"it posted other sizes than {sizes} bytes")
    return [Stretch(table.owner, *each) for each in zip(numbers[::2], numbers[1::2], strict=True)]
