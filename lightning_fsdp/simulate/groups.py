"""A process group of one process: its other ranks are a model of the time that they would take.

::

    with simulated(Network(world_size=64, bandwidth_gb_s=25, latency_us=10)) as usage:
        ...  # any engine, as it is: dist.get_world_size() is 64, and this is rank 0

Every other rank is taken to hold what this one holds: a gather fills all slots with this rank's
shard, a sum is this rank's part times the number of ranks. So values stay finite, and no more.

Collectives go one after another, in the order in which they were started: those of tensors on CPU
by a thread (``transfers_on_host.py``), those on CUDA by a stream (``transfers_on_cuda.py``), and
those of a program whose time is only counted by a clock (``transfers_on_clock.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from typing_extensions import override

from lightning_fsdp.core.ranks.agreement import expect_no_others
from lightning_fsdp.simulate.network import Network
from lightning_fsdp.simulate.transfer import Transfer, Usage
from lightning_fsdp.simulate.transfers_on_clock import Clock, ClockedTransfers
from lightning_fsdp.simulate.transfers_on_cuda import CudaTransfers, Pace
from lightning_fsdp.simulate.transfers_on_host import HostTransfers

# By the name engines see which device's tensors a group moves.
DEVICE_TO_BACKEND = {"cpu": "simulated", "cuda": "simulated_nccl"}

_Queue = HostTransfers | CudaTransfers | ClockedTransfers


class _Transfers:
    """Those of all groups together, on a queue for each device and for each kind of link.

    Groups within a host meet those that leave it on no link. So each kind has a queue, as backends
    give each group a stream or a thread.
    """

    def __init__(self, network: Network, clock: Clock | None) -> None:
        self.network = network
        self._clock = clock
        self._usage = Usage()
        self._queues: dict[tuple[torch.device, bool], _Queue] = {}

    def settled_usage(self) -> Usage:
        """What they took so far; waits for those on CUDA."""
        for transfers in self._queues.values():
            if isinstance(transfers, CudaTransfers):
                transfers.settle()
        return self._usage

    def start(self, transfer: Transfer) -> dist.Work:
        """Start it after those before it."""
        device = transfer.result[0].device if transfer.result else torch.device("cpu")
        key = device, transfer.leaves_host
        if key not in self._queues:
            self._queues[key] = self._new_queue(device)
        return self._queues[key].start(transfer, self._usage.count(transfer, self.network))

    def _new_queue(self, device: torch.device) -> _Queue:
        if self._clock is not None:
            return ClockedTransfers(self._usage, self._clock)
        if device.type == "cpu":
            return HostTransfers(self._usage, self.network.host_share)
        return CudaTransfers(self._usage, device, Pace.of(device))

    def close(self) -> None:
        """End the threads, after all that is in their queues."""
        for transfers in self._queues.values():
            if isinstance(transfers, HostTransfers):
                transfers.close()


def _one_by_one(name: str) -> Callable[..., dist.Work]:
    """A collective of several tensors, each of which is sent by the one of that name."""

    def collective(
        self: SimulatedGroup, outputs: list[Tensor], inputs: list[Tensor], *opts: Any
    ) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        works: list[Any] = [getattr(self, name)(*pair, *opts) for pair in pairs]
        works[-1].before = works[:-1]  # what is over when all are keeps their tensors
        return works[-1]  # type: ignore[no-any-return]

    return collective


class SimulatedGroup(dist.ProcessGroup):
    """One group of ranks; torch calls its methods as those of any backend.

    torch 2.13 renamed some of them, and asks for the new names or the old: both are here.
    """

    def __init__(
        self, transfers: _Transfers, backend: str, rank: int, ranks: Sequence[int]
    ) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self.transfers = transfers
        self._ranks = ranks
        self._per_host = transfers.network.per_host(ranks)
        self._backend = self._name = backend

    # torch registers the group under the name that it sets, and asks for it here.

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """What torch registered it under."""
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 (torch's)
        """The name that the group was asked for by."""
        return self._backend

    def all_gather_single(self, output: Tensor, mine: Tensor, opts: Any = None) -> dist.Work:
        """This rank's shard lands in every slot."""
        rows, shard = output.data.view(self.size(), -1), mine.data.view(-1)
        return self._start("all_gather", rows.nbytes, lambda: self._fill(rows, shard), [output])

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        """This rank's slot, reduced with itself."""
        rows, shard = whole.data.view(self.size(), -1), output.data.view(-1)
        move = partial(torch.mul, rows[self.rank()], self._factor(opts), out=shard)
        return self._start("reduce_scatter", rows.nbytes, move, [output])

    def all_to_all_single(self, output: Tensor, whole: Tensor, *sizes_and_opts: Any) -> dist.Work:
        """This rank's slot comes from every rank; of slots of different sizes, what it has itself.

        Of different sizes, as long as the longer way takes: what it sends, or what it gets.
        """
        sent, received, both_sizes = whole.data.view(-1), output.data.view(-1), sizes_and_opts[:2]
        if any(len({*sizes}) > 1 for sizes in both_sizes):
            me, size = self.rank(), self.size()
            both = zip((output, whole), both_sizes, strict=True)
            rows_of = [sizes or [len(tensor) // size] * size for tensor, sizes in both]
            num_rows = max(sum(sizes) - sizes[me] for sizes in rows_of)
            row_bytes = (output.nbytes + whole.nbytes) // max(len(output) + len(whole), 1)
            nbytes = num_rows * row_bytes * size // max(size - 1, 1)
            num_here = min(len(sent), len(received))

            def move() -> None:
                received[:num_here].copy_(sent[:num_here])
                received[num_here:].zero_()

            return self._start("all_to_all", nbytes, move, [output])
        rows = sent.view(self.size(), -1)
        slots, shard = received.view(self.size(), -1), rows[self.rank()]
        return self._start("all_to_all", rows.nbytes, lambda: self._fill(slots, shard), [output])

    @override
    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """One message."""
        return self.transfers.start(self._message("send", tensors, peer))

    @override
    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """Ends with the sends before it, as others send as much; the tensors stay as they are."""
        return self.transfers.start(self._message("recv", tensors, peer))

    def _message(self, kind: str, tensors: list[Tensor], peer: int) -> Transfer:
        ends = [self._ranks[self.rank()], self._ranks[peer]]
        per_host = self.transfers.network.per_host(ends)
        return Transfer(kind, sum(t.nbytes for t in tensors), 2, None, tensors, per_host)

    # DTensor's collectives come from C++, which asks for lists.
    all_gather_single_coalesced = _one_by_one("all_gather_single")
    reduce_scatter_single_coalesced = _one_by_one("reduce_scatter_single")

    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @override
    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """The same with a tensor per slot."""
        (slots,), (shard,) = outputs, inputs

        def move() -> None:
            for slot in slots:
                slot.data.copy_(shard.data)

        return self._start("all_gather", sum(slot.nbytes for slot in slots), move, slots)

    @override
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Reduced with itself, in place."""
        factor = self._factor(opts)

        def move() -> None:
            for tensor in tensors:
                tensor.data.mul_(factor)

        nbytes = sum(t.nbytes for t in tensors)
        return self._start("all_reduce", nbytes, move if factor != 1 else None, tensors)

    @override
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """The source holds what this rank holds."""
        return self._start("broadcast", sum(t.nbytes for t in tensors), None, tensors)

    @override
    def barrier(self, opts: Any = None) -> dist.Work:
        """All others are here."""
        return self._start("barrier", 0, None, [])

    def monitored_barrier(self, *args: object, **kwargs: object) -> None:
        """Likewise; Lightning's around the preparation of data."""
        self.barrier().wait()

    def _fill(self, rows: Tensor, shard: Tensor) -> None:
        """Write ``shard``, ``(n,)``, into every row, but not over itself where that is one."""
        mine, rank = rows[self.rank()], self.rank()
        for others in (rows[:rank], rows[rank + 1 :]):
            others.copy_(shard)
        if mine.data_ptr() != shard.data_ptr():
            mine.copy_(shard)

    def _factor(self, opts: Any) -> int:
        """By which equal parts of all ranks grow when they are reduced."""
        kinds, operation = dist.ReduceOp, dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if operation == kinds.SUM:
            return self.size()
        # Its own way to be equal knows no tuple that it could be found in.
        if any(operation == kind for kind in (kinds.AVG, kinds.MAX, kinds.MIN)):
            return 1
        raise NotImplementedError(
            f"a reduction on a simulated network: expected a sum, mean, maximum or minimum, got "
            f"{operation}. Reduce with one of these."
        )

    def _start(
        self, kind: str, nbytes: int, move: Callable[[], object] | None, result: list[Tensor]
    ) -> dist.Work:
        return self.transfers.start(
            Transfer(kind, nbytes, self.size(), move, result, self._per_host)
        )


@contextmanager
def simulated(
    network: Network, device_type: str = "cpu", *, clock: Clock | None = None, rank: int = 0
) -> Iterator[Usage]:
    """Within, this process is one of ``network.world_size`` ranks that train together.

    Args:
        network: The ranks and their links.
        device_type: Where the model computes: ``cpu`` or ``cuda``.
        clock: Takes the time instead of this process; then no data moves.
        rank: Which one this process is.

    Yields:
        What the collectives took so far; grows. On CUDA, :func:`find_usage` brings it up to date.

    Raises:
        RuntimeError: There is a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "a simulated network: expected no process group, got one. Call "
            "destroy_process_group() first."
        )
    transfers, backend = _Transfers(network, clock), DEVICE_TO_BACKEND[device_type]

    def create(group: Any, options: object) -> SimulatedGroup:
        ranks = group.global_ranks_in_group or range(network.world_size)  # none: all
        return SimulatedGroup(transfers, backend, group.group_rank, ranks)

    # What ranks agree on is on CPU, wherever they compute.
    devices = sorted({"cpu", device_type})
    dist.Backend.register_backend(backend, create, extended_api=True, devices=devices)
    expect_no_others(backend)
    store = HashStore()
    dist.init_process_group(backend, rank=rank, world_size=network.world_size, store=store)
    try:
        yield transfers.settled_usage()
    finally:
        dist.destroy_process_group()
        transfers.close()


def find_usage() -> Usage | None:
    """What collectives took so far, where the default group is simulated; does not grow."""
    group = dist.group.WORLD
    return group.transfers.settled_usage().copy() if isinstance(group, SimulatedGroup) else None
