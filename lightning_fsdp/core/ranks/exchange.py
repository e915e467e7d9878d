"""Every rank's part to every other rank, of whatever length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fsdp.core.engine.communicator import Communicator, left_alone


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
    try:
        dist.all_to_all_single(
            received.view(torch.uint8),  # gloo does not know every dtype
            there.view(torch.uint8),
            [count * size for count in counts],
            [sum(map(torch.numel, parts)) * size for parts in outgoing],
            group=communicator.group,
        )
    except RuntimeError as error:
        raise left_alone(f"{what} {communicator.where}", "every rank") from error
    return list(torch.split(received.to(sent.device), list(counts)))
