"""Collectives as torch's dispatcher sees them: calls, elements and bytes, without asking the code
under test.

Every public function of ``torch.distributed`` becomes one ``c10d`` operation, in forward, in
backward hooks and in end-of-backward callbacks alike; a dispatch mode that is on while they run
sees all of them.

    dist.all_gather_single      c10d._allgather_base_       output is measured
    dist.reduce_scatter_single  c10d._reduce_scatter_base_  input is measured
    dist.all_to_all_single      c10d.alltoall_base_         input is measured
    dist.isend, dist.irecv      c10d.send, c10d.recv_       the tensor, and the tag
    dist.all_reduce, broadcast  c10d.allreduce_, broadcast_ the tensor

So a "whole" buffer counts whole, this rank's own part included, for the first three; a gather made
of pairs is seen as ``world_size - 1`` receives of one part each.

Data (parameters, gradients) moves on the default group in these tests, unless a test names its data
groups. What moves on any other group, and what is not one of the kinds above the last line (with
data groups named, an all-reduce is one), is control: agreements of the ranks about order, flags,
bitmaps.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# operation -> (kind, position of the measured argument)
_OPERATIONS = {
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "scatter_": ("scatter", 0),
    "gather_": ("gather", 0),
    "barrier": ("barrier", None),
    "monitored_barrier_": ("barrier", None),
}
_DATA_KINDS = {"all_gather", "reduce_scatter", "all_to_all", "send", "recv"}


@dataclass(frozen=True)
class Call:
    """One collective, or one half of a pair, on this rank."""

    kind: str
    numel: int
    nbytes: int
    dtype: torch.dtype | None
    is_data: bool
    tag: int | None = None
    peer: int | None = None


class CollectiveCounter(TorchDispatchMode):
    """Records every collective of this thread while it is entered.

    Args:
        data_groups: Those that move data, as on a mesh; none means the default group.
    """

    def __init__(self, *data_groups: dist.ProcessGroup) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._data_groups = {group.group_name for group in data_groups}
        self._data_kinds = _DATA_KINDS | {"all_reduce"} if data_groups else _DATA_KINDS

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_wrapper(types):
            return NotImplemented  # the wrapper unpacks itself, then its plain tensors come by
        if func.namespace == "c10d":
            self._record(func, args)
        return func(*args, **(kwargs or {}))

    def data(self) -> list[Call]:
        """Parameters and gradients."""
        return [call for call in self.calls if call.is_data]

    def control(self) -> list[Call]:
        """Agreements between ranks."""
        return [call for call in self.calls if not call.is_data]

    def of(self, *kinds: str) -> list[Call]:
        return [call for call in self.data() if call.kind in kinds]

    def num_gathers(self, world_size: int) -> float:
        """Gathers of data, whichever way they were made."""
        in_one, in_pairs = len(self.of("all_gather")), self._num_exchanges(False)
        return in_one + in_pairs / max(world_size - 1, 1)

    def gathers(self) -> list[Call]:
        """Calls in which this rank received parts of wholes."""
        return self.of("all_gather") + self._pairs("recv", False)

    def num_reductions(self, world_size: int) -> float:
        """Reductions of data to shards, whichever way they were made."""
        in_one = len(self.of("reduce_scatter", "all_to_all"))
        return in_one + self._num_exchanges(True) / max(world_size - 1, 1)

    def reductions(self) -> list[Call]:
        """Calls in which this rank gave parts of its gradients away."""
        return self.of("reduce_scatter", "all_to_all") + self._pairs("send", True)

    def gathered_bytes(self, world_size: int) -> float:
        """Bytes that came from other ranks in gathers."""
        wholes = sum(call.nbytes for call in self.of("all_gather"))
        received = sum(call.nbytes for call in self._pairs("recv", False))
        return wholes * (world_size - 1) / world_size + received

    def reduced_bytes(self, world_size: int) -> float:
        """Bytes that went to other ranks in reductions."""
        wholes = sum(call.nbytes for call in self.of("reduce_scatter", "all_to_all"))
        sent = sum(call.nbytes for call in self._pairs("send", True))
        return wholes * (world_size - 1) / world_size + sent

    def _num_exchanges(self, reduces: bool) -> int:
        """Exchanges with single peers: some receives, then some sends, all with one tag."""
        number, before = 0, None
        for call in self.of("recv", "send"):
            is_new = before is None or (call.peer, call.tag) != (before.peer, before.tag)
            is_new = is_new or (call.kind == "recv" and before.kind == "send")
            number += is_new and is_reduction(call.tag) == reduces
            before = call
        return number

    def _pairs(self, kind: str, reduces: bool) -> list[Call]:
        return [call for call in self.of(kind) if is_reduction(call.tag) == reduces]

    def _moves_data(self, args: Any) -> bool:
        if not self._data_groups:
            return is_on_default_group(args)
        return not self._data_groups.isdisjoint(groups_of(args))

    def _record(self, func: Any, args: Any) -> None:
        name = func._schema.name.removeprefix("c10d::")
        kind, position = _OPERATIONS.get(name, (name, 0))
        tensors = [] if position is None else flat_tensors(args[position])
        self.calls.append(
            Call(
                kind=kind,
                numel=sum(tensor.numel() for tensor in tensors),
                nbytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
                dtype=tensors[0].dtype if tensors else None,
                is_data=kind in self._data_kinds and self._moves_data(args),
                tag=args[3] if kind in ("send", "recv") else None,
                peer=args[2] if kind in ("send", "recv") else None,
            )
        )


def groups_of(args: Any) -> list[str]:
    """Names of the process groups among the arguments of a c10d operation."""
    is_group = [
        isinstance(a, torch.ScriptObject) and a._type().name() == "ProcessGroup" for a in args
    ]
    groups = [arg for arg, is_one in zip(args, is_group, strict=True) if is_one]
    return [dist.ProcessGroup.unbox(group).group_name for group in groups]


def is_reduction(tag: int | None) -> bool:
    """Whether a pair carries gradients to be reduced; those that gather have even tags."""
    return tag is not None and tag % 2 == 1


def is_on_default_group(args: Any) -> bool:
    """Whether a c10d operation with these arguments runs on the default process group."""
    return groups_of(args) == [dist.group.WORLD.group_name]


def has_wrapper(types: Any) -> bool:
    """Whether one of ``types`` is a tensor that handles operations itself (a DTensor, a sharded
    tensor).
    """
    disabled = torch._C._disabled_torch_dispatch_impl
    return any(getattr(kind, "__torch_dispatch__", disabled) is not disabled for kind in types)


def flat_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in flat_tensors(item)]
    return []
