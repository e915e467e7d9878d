"""A process group in Python whose collectives another kind of code carries out, over gloo.

torch calls a group by many names; here each becomes one call of :meth:`GroupOverGloo.start` with
the tensors that a collective reads, those that it writes, and an exchange that does it for
stand-ins of both on the host. When which tensor is read and written is up to the subclass.

A group of another name than gloo's takes the general way through the core, as NCCL does.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

Exchange = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
"""Takes what is read and what is written, on the host, and blocks until it is done."""


class GroupOverGloo(dist.ProcessGroup):
    """One group of ranks.

    torch 2.13 renamed some methods, and asks for the new names or the old: both are here.
    """

    backend = ""
    devices: tuple[str, ...] = ("cpu",)

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(rank, world_size)
        self.gloo = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        self._name = self.backend

    @classmethod
    def register(cls) -> None:
        """Let ``init_process_group`` know the backend."""
        dist.Backend.register_backend(cls.backend, cls, devices=list(cls.devices))

    def start(
        self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], exchange: Exchange
    ) -> dist.Work:
        raise NotImplementedError

    # torch registers the group under the name that it sets, and asks for it here.

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return self.backend

    def all_gather_single(self, output: Tensor, mine: Tensor, opts: Any = None) -> dist.Work:
        def exchange(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
            self.gloo._allgather_base(outputs[0], inputs[0]).wait()

        return self.start("all_gather", [mine], [output], exchange)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, *opts: Any) -> dist.Work:
        def exchange(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
            self.gloo._reduce_scatter_base(outputs[0], inputs[0], *opts).wait()

        return self.start("reduce_scatter", [whole], [output], exchange)

    def all_to_all_single(
        self,
        output: Tensor,
        whole: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        def exchange(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
            sizes = list(output_sizes), list(input_sizes)
            self.gloo.alltoall_base(outputs[0], inputs[0], *sizes).wait()

        return self.start("all_to_all", [whole], [output], exchange)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        def exchange(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
            _copy(outputs, inputs)
            self.gloo.allreduce(list(outputs), opts).wait()

        return self.start("all_reduce", tensors, tensors, exchange)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        def exchange(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
            _copy(outputs, inputs)
            self.gloo.broadcast(list(outputs), opts).wait()

        return self.start("broadcast", tensors, tensors, exchange)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        def exchange(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
            self.gloo.allgather([list(outputs)], list(inputs)).wait()

        return self.start("all_gather", inputs, outputs[0], exchange)

    # DTensor's collectives come from C++, which asks for lists.

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return _last_of([self.all_gather_single(*pair) for pair in pairs])

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return _last_of([self.reduce_scatter_single(*pair, opts) for pair in pairs])

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # What moves no data of the core, or only between two ranks, goes its way at once.

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.gloo.barrier()

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        return self.gloo.send(tensors, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        return self.gloo.recv(tensors, rank, tag)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _last_of(works: Sequence[Any]) -> dist.Work:
    """What is over when all are; keeps those before it."""
    last: dist.Work = works[-1]
    last.before = works[:-1]  # type: ignore[attr-defined]
    return last
