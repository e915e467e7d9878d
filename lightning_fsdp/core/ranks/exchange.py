"""Parts of whatever length, of each rank: to all others, to one, or another to each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fsdp.core.engine.communicator import Communicator, collective
from lightning_fsdp.core.ranks.pairs import tag_of


def exchange(
    communicator: Communicator,
    outgoing: Sequence[Sequence[Tensor]],
    counts: Sequence[int],
    what: str,
) -> list[Tensor]:
    """All-to-all. Synchronous; counted as ``all_to_all``.

    Args:
        communicator: Of the ranks.
        outgoing: For each rank, parts ``(n,)``, of one dtype and device; none for this rank itself,
            and one at least, which may be empty.
        counts: Elements that each rank sends to this one.
        what: The operation, for the message if it fails.

    Returns:
        ``(counts[rank],)`` of each rank, on the same device.

    Raises:
        RuntimeError: Another rank did not take part within the group's timeout.
    """
    sent = torch.cat([part for parts in outgoing for part in parts])
    there = sent.to(communicator.device)
    received = there.new_empty(sum(counts))
    communicator.count("all_to_all", sent.nbytes)
    size = sent.itemsize
    with collective(f"{what} {communicator.where}", "every rank"):
        dist.all_to_all_single(
            received.view(torch.uint8),  # gloo does not know every dtype
            there.view(torch.uint8),
            [count * size for count in counts],
            [sum(map(torch.numel, parts)) * size for parts in outgoing],
            group=communicator.group,
        )
    return list(torch.split(received.to(sent.device), list(counts)))


def broadcast_each(communicator: Communicator, parts: Sequence[Tensor], what: str) -> None:
    """Every rank's part to all ranks, in place. Synchronous.

    Args:
        communicator: Of the ranks.
        parts: ``(n,)`` per rank; this rank's has its values.
        what: The operation, for the message if it fails.

    Raises:
        RuntimeError: Another rank did not take part within the group's timeout.
    """
    group = communicator.group
    with collective(f"{what} {communicator.where}", "every rank"):
        for rank, part in enumerate(parts):
            if part.numel() and communicator.world_size > 1:
                # As bytes: gloo does not know every dtype.
                dist.broadcast(part.view(torch.uint8), group=group, group_src=rank)


def collect_each(communicator: Communicator, parts: Mapping[int, Tensor], what: str) -> None:
    """Every rank's part to rank 0 of the group, in place. Synchronous.

    Args:
        communicator: Of the ranks.
        parts: ``(n,)`` by rank: on rank 0 those of all, on the others their own.
        what: The operation, for the message if it fails.

    Raises:
        RuntimeError: Another rank did not take part within the group's timeout.
    """
    group, tag = communicator.group, tag_of(what, reduces=False)
    with collective(f"{what} {communicator.where}", "every rank"):
        for rank, part in parts.items():
            if rank == 0 or not part.numel():
                continue
            if communicator.rank == 0:
                dist.recv(part.view(torch.uint8), group=group, group_src=rank, tag=tag)
            else:
                dist.send(part.view(torch.uint8), group=group, group_dst=0, tag=tag)
