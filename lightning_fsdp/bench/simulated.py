"""A process group of one process: its other ranks are a model of the time that they would take.

::

    with simulated(Network(world_size=64, bandwidth_gb_s=25, latency_us=10)) as usage:
        ...  # any engine, as it is: dist.get_world_size() is 64, and this is rank 0

Every other rank is taken to hold what this one holds: a gather fills all slots with this rank's
shard, a sum is this rank's part times the number of ranks. So values stay finite, and no more.

Collectives wait in one queue. A thread moves the data, and then sleeps until the time is over that
the network would have taken; whoever waits for the collective waits that long:

    issued     A  B
    network    [   A   ][   B   ]     end = max(issued, end of the one before) + modelled duration
    waiting           A         B

CPU only: what overlaps on CUDA is a matter of its streams, which this thread does not know.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from typing_extensions import override

from lightning_fsdp.bench.network import Cost, Network
from lightning_fsdp.core.agreement import BACKENDS_WITHOUT_OTHERS

BACKEND = "simulated"
_BURNT_NUMEL = 2**16  # copied at a time to occupy a core: some ten microseconds

_Future = torch.futures.Future[list[Tensor]]


@dataclass
class Usage:
    """What collectives took so far, those of all groups together.

    Attributes:
        calls: By kind of collective.
        sent_bytes: By this rank.
        busy_s: Seconds of transfer, as modelled.
        waited_s: Seconds for which the program waited for transfers: exposed communication.
        sees_waits: False once a wait went unseen: DDP waits where Python does not look.
        late_s: Seconds by which transfers took longer here than on the network. Where they count,
            the figures are this machine's and not the model's.
    """

    calls: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0
    sees_waits: bool = True
    late_s: float = 0.0

    def copy(self) -> Usage:
        """As it is now."""
        return replace(self, calls=Counter(self.calls))

    def per_step_since(self, before: Usage, num_steps: int) -> dict[str, Any]:
        """JSON: what each of some steps took; ``waited_s`` is null where waits went unseen."""
        calls = self.calls - before.calls
        waited_s = (self.waited_s - before.waited_s) / num_steps
        return {
            "calls": {kind: n / num_steps for kind, n in calls.items()},
            "sent_bytes": (self.sent_bytes - before.sent_bytes) / num_steps,
            "busy_s": (self.busy_s - before.busy_s) / num_steps,
            "waited_s": waited_s if self.sees_waits else None,
            "late_s": (self.late_s - before.late_s) / num_steps,
        }


@dataclass(frozen=True, eq=False)
class _Transfer:
    """A collective in the queue.

    Attributes:
        move: Writes the results here, and keeps the tensors until then.
        cost: On the network.
        issued_s: When it was started.
        future: Done when it is over; its value is ``result``.
        result: What DDP reads.
    """

    move: Callable[[], None]
    cost: Cost
    issued_s: float
    future: _Future
    result: list[Tensor]


class _Work(dist.Work):
    """What an asynchronous collective returns."""

    def __init__(self, future: _Future, usage: Usage) -> None:
        super().__init__()
        self._future = future
        self._usage = usage

    @override
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        start_s = time.perf_counter()
        self._future.wait()
        self._usage.waited_s += time.perf_counter() - start_s
        return True

    @override
    def is_completed(self) -> bool:
        return self._future.done()

    @override
    def get_future(self) -> _Future:
        self._usage.sees_waits = False
        return self._future


class _Queue:
    """One transfer after another, by a thread of its own."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.usage = Usage()
        self._transfers: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="simulated network", daemon=True)
        self._thread.start()

    def start(
        self,
        kind: str,
        nbytes: int,
        group_size: int,
        *,
        move: Callable[[], None],
        result: list[Tensor],
    ) -> _Work:
        """Put a collective into the queue; see :meth:`Network.cost`."""
        cost = self.network.cost(kind, nbytes, group_size)
        self.usage.calls[kind] += 1
        self.usage.sent_bytes += cost.sent_bytes
        self.usage.busy_s += cost.duration_s
        future = _Future()
        self._transfers.put(_Transfer(move, cost, time.perf_counter(), future, result))
        return _Work(future, self.usage)

    def close(self) -> None:
        """End the thread, after all that is in the queue."""
        self._transfers.put(None)
        self._thread.join()

    def _run(self) -> None:
        end_s = 0.0
        while (transfer := self._transfers.get()) is not None:
            end_s = max(transfer.issued_s, end_s) + transfer.cost.duration_s
            try:
                occupied_until_s = time.thread_time() + transfer.cost.occupied_s
                with torch.no_grad():
                    transfer.move()
                    _occupy_core(occupied_until_s)
            except Exception as error:  # noqa: BLE001 (whoever waits gets it)
                transfer.future.set_exception(error)  # type: ignore[arg-type]
                continue
            remaining_s = end_s - time.perf_counter()
            if remaining_s > 0:
                time.sleep(remaining_s)
            else:
                end_s -= remaining_s
                self.usage.late_s -= remaining_s
            transfer.future.set_result(transfer.result)
            del transfer  # and its tensors, which must not outlive the wait


def _occupy_core(until_s: float) -> None:
    """Compute up to that time of this thread, as a network stack does; Python runs on meanwhile."""
    if time.thread_time() >= until_s:
        return
    source, target = torch.empty(2, _BURNT_NUMEL)
    while time.thread_time() < until_s:
        target.copy_(source)


class SimulatedGroup(dist.ProcessGroup):
    """One group of ranks; torch calls its methods as those of any backend.

    torch 2.13 renamed some of them, and asks for the new names or the old: both are here.
    """

    def __init__(self, transfers: _Queue, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)  # type: ignore[call-arg]
        self._transfers = transfers
        self._name = BACKEND

    @property
    def usage(self) -> Usage:
        """What collectives took so far, those of all groups together."""
        return self._transfers.usage

    # torch registers the group under the name that it sets, and asks for it here.

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """What torch registered it under."""
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 (torch's)
        """The name that the group was asked for by."""
        return BACKEND

    def all_gather_single(self, output: Tensor, mine: Tensor, opts: Any = None) -> dist.Work:
        """This rank's shard lands in every slot."""
        rows, shard = output.data.view(self.size(), -1), mine.data.view(-1)
        return self._start("all_gather", rows.nbytes, lambda: self._fill(rows, shard), [output])

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any) -> dist.Work:
        """This rank's slot, reduced with itself."""
        rows, shard = whole.data.view(self.size(), -1), output.data.view(-1)
        reduce = self._reduction(opts)

        def move() -> None:
            shard.copy_(rows[self.rank()])
            reduce(shard)

        return self._start("reduce_scatter", rows.nbytes, move, [output])

    def all_to_all_single(
        self,
        output: Tensor,
        whole: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """This rank's slot comes from every rank.

        Raises:
            NotImplementedError: Slots of different sizes.
        """
        if len({*output_sizes}) > 1 or len({*input_sizes}) > 1:
            raise NotImplementedError(
                f"all_to_all_single on a simulated network: expected slots of one size, got "
                f"{list(input_sizes)} to send and {list(output_sizes)} to receive. Pad them."
            )
        received, rows = (t.data.view(self.size(), -1) for t in (output, whole))
        shard = rows[self.rank()]
        return self._start("all_to_all", rows.nbytes, lambda: self._fill(received, shard), [output])

    # DTensor's collectives come from C++, which asks for lists.

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Each as a collective of its own."""
        pairs = zip(outputs, inputs, strict=True)
        return [self.all_gather_single(*pair) for pair in pairs][-1]

    def reduce_scatter_single_coalesced(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        """Each as a collective of its own."""
        pairs = zip(outputs, inputs, strict=True)
        return [self.reduce_scatter_single(*pair, opts) for pair in pairs][-1]

    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

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
        reduce = self._reduction(opts)

        def move() -> None:
            for tensor in tensors:
                reduce(tensor.data)

        return self._start("all_reduce", sum(t.nbytes for t in tensors), move, tensors)

    @override
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """The source holds what this rank holds."""
        return self._start("broadcast", sum(t.nbytes for t in tensors), _nothing, tensors)

    @override
    def barrier(self, opts: Any = None) -> dist.Work:
        """All others are here."""
        return self._start("barrier", 0, _nothing, [])

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

    def _reduction(self, opts: Any) -> Callable[[Tensor], object]:
        """In place: what the reduction of equal parts of all ranks is."""
        operation, kinds, size = opts.reduceOp, dist.ReduceOp, self.size()
        if operation == kinds.SUM:
            return lambda tensor: tensor.mul_(size)
        # Its own way to be equal knows no tuple that it could be found in.
        if any(operation == kind for kind in (kinds.AVG, kinds.MAX, kinds.MIN)):
            return lambda tensor: tensor
        raise NotImplementedError(
            f"a reduction on a simulated network: expected a sum, mean, maximum or minimum, got "
            f"{operation}. Reduce with one of these."
        )

    def _start(
        self, kind: str, nbytes: int, move: Callable[[], None], result: list[Tensor]
    ) -> dist.Work:
        return self._transfers.start(kind, nbytes, self.size(), move=move, result=result)


def _nothing() -> None:
    """What a collective moves whose result is here already."""


@contextmanager
def simulated(network: Network) -> Iterator[Usage]:
    """Within, this process is rank 0 of ``network.world_size`` ranks that train together.

    Returns:
        What the collectives took so far; grows.

    Raises:
        RuntimeError: There is a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "a simulated network: expected no process group, got one. Call "
            "destroy_process_group() first."
        )
    transfers = _Queue(network)

    def create(store: object, rank: int, world_size: int, timeout: object) -> SimulatedGroup:
        return SimulatedGroup(transfers, rank, world_size)

    dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
    BACKENDS_WITHOUT_OTHERS.add(BACKEND)
    store = HashStore()
    dist.init_process_group(BACKEND, rank=0, world_size=network.world_size, store=store)
    try:
        yield transfers.usage
    finally:
        dist.destroy_process_group()
        transfers.close()


def find_usage() -> Usage | None:
    """What collectives took so far, where the default group is simulated."""
    group = dist.group.WORLD
    return group.usage if isinstance(group, SimulatedGroup) else None
