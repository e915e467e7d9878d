"""A few numbers of every rank, combined between the hosts: none of them waits for its device.

What a rank reads of a collective on a device, it reads when all that is queued there has run. The
device is idle then until the host has queued more: once a batch, if that is asked at every batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_fsdp.checkpoint.ranks import GroupBeside
from lightning_fsdp.core.torch_internals import backend_of


def all_reduce_numbers(numbers: Sequence[int], op: dist.ReduceOp.RedOpType) -> list[int]:
    """Combine numbers of every rank of the default group. Collective.

    Args:
        numbers: As many on every rank.
        op: How those at one place are combined: the sum, the least or the largest.

    Raises:
        RuntimeError: Another rank did not take part within the group's timeout.
    """
    every = torch.tensor(numbers, dtype=torch.int32, device="cpu")
    dist.all_reduce(every, op, group=_group_of_hosts())
    combined: list[int] = every.tolist()
    return combined


_beside = GroupBeside()


def _group_of_hosts() -> dist.ProcessGroup:
    """The default group, or a group of gloo beside one that moves no tensors of the host."""
    default = dist.group.WORLD
    assert default is not None, "asked only where a default group is initialized"
    return _beside.get() if backend_of(default, "cpu") == "none" else default
