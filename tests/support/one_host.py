"""Groups of ranks of one host, for tests of the ways between them."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp.core.ranks.groups import communicator_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
AT_ONCE_S = 20.0  # what a busy machine may need for what takes milliseconds; no timeout
SHARD_NUMEL = 1000  # some of it padding


def new_mesh(*shape, timeout_s=120.0):
    """Over groups of its own, which no other test's communicator has."""
    ranks = torch.arange(dist.get_world_size()).view(*shape)
    timeout = timedelta(seconds=timeout_s)
    if ranks.ndim == 1:
        return DeviceMesh.from_group(dist.new_group(timeout=timeout), "cpu")
    lanes = [(ranks.t(), None), (ranks, None)]
    groups = []
    for every, _ in lanes:
        for members in every.tolist():
            group = dist.new_group(members, timeout=timeout)
            if dist.get_rank() in members:
                groups.append(group)
    return DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("replicate", "shard"))


def connected(group):
    communicator = communicator_of(group)
    communicator.connect()
    return communicator


def impatient(group, timeout_s):
    """Connected, in the time that a busy machine needs; from then on, peers are waited for so long.

    With such a timeout the group itself would end where a rank is stopped for a moment before.
    """
    communicator = connected(group)
    communicator.lines._timeout_s = timeout_s
    return communicator


def empty(numel, dtype):
    return torch.empty(numel, dtype=dtype)


def gather_on(group, numel=SHARD_NUMEL, name="u"):
    communicator = connected(group)
    return communicator.gather(torch.zeros(communicator.world_size * numel), name)
