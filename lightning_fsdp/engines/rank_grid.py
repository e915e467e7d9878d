"""Which ranks hold one model together: all of them, or groups of which each holds a replica (HSDP).

    shard_size=2 on 4 ranks     shard 0   shard 1
                  replica 0     rank 0    rank 1      parameters are gathered in a row,
                  replica 1     rank 2    rank 3      gradients are averaged down a column too

A user chooses before there are processes; :func:`open_grid` makes the groups once there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import TypeIs

from lightning_fsdp.core.ranks.groups import StateOver, check_order
from lightning_fsdp.core.torch_internals import group_timeout
from lightning_fsdp.engines import torch_internals

NAMES = ("replicate", "shard")


class RankGrid:
    """Replicas of the model over the default process group.

    Attributes:
        mesh: ``(replicas, shards)``; ``None``: one replica, over all ranks.
        state_over: See :func:`~lightning_fsdp.fully_shard`.
    """

    def __init__(self, mesh: DeviceMesh | None = None, state_over: StateOver = "replica") -> None:
        self.mesh, self.state_over = mesh, state_over

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks of this rank's replica."""
        group = dist.group.WORLD if self.mesh is None else self.mesh.get_group(1)
        assert group is not None, "it was opened"
        return group

    @property
    def shard_rank(self) -> int:
        """This rank in its replica."""
        return dist.get_rank(self.shard_group)

    @property
    def shard_size(self) -> int:
        """Ranks of a replica."""
        return dist.get_world_size(self.shard_group)

    @property
    def num_replicas(self) -> int:
        """How many models the ranks hold together."""
        return 1 if self.mesh is None else self.mesh.size(0)

    @property
    def num_copies(self) -> int:
        """How many ranks hold each shard of gradients and optimizer state."""
        return 1 if self.state_over == "all" else self.num_replicas


@dataclass(frozen=True)
class GridChoice:
    """What a user chose.

    Attributes:
        shard_size: Ranks of a replica; ``"host"``: those of one host; ``None``: as ``device_mesh``
            says.
        device_mesh: ``(replicas, shards)``, as sizes or made already; ``None``: all ranks are one
            replica, unless ``shard_size`` says otherwise.
        state_over: Whether optimizer state is spread over a ``"replica"`` or over ``"all"`` ranks.

    Raises:
        ValueError: Both are given, or a size below 1, or a mesh of other dimensions than two; or
            ``state_over`` is neither of the two, or ``"all"`` where there are no replicas.
        TypeError: A kind of value that is none of these.
    """

    shard_size: int | Literal["host"] | None = None
    device_mesh: DeviceMesh | Sequence[int] | None = None
    state_over: StateOver = "replica"

    def __post_init__(self) -> None:
        size, mesh = self.shard_size, self.device_mesh
        if self.state_over not in get_args(StateOver):
            raise ValueError(
                f"state_over: expected one of {get_args(StateOver)}, got {self.state_over!r}."
            )
        if self.state_over == "all" and size is None and mesh is None:
            raise ValueError(
                "state_over='all': expected shard_size or device_mesh with it, got neither: one "
                "replica has its state over all ranks already. Leave it out, or add "
                "shard_size='host'."
            )
        if size is not None and mesh is not None:
            raise ValueError(
                f"shard_size, device_mesh: expected one of the two, got {size!r} and {mesh!r}. "
                "Leave one out: both say how many ranks hold a model together."
            )
        if not (size in (None, "host") or _is_int(size)):
            raise TypeError(
                f"shard_size: expected a number of ranks or 'host', got {size!r}. Give the number "
                "of ranks that hold one model together."
            )
        if _is_int(size) and size < 1:
            raise ValueError(
                f"shard_size: expected 1 or more ranks, got {size}. Give the number of ranks that "
                "hold one model together."
            )
        if mesh is not None:
            _check_mesh(mesh)

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """Those of ``device_mesh``."""
        mesh = self.device_mesh
        return None if mesh is None else tuple(mesh.shape if _is_mesh(mesh) else mesh)

    def __str__(self) -> str:
        state_over = f", state_over={self.state_over!r}" if self.state_over != "replica" else ""
        if self.device_mesh is None:
            return f"shard_size={self.shard_size!r}{state_over}"
        made = f" of ranks {self.device_mesh.mesh.tolist()}" if _is_mesh(self.device_mesh) else ""
        return f"device_mesh={self.sizes}{made}{state_over}"


def open_grid(choice: GridChoice, *, device_type: str, host: int) -> RankGrid:
    """Make the groups of a choice. Collective over the default process group.

    Args:
        choice: The same on every rank.
        device_type: Of the devices that compute.
        host: Number of the host of this process.

    Raises:
        ValueError: On every rank: ranks chose differently, or what was chosen does not divide them.
    """
    every = all_gather_objects((str(choice), host))
    for rank, (theirs, _) in enumerate(every):
        if theirs != every[0][0]:
            raise ValueError(
                f"shard_size, device_mesh: expected the same on every rank, got {every[0][0]} on "
                f"rank 0 and {theirs} on rank {rank}. Give all ranks the same options."
            )
    rows = rows_of(choice, [host for _, host in every])
    if len(rows) == 1:
        return RankGrid()
    if _is_mesh(choice.device_mesh):
        _check_device(choice.device_mesh, device_type)
        check_order(choice.device_mesh)
        return RankGrid(choice.device_mesh, choice.state_over)
    timeout = group_timeout(RankGrid().shard_group)
    columns = [list(column) for column in zip(*rows, strict=True)]
    replicate, shard = (
        dist.new_subgroups_by_enumeration(ranks, timeout=timeout)[0]  # type: ignore[no-untyped-call]
        for ranks in (columns, rows)
    )
    mesh = DeviceMesh.from_group(
        [replicate, shard], device_type, mesh=torch.tensor(rows, device="cpu"), mesh_dim_names=NAMES
    )
    torch_internals.let_go_later(mesh)
    return RankGrid(mesh, choice.state_over)


def rows_of(choice: GridChoice, hosts: Sequence[int]) -> list[list[int]]:
    """The ranks of each replica.

    Args:
        choice: What a user chose.
        hosts: Of each rank, the number of its host.

    Raises:
        ValueError: What was chosen does not divide them.
    """
    world_size, size = len(hosts), choice.shard_size
    if _is_mesh(choice.device_mesh):
        rows: list[list[int]] = choice.device_mesh.mesh.tolist()
        if sorted(rank for row in rows for rank in row) != list(range(world_size)):
            raise ValueError(
                f"device_mesh: expected all ranks from 0 to {world_size - 1}, each once, got "
                f"{rows}. Make the mesh over all ranks that train."
            )
        return rows
    if size == "host":
        by_host: dict[int, list[int]] = {}
        for rank, host in enumerate(hosts):
            by_host.setdefault(host, []).append(rank)
        sizes = [len(ranks) for ranks in by_host.values()]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"shard_size='host': expected as many ranks on every host, got {sizes}. Start as "
                "many on each, or give a number that divides all of them."
            )
        return list(by_host.values())
    if choice.sizes is not None:
        num_replicas, size = choice.sizes
        if num_replicas * size != world_size:
            raise ValueError(
                f"device_mesh: expected (replicas, shards) whose product is the {world_size} ranks "
                f"of the run, got {choice.sizes}. Change one of the two."
            )
    size = world_size if size is None else size
    if world_size % size:
        raise ValueError(
            f"shard_size: expected a divisor of the {world_size} ranks of the run, got {size}. "
            "Each replica of the model needs as many ranks."
        )
    return [list(range(start, start + size)) for start in range(0, world_size, size)]


def _check_mesh(mesh: Any) -> None:
    if _is_mesh(mesh):
        if mesh.ndim != 2:
            raise ValueError(
                f"device_mesh: expected 2 dimensions (replicate, shard), got {mesh.ndim} "
                f"{mesh.mesh_dim_names}. Pass the two to use, e.g. mesh['replicate', 'shard']."
            )
        return
    is_pair = isinstance(mesh, (tuple, list)) and len(mesh) == 2 and all(map(_is_int, mesh))
    if not is_pair or min(mesh) < 1:
        raise (ValueError if is_pair else TypeError)(
            "device_mesh: expected a DeviceMesh of 2 dimensions or two positive sizes (replicas, "
            f"shards), got {mesh!r}. For example (2, 8): two replicas on eight ranks each."
        )


def _check_device(mesh: DeviceMesh, device_type: str) -> None:
    if mesh.device_type != device_type:
        raise ValueError(
            f"device_mesh: expected one of {device_type!r}, on which the Trainer computes, got one "
            f"of {mesh.device_type!r}. Make it with init_device_mesh({device_type!r}, ...)."
        )


def _is_int(value: Any) -> TypeIs[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_mesh(value: Any) -> TypeIs[DeviceMesh]:
    return isinstance(value, DeviceMesh)


def all_gather_objects(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank of a group (default: of all) has, in rank order; pickled. Collective."""
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    return every
