"""Parts of any length: from all ranks to all, or from each to all, or to rank 0."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fsdp.core.engine.communicator import Communicator, Traffic, collective
from lightning_fsdp.core.ranks.one_host import OneHostCommunicator
from lightning_fsdp.core.ranks.pairs import tag_of


def exchange(
    communicator: Communicator,
    outgoing: Sequence[Sequence[Tensor]],
    incoming: Sequence[Sequence[Tensor]],
    what: str,
) -> None:
    """All-to-all. Synchronous; counted as ``all_to_all``. Collective.

    Args:
        communicator: The ranks that take part.
        outgoing: By receiver, parts ``(n,)``, of one dtype and device; none for this rank itself.
        incoming: By sender, the memory that its parts go to, likewise.
        what: The operation, for the message if it fails.

    Raises:
        RuntimeError: Another rank did not take part within the group's timeout.
    """
    sent = [part for parts in outgoing for part in parts]
    received = [part for parts in incoming for part in parts]
    communicator.traffic.setdefault("all_to_all", Traffic()).add(_num_bytes(sent))
    if isinstance(communicator, OneHostCommunicator) and communicator.lines is not None:
        communicator.exchange(outgoing, incoming, what)
        return
    # As bytes: gloo does not support every dtype.
    none = torch.empty(0, dtype=torch.uint8, device=communicator.device)
    packed = torch.cat([none, *(p.view(torch.uint8).to(none.device) for p in sent)])
    arrived = none.new_empty(_num_bytes(received))
    sizes = list(map(_num_bytes, incoming)), list(map(_num_bytes, outgoing))
    move = functools.partial(dist.all_to_all_single, group=communicator.group)
    collective(f"{what} {communicator.where}", "every rank", move, arrived, packed, *sizes)
    parts = torch.split(arrived, [part.nbytes for part in received])
    for part, there in zip(received, parts, strict=True):
        part.view(torch.uint8).copy_(there)


def _num_bytes(parts: Iterable[Tensor]) -> int:
    return sum(part.nbytes for part in parts)


def move_each(
    communicator: Communicator, parts: Mapping[int, Tensor], what: str, *, rank0_only: bool
) -> None:
    """Send each rank's part to all ranks, or to rank 0 of the group, in place. Synchronous.

    Collective.

    Args:
        communicator: The ranks that take part.
        parts: ``(n,)`` by sender: this rank's holds its values, the others are written. Senders are
            the same on every rank; with ``rank0_only``, ranks other than 0 pass only their own.
        what: The operation, for the message if it fails.
        rank0_only: Whether only rank 0 receives.

    Raises:
        RuntimeError: Another rank did not take part within the group's timeout.
    """
    group, me, tag = communicator.group, communicator.rank, tag_of(what, reduces=False)

    def move() -> None:
        for rank, part in parts.items():
            data = part.view(torch.uint8)  # gloo does not support every dtype
            if not part.numel() or communicator.world_size == 1 or (rank0_only and rank == 0):
                continue
            if not rank0_only:
                dist.broadcast(data, group=group, group_src=rank)
            elif me == 0:
                dist.recv(data, group=group, group_src=rank, tag=tag)
            else:
                dist.send(data, group=group, group_dst=0, tag=tag)

    collective(f"{what} {communicator.where}", "every rank", move)
