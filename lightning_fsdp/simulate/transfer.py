"""A collective on its way over a simulated network, and what all of them took of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import TypedDict, override

from lightning_fsdp.simulate.network import Cost, Network

Future = torch.futures.Future[list[Tensor]]


@dataclass(frozen=True, eq=False)
class Transfer:
    """What a collective moves, and where.

    Attributes:
        kind: A collective; see :meth:`Network.cost`.
        nbytes: Of the whole tensor.
        group_size: Ranks that take part.
        move: Writes the result, and keeps the tensors until then; ``None`` where it is there as
            it stands.
        result: What DDP reads.
        per_host: Of these ranks, on each host; ``None``: they are neighbours.
    """

    kind: str
    nbytes: int
    group_size: int
    move: Callable[[], object] | None
    result: list[Tensor]
    per_host: int | None = None

    @property
    def written_bytes(self) -> int:
        """By ``move``; a reduce-scatter writes one slot."""
        if self.move is None:
            return 0
        return self.nbytes // self.group_size if self.kind == "reduce_scatter" else self.nbytes

    @property
    def leaves_host(self) -> bool:
        """Whether other hosts take part."""
        return self.per_host is not None and self.per_host < self.group_size


@dataclass(eq=False)
class Work(dist.Work):
    """What an asynchronous collective returns; keeps its tensors until it was waited for.

    Attributes:
        transfer: The collective.
        let_wait: Lets the program, or its stream, wait.
        is_over: Whether it has ended.
        future_of: Gives what DDP waits for in C++; ``None``: nobody does.
    """

    transfer: Transfer
    let_wait: Callable[[], object]
    is_over: Callable[[], bool]
    future_of: Callable[[list[Tensor]], Future] | None = None

    def __post_init__(self) -> None:
        super().__init__()

    @override
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.let_wait()
        self.transfer = replace(self.transfer, move=None, result=[])
        return True

    @override
    def is_completed(self) -> bool:
        return self.is_over()

    @override
    def get_future(self) -> Future:
        return self.future_of(self.transfer.result) if self.future_of else super().get_future()


class StepUsage(TypedDict):
    """What a step took of a network; ``waited_s`` is ``None`` where waits went unseen."""

    calls: dict[str, float]
    sent_bytes: float
    busy_s: float
    waited_s: float | None
    late_s: float


@dataclass
class Usage:
    """What collectives took so far, those of all groups together.

    Attributes:
        calls: By kind of collective.
        sent_bytes: By this rank.
        busy_s: Seconds of transfer, as modelled.
        waited_s: Seconds for which the program waited for transfers: exposed communication.
        sees_waits: False once a wait went unseen: DDP waits where Python does not look, and on CUDA
            torch's FSDP lets streams of its own wait.
        late_s: Seconds by which transfers took longer here than on the network. Where they count,
            the figures are this machine's and not the model's.
    """

    calls: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0
    sees_waits: bool = True
    late_s: float = 0.0

    def count(self, transfer: Transfer, network: Network) -> Cost:
        """A collective was started; returns what it takes of the network."""
        cost = network.cost(transfer.kind, transfer.nbytes, transfer.group_size, transfer.per_host)
        self.calls[transfer.kind] += 1
        self.sent_bytes += cost.sent_bytes
        self.busy_s += cost.duration_s
        return cost

    def copy(self) -> Usage:
        """As it is now."""
        return replace(self, calls=Counter(self.calls))

    def per_step_since(self, before: Usage, num_steps: int) -> StepUsage:
        """What each of some steps took."""
        calls = self.calls - before.calls
        waited_s = (self.waited_s - before.waited_s) / num_steps
        return {
            "calls": {kind: n / num_steps for kind, n in calls.items()},
            "sent_bytes": (self.sent_bytes - before.sent_bytes) / num_steps,
            "busy_s": (self.busy_s - before.busy_s) / num_steps,
            "waited_s": waited_s if self.sees_waits else None,
            "late_s": (self.late_s - before.late_s) / num_steps,
        }
