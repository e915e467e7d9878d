"""Whether all ranks of a group can read each other's memory; if so, the lines between them.

Each rank tells the others of its process, tries to read theirs, and tells them whether it could.
What one of them cannot do, none does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_fsdp.core import torch_internals
from lightning_fsdp.core.ranks.lines import Lines
from lightning_fsdp.core.ranks.process_memory import Place, host_of_this_process

_NUM_PROBED_BYTES = 16


@dataclass(frozen=True)
class _Card:
    """What a rank tells the others of its process.

    Attributes:
        host: Equal on ranks of one host.
        pid: The process.
        line: Address of the socket that it listens on.
        memory: Address of bytes that it lets the others read.
        content: These bytes.
    """

    host: tuple[str, str, str]
    pid: int
    line: bytes
    memory: int
    content: bytes


def lines_to_all(group: dist.ProcessGroup) -> Lines | str:
    """Lines to all other ranks, or why there are none, the same on all ranks. Collective."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    timeout_s = torch_internals.group_timeout(group).total_seconds()
    probed = ctypes.create_string_buffer(secrets.token_bytes(_NUM_PROBED_BYTES), _NUM_PROBED_BYTES)
    sockets: dict[int, socket.socket] = {}
    processes: dict[int, int] = {}
    with contextlib.ExitStack() as opened:

        def introduce() -> _Card:
            sockets[rank] = opened.enter_context(_new_socket())  # that it listens on
            sockets[rank].bind("")  # the kernel gives it an address that is in no file system
            sockets[rank].listen(world_size)
            line, memory = sockets[rank].getsockname(), ctypes.addressof(probed)
            return _Card(host_of_this_process(), os.getpid(), line, memory, probed.raw)

        def reach(cards: list[_Card]) -> None:
            for peer, card in enumerate(cards):
                if peer != rank:
                    _probe(peer, card)
                    processes[peer] = os.pidfd_open(card.pid)
                    opened.callback(os.close, processes[peer])
                if peer < rank:
                    sockets[peer] = opened.enter_context(_new_socket())
                    sockets[peer].connect(card.line)

        if isinstance(cards := _on_all(group, introduce), str):
            return cards
        if len({card.host for card in cards}) > 1:
            return "they are on several hosts, or in several namespaces"
        if isinstance(refusal := _on_all(group, lambda: reach(cards)), str):
            return refusal
        peers = {card.pid: peer for peer, card in enumerate(cards) if peer > rank}
        with sockets.pop(rank) as listener:
            sockets |= _accept(listener, peers, opened)
        return Lines(
            rank,
            sockets,
            processes=processes,
            pids={peer: card.pid for peer, card in enumerate(cards)},
            opened=opened.pop_all(),
            timeout_s=timeout_s,
        )


def _on_all(group: dist.ProcessGroup, step: Callable[[], Any]) -> list[Any] | str:
    """What a step gives, by rank; or why it failed, the same on all ranks. Collective."""
    every: list[Any] = [None] * dist.get_world_size(group)
    try:
        mine = step()
    except (OSError, AttributeError) as error:  # some have no name where this is not Linux
        mine = f"rank {dist.get_rank(group)}: {error}"
    dist.all_gather_object(every, mine, group=group)
    return next((refusal for refusal in every if isinstance(refusal, str)), every)


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)


def _probe(peer: int, card: _Card) -> None:
    """Read what a process lets everybody read.

    Raises:
        OSError: The kernel does not permit it.
    """
    found = ctypes.create_string_buffer(len(card.content))
    Place(peer, card.pid, card.memory, len(found)).read(ctypes.addressof(found), len(found))
    if found.raw != card.content:
        raise OSError(f"process_vm_readv of process {card.pid}: it is another process")


def _accept(
    listener: socket.socket, peers: dict[int, int], opened: contextlib.ExitStack
) -> dict[int, socket.socket]:
    """The lines of peers that have connected, by rank; they are given by process."""
    accepted = {}
    credentials = struct.Struct("3i")
    while peers:  # others may have connected as well
        line = opened.enter_context(listener.accept()[0])
        packed = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
        pid, _uid, _gid = credentials.unpack(packed)
        if pid in peers:
            accepted[peers.pop(pid)] = line
    return accepted
