"""Opens groups: which ranks hold shards, which hold replicas, and in which all of them agree.

On a 2-D mesh each row of ranks holds a replica, cut into shards, and the ranks of a column hold the
same shard (HSDP). Gathers and reductions stay in a row; then every shard of gradients is averaged
down its column, by an all-reduce:

                 shard 0   shard 1
    replica 0    rank 0    rank 1    gather, reduce within
    replica 1    rank 2    rank 3    a row
                 average down a column

With ``state_over="all"`` rows and columns do something else, which ``hosts.py`` describes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp.core import torch_internals
from lightning_fsdp.core.engine.communicator import Communicator, collective
from lightning_fsdp.core.ranks import pairs
from lightning_fsdp.core.ranks.agreement import ControlGroup
from lightning_fsdp.core.ranks.hosts import HostsCommunicator
from lightning_fsdp.core.ranks.narrow import NarrowCommunicator
from lightning_fsdp.core.ranks.one_host import OneHostCommunicator
from lightning_fsdp.core.ranks.replicas import average_over

Comm = Literal["auto", "pairs", "direct"]
"""How data moves over gloo: in pairs, or directly from the memory of ranks of one host."""

_Result = TypeVar("_Result")

StateOver = Literal["replica", "all"]
"""Over which ranks of a 2-D mesh shards and optimizer state are spread."""


class _Choice(NamedTuple):
    """Which of the communicators of one sharding group.

    Attributes:
        replicas: Name of the group of replicas, if there are several.
        device_type: Type of the device of the tensors that it moves.
        sends_in_pairs: Whether ranks of one host may only send in pairs.
        is_over_all: Whether state is over all ranks of the mesh.
    """

    replicas: str | None
    device_type: str
    sends_in_pairs: bool
    is_over_all: bool


def communicator_of(
    over: dist.ProcessGroup | DeviceMesh,
    *,
    comm: Comm = "auto",
    kind: type[Communicator] | None = None,
    state_over: StateOver = "replica",
) -> Communicator:
    """The communicator of a group or a mesh, made at the first request. Collective.

    Args:
        over: A group that moves data, or a mesh, 1-D or 2-D: parameters are sharded over its last
            dimension and replicated over the first; with one replica it is as without replicas.
        comm: How data moves. There is one communicator for ``"pairs"``, and one for the other two.
        kind: Class of communicator for rows and columns; default: the one that suits the backend.
        state_over: ``"all"``: shards are spread over both dimensions, and gathered over the last.

    Raises:
        ValueError: See :func:`check_order`.
    """
    if isinstance(over, DeviceMesh):
        group, device_type = over.get_group(over.ndim - 1), over.device_type
        # The mesh that the group is a row of, if it has replicas.
        mesh = over if over.ndim > 1 and over.size(0) > 1 else None
    else:
        group, device_type, mesh = over, torch_internals.device_type_of(over), None
    replicas = None if mesh is None else mesh.get_group(0).group_name
    is_over_all = mesh is not None and state_over == "all"
    choice = _Choice(replicas, device_type, comm == "pairs", is_over_all)
    of_group = _communicators.setdefault(group, {})
    # Kept from the first request on: a memory plan asks again under fake tensors, where the ranks
    # of a mesh cannot be read.
    if choice not in of_group:
        # One control group for all choices, so that ranks that chose differently find out.
        controls = (control_of(c) for chosen, c in of_group.items() if chosen.replicas == replicas)
        of_group[choice] = _make(group, mesh, choice, kind, next(controls, None))
    return of_group[choice]


def _make(
    group: dist.ProcessGroup,
    mesh: DeviceMesh | None,
    choice: _Choice,
    kind: type[Communicator] | None,
    control: ControlGroup | None,
) -> Communicator:
    """Make the communicator of a choice; opens a control group if there is none."""
    ranks = dist.get_process_group_ranks(group)
    if mesh is not None:
        check_order(mesh)
        ranks = mesh.mesh.flatten().tolist()
    control = control or ControlGroup(ranks, group)
    device = torch.device(choice.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())

    def member_of(group: dist.ProcessGroup) -> Communicator:
        return (kind or _kind_of(group, device.type))(group, control, device)

    communicator = member_of(group)
    if mesh is not None:
        column = member_of(mesh.get_group(0))
        if choice.is_over_all:
            return HostsCommunicator(communicator, column, _places(mesh))
        average_over(column, communicator)
    return communicator


def check_choices(
    communicator: Communicator, mesh: DeviceMesh | None, comm: Comm, state_over: StateOver
) -> None:
    """Refuse a ``comm`` or ``state_over`` that does not exist, or that the mesh does not support.

    Raises:
        ValueError: One of them is not offered.
    """
    for name, choice, offered in (("comm", comm, Comm), ("state_over", state_over, StateOver)):
        if choice not in get_args(offered):
            raise ValueError(
                f"fully_shard: expected one of {get_args(offered)} for {name}, got {choice!r}."
            )
    has_choice = any(isinstance(c, pairs.PairCommunicator) for c in _parts(communicator))
    has_choice |= communicator.world_size == 1
    if comm != "auto" and not has_choice:
        raise ValueError(
            f"fully_shard: expected gloo and at most {pairs.MAX_PAIRWISE_WORLD_SIZE} ranks for "
            f"comm={comm!r}, got {_backend_of(communicator)} and "
            f"{communicator.world_size}. Leave it at 'auto'."
        )
    if state_over == "all" and (mesh is None or mesh.ndim == 1):
        got = "none" if mesh is None else "one of 1 dimension"
        raise ValueError(
            f"fully_shard: expected a mesh of 2 dimensions (replicate, shard) for "
            f"state_over='all', got {got}, whose shards are over all ranks already. Leave "
            "state_over out, or pass the ranks of a host as the last dimension of a mesh."
        )


def connect(communicator: Communicator, comm: Comm = "auto") -> None:
    """Let ranks of one host read each other's memory, if they can. Collective.

    Args:
        communicator: A communicator that all of its ranks have agreed to use.
        comm: What the user has chosen.

    Raises:
        RuntimeError: They cannot, and ``comm`` is ``"direct"``; raised on all ranks.
    """
    if isinstance(communicator, HostsCommunicator):
        communicator.open(_group_of_all(communicator))
        connect(communicator.column, "pairs" if comm == "pairs" else "auto")
    row = _parts(communicator)[0]
    if not isinstance(row, OneHostCommunicator):
        return
    row.connect(may_read=comm != "pairs")
    if comm == "direct":
        what, refusal = "reading each other's memory (comm='direct')", row.refusal
        control_of(communicator).agree(what, f"refused, {refusal}" if refusal else "permitted")
        if refusal:
            raise RuntimeError(
                f"fully_shard: expected ranks that read each other's memory for comm='direct', got "
                f"a refusal: {refusal}. Permit it (docs/training.md says what does), or leave comm "
                "at 'auto'."
            )


def way_of(communicator: Communicator) -> str:
    """How a communicator moves data: ``direct``, ``pairs``, or the name of its backend."""
    communicator = _parts(communicator)[0]
    if isinstance(communicator, OneHostCommunicator):
        return "direct" if communicator.lines else "pairs"
    return _backend_of(communicator)


def control_of(communicator: Communicator) -> ControlGroup:
    """The control group of all ranks that train together, replicas included."""
    return cast(ControlGroup, communicator.control)


def agree_on(
    communicator: Communicator | None,
    occasion: str,
    attempt: Callable[[], _Result],
    states: Callable[[_Result], object] = lambda _: "possible",
) -> _Result:
    """Return an attempt's result once it has succeeded on every rank; else raise on every rank.

    Collective over all ranks that train together.

    Args:
        communicator: Of these ranks; without one nothing is sharded, and nobody has to agree.
        occasion: What ranks are about to do, for the message.
        attempt: Returns a result.
        states: What has to be the same on every rank, in words, from the result.

    Raises:
        RuntimeError: As :meth:`ControlGroup.agree`, or the attempt has raised on some ranks only.
        Exception: What the attempt has raised, if it raised on every rank.
    """
    if communicator is None:
        return attempt()
    control = control_of(communicator)
    try:
        statement = states(result := attempt())
    except Exception as error:  # whatever it is, the other ranks have to be told
        try:
            control.agree(occasion, "refused, ", f"{type(error).__name__}: {error}")
        except RuntimeError as disagreement:
            raise disagreement from error
        raise
    control.agree(occasion, statement)
    return result


def spans_same_ranks(one: Communicator, other: Communicator) -> bool:
    """Whether two communicators have the same shards at the same places, and the same replicas."""
    of_one, of_other = ((c.ranks, c.places, control_of(c).ranks) for c in (one, other))
    return of_one == of_other


def describe(communicator: Communicator) -> str:
    """Shards, replicas and ranks of a communicator in one line."""
    num_replicas = communicator.mesh_size // communicator.world_size
    replicas = f"{num_replicas} replicas of " if num_replicas > 1 else ""
    ranks = list(control_of(communicator).ranks)
    row = _parts(communicator)[0].world_size
    hosts = f", gathered among {row}," if isinstance(communicator, HostsCommunicator) else ""
    return f"{replicas}{communicator.world_size} shards{hosts} on ranks {ranks}"


def all_gather_slices(communicator: Communicator, mine: Tensor, what: str) -> Tensor:
    """Gather ``mine`` of every rank, ``(n,)``, as rows of ``(world_size, n)``. Synchronous.

    Collective.

    Args:
        communicator: The ranks that take part.
        mine: ``(n,)``, the same ``n`` on every rank.
        what: The operation, for the message if it fails.

    Raises:
        RuntimeError: Another rank did not take part within the group's timeout.
    """
    rows = mine.new_empty(communicator.world_size, mine.numel())
    if communicator.world_size == 1:
        return rows.copy_(mine)
    if mine.numel():
        gather, both = torch_internals.all_gather_single, (rows.view(-1), mine.contiguous())
        what = f"{what} {communicator.where}"
        collective(what, "every rank", gather, *both, group=communicator.group)
    return rows


def check_order(mesh: DeviceMesh) -> None:
    """Refuse a mesh whose columns would join ranks that have different shards.

    Raises:
        ValueError: Some rows have their ranks in another order than others.
    """
    in_row = _numbers(mesh, 1)
    if bool((in_row != in_row[0]).any()):
        raise ValueError(
            f"a mesh: expected rows in one order, got {mesh.mesh.tolist()}: torch's process groups "
            "sort their ranks, so ranks of one column would have different shards. Put the ranks "
            "of each row in ascending order."
        )


def _places(mesh: DeviceMesh) -> dict[int, int]:
    """By rank, ascending, the place of its shard: shards of a column are neighbours."""
    places = _numbers(mesh, 1) * mesh.size(0) + _numbers(mesh, 0)
    return dict(sorted(zip(mesh.mesh.flatten().tolist(), places.flatten().tolist(), strict=True)))


def _numbers(mesh: DeviceMesh, dim: int) -> Tensor:
    """Shaped as the mesh: each rank's number in the group of its row (1) or its column (0)."""
    # Groups have their ranks in ascending order, whatever the order in the mesh.
    return mesh.mesh.argsort(dim).argsort(dim)


def _group_of_all(communicator: HostsCommunicator) -> dist.ProcessGroup:
    """A group of all ranks, with the backend of the rows. Collective at the first request."""
    if communicator.group is not communicator.row.group:
        return communicator.group
    default, group = dist.group.WORLD, communicator.row.group
    assert default is not None, "there is a mesh"
    backend = _backend_of(communicator.row)
    if len(communicator.ranks) == default.size() and _backend_of(communicator, default) == backend:
        return default
    ranks, timeout = list(communicator.ranks), torch_internals.group_timeout(group)
    opened: dist.ProcessGroup = dist.new_group(
        ranks, timeout, backend, use_local_synchronization=True
    )
    return opened


def _backend_of(communicator: Communicator, group: dist.ProcessGroup | None = None) -> str:
    """The backend of a communicator's group, or of another group that could take its place."""
    return torch_internals.backend_of(group or communicator.group, communicator.device.type)


def _parts(communicator: Communicator) -> tuple[Communicator, ...]:
    """The communicators of row and column that one is made of, or itself."""
    if isinstance(communicator, HostsCommunicator):
        return communicator.row, communicator.column
    return (communicator,)


def _kind_of(group: dist.ProcessGroup, device_type: str) -> type[Communicator]:
    """The class of communicator that suits the backend of a group."""
    of_host, world_size = torch_internals.backend_of(group, "cpu"), dist.get_world_size(group)
    is_small_gloo = device_type == "cpu" and pairs.exchanges_in_pairs(of_host, world_size)
    return OneHostCommunicator if is_small_gloo else NarrowCommunicator


# By sharding group.
_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Choice, Communicator]] = (
    weakref.WeakKeyDictionary()
)
