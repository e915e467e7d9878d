"""Every collective of the core that moves data: one gather, one reduction, one mean of replicas.

:class:`Communicator` is the one door to a sharding group. Data moves asynchronously through it and
is counted there. Two ways lead to the same result, chosen by the backend:

=========  ========================================================  ====================
operation  gloo, up to 8 ranks                                       every other backend
=========  ========================================================  ====================
gather     a send and a receive per pair, in place                   all-gather, in place
reduce     sends and receives per pair, then a sum in rank order     reduce-scatter, or
                                                                     all-to-all and a sum
=========  ========================================================  ====================

gloo's ring algorithms cost two to three times the pairs at these sizes. Its sum in rank order gives
the same bits whichever rank owns a shard.

Gradients that are narrower than the dtype of their sum travel as they are: every rank gets all
ranks' parts of its shard, and widens them as it adds them up. A reduce-scatter, which sums on the
way, would send them widened: twice the bytes for bf16 summed in fp32, and for the same values.
fp16 travels so too where it is also the dtype of the mean, since the sum may be too large for it.

On a 2-D mesh the columns hold shards and the rows hold replicas. Gathers and reductions stay in a
row; then every shard of gradients is averaged down its column, by an all-reduce on any backend:

                 shard 0   shard 1
    replica 0    rank 0    rank 1    gather, reduce within
    replica 1    rank 2    rank 3    a row
                 average down a column

Note: lifetimes
c10d's asynchronous ``Work`` already is the pair of events that a collective needs on CUDA: it
starts when everything queued on the current stream at the call has finished, and ``wait()`` makes
the current stream (not the host) wait for its end. Buffers are allocated, freed and computed with
on one stream, and a :class:`Pending` keeps what it reads or writes until it was waited for; so no
memory is reused early, and ``record_stream`` is not needed. On CPU the same code runs with host
waits.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp.core import host_memory, torch_internals
from lightning_fsdp.core.agreement import ControlGroup
from lightning_fsdp.core.layout import FlatLayout, complement

_MAX_PAIRWISE_WORLD_SIZE = 8
_LARGE_NUMEL = 2**14  # a message of its own costs about as much as copying so many elements
_BLOCK_NUMEL = 2**20  # widened at a time: 4 MB in fp32, which caches hold


@dataclass
class Traffic:
    """What one kind of collective has moved, as this rank sent it.

    Attributes:
        calls: Collectives issued, however many messages each takes.
        sent_bytes: Payload that left this rank.
    """

    calls: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a region (or of a shard).

    Attributes:
        offset: Of its first element.
        data: ``(n,)``.
    """

    offset: int
    data: Tensor

    @property
    def extent(self) -> tuple[int, int]:
        """First and past-the-last element."""
        return self.offset, self.offset + self.data.numel()

    @property
    def place(self) -> tuple[int, int]:
        """First element and number of elements."""
        return self.offset, self.data.numel()


@dataclass(eq=False)
class Pending:
    """A collective in flight, and the stages that follow it, each of which starts from a result.

    Attributes:
        what: The operation and this rank, for the message if it fails.
        works: What to wait for, each with the ranks that it depends on.
        finish: Runs once after the wait, on the current stream, and gives the result.
        keeps: Tensors that the collective reads or writes; given up once it was waited for.
        stages: Still to come: what a profile calls each, its unit, and what starts it.
    """

    what: str
    works: Sequence[tuple[dist.Work, str]]
    finish: Callable[[], Tensor]
    keeps: Sequence[Tensor] = field(default=(), repr=False)
    stages: list[tuple[str, str, Stage]] = field(default_factory=list)

    def then(self, name: str, unit_name: str, stage: Stage) -> Pending:
        """The same, with one more stage, which starts from the result of the one before."""
        self.stages.append((name, unit_name, stage))
        return self

    def advance(self) -> bool:
        """Wait for the present stage and start the next; ``False`` where none is to come.

        Raises:
            RuntimeError: Another rank did not take part within the group's timeout.
        """
        if not self.stages:
            return False
        name, unit_name, stage = self.stages.pop(0)
        with torch_internals.profiled(name, unit_name):
            following = stage(self._end())
        self.what, self.works = following.what, following.works
        self.finish, self.keeps = following.finish, following.keeps
        return True

    def wait(self) -> Tensor:
        """Make the current stream (on CPU: the caller) wait for the result, and return it. Once.

        Raises:
            RuntimeError: Another rank did not take part within the group's timeout.
        """
        while self.advance():
            pass
        return self._end()

    def give_up(self) -> None:
        """Wait for what is in flight, and start no further stage.

        Raises:
            RuntimeError: Another rank did not take part within the group's timeout.
        """
        self.stages.clear()
        self._end()

    def _end(self) -> Tensor:
        works, self.works = self.works, ()
        for work, ranks in works:
            with _named(self.what, ranks):
                work.wait()
        self.keeps = ()
        return self.finish()


Stage = Callable[[Tensor], Pending]


@contextlib.contextmanager
def _named(what: str, ranks: str) -> Iterator[None]:
    """Say which collective failed where others did not take part.

    They may be gone when it starts: a rank that was stopped for longer than the timeout finds their
    connections closed.
    """
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{what}: expected {ranks} to take part within the group's timeout, but that did not "
            "happen: it left the recorded order of units, waits elsewhere or has ended. Look for "
            "the first error on the other ranks; make all ranks run the same units in the same "
            "order."
        ) from error


class Communicator:
    """The collectives of one sharding group, and of its replicas if it has some.

    Groups are referred to weakly: ``destroy_process_group`` ends them when it is called, as their
    threads must not outlive it.

    Attributes:
        rank: This process in the sharding group.
        world_size: Ranks in the sharding group.
        num_replicas: Sharding groups that train the same model; 1 on a 1-D mesh.
        ranks: Of the default group, those in the sharding group.
        device: Of the tensors that the data group moves; the one that was current at the sharding.
            Which is current is each thread's own affair, so it is not asked again.
        exchanges_in_pairs: Which of the two ways data moves.
        control: All ranks that train together, and what they agree on.
        traffic: What has moved, by kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None = None,
        everyone: Sequence[int] | None = None,
    ) -> None:
        """Collective.

        Args:
            group: The sharding group.
            replicas: The ranks that hold the same shard as this one.
            everyone: All ranks of all replicas; needed with ``replicas``.
        """
        self._group = weakref.ref(group)
        self._replicas = None if replicas is None else weakref.ref(replicas)
        self.num_replicas = 1 if replicas is None else dist.get_world_size(replicas)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        kinds = "all_gather", "reduce_scatter", "all_reduce"
        self.traffic = {kind: Traffic() for kind in kinds}
        backend = dist.get_backend(group)
        self.device = torch.device("cpu")
        if "nccl" in backend:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.exchanges_in_pairs = exchanges_in_pairs(backend, self.world_size)
        self.control = ControlGroup(
            everyone or self.ranks,
            torch_internals.group_timeout(group),
            data_backend=backend,
        )

    def __deepcopy__(self, memo: object) -> Communicator:
        return self  # one per group; copies of a module share it

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Communicator:
        """The communicator of a group; one per group, made at the first request. Collective."""
        return cls._known(group, None, None)

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> Communicator:
        """The communicator of a mesh: sharded over its last dimension, replicated over the first.

        Collective over the mesh.

        Args:
            mesh: 1-D or 2-D; one replica is the same as none.
        """
        if mesh.ndim == 1 or mesh.size(0) == 1:
            return cls.of(mesh.get_group(mesh.ndim - 1))
        return cls._known(mesh.get_group(1), mesh.get_group(0), mesh.mesh.flatten().tolist())

    @classmethod
    def _known(
        cls,
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        everyone: Sequence[int] | None,
    ) -> Communicator:
        of_group = _communicators.setdefault(group, {})
        name = None if replicas is None else replicas.group_name
        if name not in of_group:
            of_group[name] = cls(group, replicas, everyone)
        return of_group[name]

    @property
    def mesh_rank(self) -> int:
        """This process among all that train together, replicas included; what messages name."""
        return self.control.rank

    @property
    def group(self) -> dist.ProcessGroup:
        """The data group."""
        return torch_internals.alive(self._group)

    def spans_same_ranks(self, other: Communicator) -> bool:
        """Whether ``other`` has the same shards and the same replicas."""
        return self.ranks == other.ranks and self.control.ranks == other.control.ranks

    def __str__(self) -> str:
        replicas = f"{self.num_replicas} replicas of " if self.num_replicas > 1 else ""
        return f"{replicas}{self.world_size} shards on ranks {list(self.control.ranks)}"

    def gather(self, whole: Tensor, unit_name: str) -> Pending:
        """All-gather in place: every rank's shard lands in its slot of ``whole``.

        Args:
            whole: ``(world_size * shard_numel,)``; this rank's slot is filled, the others are
                written.
            unit_name: For the message if it fails.
        """
        what = f"gather of unit {unit_name!r} {self._where}"
        slots = whole.view(self.world_size, -1)
        self._count("all_gather", slots[0].nbytes * (self.world_size - 1))
        works: list[tuple[dist.Work, str]] = []
        if self.world_size > 1 and self.exchanges_in_pairs:
            mine = slots[self.rank]
            works = self._exchange(
                what,
                lambda peer: [mine],
                lambda peer: [slots[peer]],
                _tag_of(unit_name, reduces=False),
            )
        elif self.world_size > 1:
            group = self.group
            with _named(what, "every rank"):
                work = torch_internals.all_gather_single(
                    whole, slots[self.rank], group=group, async_op=True
                )
            works = [(work, "every rank")]
        return Pending(what, works, lambda: whole, keeps=(whole,))

    def reduce(
        self,
        gradients: dict[int, Tensor],
        layout: FlatLayout,
        unit_name: str,
        *,
        sent_dtype: torch.dtype,
        dtype: torch.dtype,
    ) -> Pending:
        """Reduce-scatter: the mean over ranks of this rank's shard of a region.

        Over replicas a stage follows: the mean of their shards. As every collective, its stages
        start in the same order on all ranks.

        Args:
            gradients: This rank's own, by slot, of any dtype; emptied, each as soon as it is not
                needed. Those of the other slots are zeros.
            layout: Of the region.
            unit_name: For the message if it fails.
            sent_dtype: In which they travel, the same on every rank.
            dtype: Of the sum: that, or one that holds all its values.

        Returns:
            The collective; its result is the shard, ``(shard_numel,)`` of ``dtype``, padding zero.
            On one rank that is the region itself.

        Source: ZeRO (arXiv 1910.02054), section 5.
        """
        what = f"reduction of unit {unit_name!r} {self._where}"
        if self.exchanges_in_pairs and self.world_size > 1:
            pieces = [
                _packed(gradients, layout, slots, *layout.extent(slots), sent_dtype, self.device)
                for slots in layout.runs(_LARGE_NUMEL)
            ]
            reduction = self._reduce_in_pairs(pieces, layout.shard_numel, what, unit_name, dtype)
        else:
            slots = range(len(layout.slots))
            whole = _packed(gradients, layout, slots, 0, layout.numel, sent_dtype, self.device)
            reduction = self._reduce_scatter(whole.data, layout.shard_numel, what, dtype)
        if self._replicas is not None:
            reduction.then("average", unit_name, lambda shard: self._average(shard, unit_name))
        return reduction

    def _reduce_scatter(
        self, region: Tensor, shard_numel: int, what: str, dtype: torch.dtype
    ) -> Pending:
        self._count("reduce_scatter", region.nbytes // self.world_size * (self.world_size - 1))
        if self.world_size == 1:
            return Pending(what, (), lambda: region.to(dtype))
        group = self.group
        if region.dtype != dtype or _may_overflow(dtype):
            received = torch.empty_like(region)
            with _named(what, "every rank"):
                exchange = dist.all_to_all_single(received, region, group=group, async_op=True)
            rows = received.view(self.world_size, shard_numel)
            works = [(exchange, "every rank")]
            return Pending(what, works, lambda: _mean_of(rows, dtype), keeps=(region,))
        shard = region.new_empty(shard_numel)
        with _named(what, "every rank"):
            work = torch_internals.reduce_scatter_single(shard, region, group=group, async_op=True)
        works = [(work, "every rank")]
        return Pending(what, works, lambda: shard.div_(self.world_size), keeps=(region, shard))

    def _reduce_in_pairs(
        self,
        pieces: Sequence[Piece],
        shard_numel: int,
        what: str,
        unit_name: str,
        dtype: torch.dtype,
    ) -> Pending:
        """Every rank sends each other rank that one's shard; the owner sums in rank order."""
        shards = [_cut_out(pieces, r * shard_numel, shard_numel) for r in range(self.world_size)]
        mine = shards[self.rank]
        sent_dtype, device = pieces[0].data.dtype, pieces[0].data.device
        received = {
            peer: host_memory.empty(shard_numel, sent_dtype, device) for peer in self._peers()
        }
        for row in received.values():
            for start, stop in complement([piece.extent for piece in mine], 0, shard_numel):
                row[start:stop].zero_()
        sent = [piece.data.nbytes for peer in self._peers() for piece in shards[peer]]
        self._count("reduce_scatter", sum(sent))
        works = self._exchange(
            what,
            lambda peer: [piece.data for piece in shards[peer]],
            lambda peer: [received[peer].narrow(0, *piece.place) for piece in mine],
            _tag_of(f"{unit_name} {pieces[0].data.dtype}", reduces=True),
        )

        def mean_in_rank_order(rows: dict[int, Tensor], dtype: torch.dtype) -> Tensor:
            # Two terms commute to the bit, so the sum may begin with the first row that came.
            first = min(rows)
            shard = rows.pop(first).to(dtype)
            for rank in range(self.world_size):
                if rank == self.rank:
                    for piece in mine:
                        shard.narrow(0, *piece.place).add_(piece.data)
                elif rank != first:
                    shard.add_(rows.pop(rank))
            return shard.div_(self.world_size)

        def mean() -> Tensor:
            if not _may_overflow(dtype):
                return mean_in_rank_order(received, dtype)
            wide = mean_in_rank_order(dict(received), torch.float32).to(dtype)
            narrow = mean_in_rank_order(received, dtype)
            return torch.where(narrow.isfinite(), narrow, wide)

        return Pending(what, works, mean, keeps=[piece.data for piece in pieces])

    def _average(self, shard: Tensor, unit_name: str) -> Pending:
        """All-reduce: the mean over replicas of a shard, which may be overwritten.

        Every replica gets the same bits.
        """
        what = f"mean over replicas of unit {unit_name!r} {self._where}"
        dtype, shard = shard.dtype, shard.float() if _may_overflow(shard.dtype) else shard
        share = shard.nbytes // self.num_replicas
        self._count("all_reduce", 2 * (self.num_replicas - 1) * share)
        assert self._replicas is not None, "there is such a stage with replicas alone"
        group = torch_internals.alive(self._replicas)
        with _named(what, "every replica"):
            work = dist.all_reduce(shard, group=group, async_op=True)
        works = [(work, "every replica")]
        return Pending(what, works, lambda: shard.div_(self.num_replicas).to(dtype), keeps=(shard,))

    def all_gather_slices(self, mine: Tensor, what: str) -> Tensor:
        """Every rank's ``mine`` of shape ``(n,)`` as rows of ``(world_size, n)``. Synchronous.

        Args:
            mine: ``(n,)``, the same ``n`` on every rank.
            what: The operation, for the message if it fails.
        """
        rows = mine.new_empty(self.world_size, mine.numel())
        if self.world_size == 1:
            return rows.copy_(mine)
        if mine.numel():
            group = self.group
            with _named(f"{what} {self._where}", "every rank"):
                torch_internals.all_gather_single(rows.view(-1), mine.contiguous(), group=group)
        return rows

    def broadcast_each(self, parts: Sequence[Tensor], what: str) -> None:
        """Every rank's part to all ranks, in place. Synchronous.

        Args:
            parts: ``(n,)`` per rank; this rank's has its values.
            what: The operation, for the message if it fails.
        """
        group = self.group
        with _named(f"{what} {self._where}", "every rank"):
            for rank, part in enumerate(parts):
                if part.numel() and self.world_size > 1:
                    # As bytes: gloo does not know every dtype.
                    dist.broadcast(part.view(torch.uint8), group=group, group_src=rank)

    def _exchange(
        self,
        what: str,
        to: Callable[[int], Sequence[Tensor]],
        into: Callable[[int], Sequence[Tensor]],
        tag: int,
    ) -> list[tuple[dist.Work, str]]:
        """Start sends to every peer and receives from it, each ``(n,)``, in the same order."""
        works: list[tuple[dist.Work, str]] = []
        group = self.group
        for peer in self._peers():
            with _named(what, f"rank {peer}"):
                for data in into(peer):
                    receive = dist.irecv(data, group=group, group_src=peer, tag=tag)
                    assert receive is not None, "this rank is in the group"
                    works.append((receive, f"rank {peer}"))
                for data in to(peer):
                    send = dist.isend(data, group=group, group_dst=peer, tag=tag)
                    assert send is not None, "this rank is in the group"
                    works.append((send, f"rank {peer}"))
        return works

    @property
    def _where(self) -> str:
        return f"(rank {self.mesh_rank} of {self.control.world_size})"

    def _count(self, kind: str, sent_bytes: int) -> None:
        traffic = self.traffic[kind]
        traffic.calls += 1
        traffic.sent_bytes += sent_bytes

    def _peers(self) -> list[int]:
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]


def exchanges_in_pairs(backend: str, world_size: int) -> bool:
    """Whether ranks of such a group send to each other in pairs."""
    return backend == "gloo" and world_size <= _MAX_PAIRWISE_WORLD_SIZE


@functools.cache
def _tag_of(name: str, *, reduces: bool) -> int:
    """A tag of its own for each name and operation; odd for reductions.

    Pairs that ranks enter with different intentions then never meet: they end in the group's
    timeout, and move nothing into the wrong place. It keeps them apart from the user's own, too.
    """
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 2 << 1 | reduces


def _mean_of(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The mean over the first dimension, ``(n,)`` of ``dtype``; summed in it, or in a wider one."""
    num_rows, numel = rows.shape
    sum_dtype = torch.float32 if _may_overflow(dtype) else dtype
    mean = rows.new_empty(numel, dtype=sum_dtype)
    # On CUDA the sum widens as it reads. On CPU torch makes a wide copy of all that it sums.
    step = numel if rows.is_cuda else max(_BLOCK_NUMEL // num_rows, 1)
    for start in range(0, numel, step):
        block = slice(start, start + step)
        torch.mean(rows[:, block], 0, dtype=sum_dtype, out=mean[block])
    return mean.to(dtype)


def _may_overflow(dtype: torch.dtype) -> bool:
    """Whether a sum over ranks may leave the range of a dtype that holds their mean."""
    return dtype == torch.float16


def _packed(
    gradients: dict[int, Tensor],
    layout: FlatLayout,
    slots: range,
    start: int,
    stop: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Piece:
    """Elements ``[start, stop)`` of a region: the gradients of ``slots``, zeros where none are."""
    if len(slots) == 1 and _fills(gradients.get(slots[0]), stop - start, dtype):
        return Piece(start, gradients.pop(slots[0]).view(-1))  # read from where autograd made it
    region = host_memory.empty(stop - start, dtype, device)
    for padding_start, padding_stop in layout.padding(start, stop):
        region[padding_start - start : padding_stop - start].zero_()
    for index in slots:
        slot = layout.slots[index]
        place = region.narrow(0, slot.offset - start, slot.numel)
        gradient = gradients.pop(index, None)  # freed as soon as it is copied
        if gradient is None:
            place.zero_()
        else:
            place.view(slot.shape).copy_(gradient)
        del gradient
    return Piece(start, region)


def _fills(gradient: Tensor | None, numel: int, dtype: torch.dtype) -> bool:
    return (
        gradient is not None
        and gradient.numel() == numel
        and gradient.dtype == dtype
        and gradient.is_contiguous()
    )


def _cut_out(pieces: Sequence[Piece], start: int, numel: int) -> list[Piece]:
    """What of ``pieces`` lies in ``[start, start + numel)``, with offsets from ``start``."""
    cut = []
    for piece in pieces:
        low = max(piece.offset, start)
        high = min(piece.offset + piece.data.numel(), start + numel)
        if low < high:
            cut.append(Piece(low - start, piece.data[low - piece.offset : high - piece.offset]))
    return cut


# By sharding group, then by the name of the group of replicas.
_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str | None, Communicator]] = (
    weakref.WeakKeyDictionary()
)
