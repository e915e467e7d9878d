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
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_fsdp.core import torch_internals
from lightning_fsdp.core.ranks.lines import Lines
from lightning_fsdp.core.ranks.process_memory import host_of_this_process, read_memory

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


def connect(group: dist.ProcessGroup) -> Lines | str:
    """Lines to all other ranks, or why there are none, the same on all ranks. Collective."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    timeout_s = torch_internals.group_timeout(group).total_seconds()
    probed = ctypes.create_string_buffer(secrets.token_bytes(_NUM_PROBED_BYTES), _NUM_PROBED_BYTES)
    sockets: dict[int, socket.socket] = {}
    processes: dict[int, int] = {}
    with contextlib.ExitStack() as opened, contextlib.ExitStack() as listening:
        mine: _Card | str
        try:
            listener = listening.enter_context(_listener(world_size, timeout_s))
            host, line = host_of_this_process(), listener.getsockname()
            mine = _Card(host, os.getpid(), line, ctypes.addressof(probed), probed.raw)
        except (OSError, AttributeError) as error:  # not on Linux
            mine = f"rank {rank}: {error}"
        cards, refusal = _read_cards(_tell_all(group, mine))
        try:
            for peer, card in enumerate(cards):
                if peer != rank:
                    _probe(card)
                    processes[peer] = os.pidfd_open(card.pid)
                    opened.callback(os.close, processes[peer])
                if peer < rank:
                    sockets[peer] = opened.enter_context(_new_socket(timeout_s))
                    sockets[peer].connect(card.line)
        except (OSError, AttributeError) as error:
            refusal = f"rank {rank}: {error}"
        # From here on all have read what they were to, and connected, or there is a reason.
        refusal = next(filter(None, _tell_all(group, refusal)), "")
        if refusal:
            return refusal
        peers = {card.pid: peer for peer, card in enumerate(cards) if peer > rank}
        while len(sockets) < world_size - 1:
            stranger, _ = listener.accept()  # at once: all have connected
            peer = peers.get(_pid_of(stranger), rank)
            if peer == rank:
                stranger.close()
            else:
                sockets[peer] = opened.enter_context(stranger)
        lines = Lines(sockets, {peer: cards[peer].pid for peer in sockets}, processes, timeout_s)
        opened.pop_all()
    return lines


def _tell_all(group: dist.ProcessGroup, mine: _Card | str) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    return every


def _read_cards(every: list[_Card | str]) -> tuple[list[_Card], str]:
    """The cards, or none of them and a reason."""
    cards = [card for card in every if isinstance(card, _Card)]
    if len(cards) < len(every):
        return [], next(card for card in every if isinstance(card, str))
    if len({card.host for card in cards}) > 1:
        return [], "they are on several hosts, or in several namespaces"
    return cards, ""


def _new_socket(timeout_s: float) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(timeout_s)
    return made


def _listener(world_size: int, timeout_s: float) -> socket.socket:
    listener = _new_socket(timeout_s)
    listener.bind("")  # the kernel gives it an address that is in no file system
    listener.listen(world_size)
    return listener


def _probe(card: _Card) -> None:
    """Read what a process lets everybody read.

    Raises:
        OSError: The kernel does not permit it.
    """
    found = ctypes.create_string_buffer(len(card.content))
    read_memory(card.pid, card.memory, ctypes.addressof(found), len(card.content))
    if found.raw != card.content:
        raise OSError(f"process_vm_readv of process {card.pid}: it is another process")


def _pid_of(line: socket.socket) -> int:
    """The process at the other end."""
    credentials = struct.Struct("3i")  # pid, uid, gid
    packed = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    return int(credentials.unpack(packed)[0])
