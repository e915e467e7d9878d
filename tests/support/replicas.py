"""Meshes of replicas and shards, and what is sharded over them."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.sharded_module import units_in
from tests.support import ranks

NAMES = ("replicate", "shard")


def mesh_of(shape: tuple[int, int], names: tuple[str, str] = NAMES) -> DeviceMesh:
    return init_device_mesh(ranks.active_device, shape, mesh_dim_names=names)


def mesh_with_timeout(rank: int, timeout_s: float) -> DeviceMesh:
    """Of 2 x 2 ranks, whose groups wait for that long."""
    timeout = timedelta(seconds=timeout_s)
    rows = [dist.new_group(ranks, timeout=timeout) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks, timeout=timeout) for ranks in ([0, 2], [1, 3])]
    return DeviceMesh.from_group(
        [columns[rank % 2], rows[rank // 2]],
        "cpu",
        mesh=torch.arange(4).view(2, 2),
        mesh_dim_names=NAMES,
    )


def flat_params_of(model: nn.Module) -> list[FlatParameter]:
    return list({flat_param: None for unit in units_in(model) for flat_param in unit.flat_params})
