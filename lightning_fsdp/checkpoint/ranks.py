"""Steps that all ranks take, and that succeed on all of them or fail on all of them.

    on_each   every rank works, then every rank learns what came out on every rank
    here      every rank works, and has its own result, if all of them have one
    on_first  rank 0 works, then every rank learns what came out
    lead      rank 0 works, and calls the others where it needs them

A rank that fails tells the others in the exchange that they all come to anyway, so nobody waits for
it, and the error that is raised is the same everywhere. The exchange has a gloo group of its own: a
save in the background must not meet the collectives of training. Nor may two of these meet, so each
begins when the save in the background has ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lightning_fsdp.checkpoint.background import join_last
from lightning_fsdp.checkpoint.damage import DamagedCheckpoint
from lightning_fsdp.core.ranks.agreement import ranks_by_statement
from lightning_fsdp.core.ranks.groups import control_of
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor
from lightning_fsdp.core.torch_internals import group_timeout

_Result = TypeVar("_Result")

# What an error is raised as on the ranks where it did not happen, the most telling first.
_KINDS: tuple[type[Exception], ...] = (
    DamagedCheckpoint,
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    PermissionError,
    OSError,
    TypeError,
    ValueError,
    NotImplementedError,
    RuntimeError,
)


class LostRankError(RuntimeError):
    """A rank ended or did not come, so what it did is not known."""


@dataclass(frozen=True)
class _Failure:
    kind: type[Exception]
    message: str
    errno: int | None


class Ranks:
    """All ranks of the default process group; without one, this process alone.

    Attributes:
        rank: This process among them.
        world_size: How many they are.
    """

    def __init__(self) -> None:
        """Collective, the first time after the default process group was made."""
        join_last()
        is_many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if is_many else 0
        self.world_size = dist.get_world_size() if is_many else 1
        self._group = _beside_training.get() if is_many else None

    def on_each(self, doing: str, work: Callable[[], _Result]) -> list[_Result]:
        """Do ``work`` on every rank; what every rank returned, by rank. Collective.

        Args:
            doing: What this is about, the first words of an error.
            work: No collective. What it returns is pickled.

        Raises:
            Exception: The same on every rank, if ``work`` raised on any; the message names those.
            LostRankError: A rank ended or did not come.
        """
        error: Exception | None = None
        outcome: _Result | _Failure
        try:
            outcome = work()
        except Exception as caught:  # noqa: BLE001 (whatever it is, the others must hear of it)
            error = caught
            kind = next((kind for kind in _KINDS if isinstance(caught, kind)), RuntimeError)
            number = caught.errno if isinstance(caught, OSError) else None
            outcome = _Failure(kind, str(caught) or type(caught).__name__, number)
        outcomes = self._exchange(doing, outcome)
        failures = {r: each for r, each in enumerate(outcomes) if isinstance(each, _Failure)}
        if failures:
            first = next(iter(failures.values()))
            shared = first.kind(self._describe(doing, failures))
            if isinstance(shared, OSError):
                shared.errno = first.errno
            raise shared from error
        return outcomes

    def here(self, doing: str, work: Callable[[], _Result], alike: str = "") -> _Result:
        """Do ``work`` on every rank; what it returned here. Collective; see ``on_each``.

        Args:
            doing: What this is about, the first words of an error.
            work: No collective.
            alike: What has to be the same on every rank, in words.

        Raises:
            ValueError: That differs.
        """
        made: list[_Result] = []

        def make() -> str:
            made.append(work())
            return alike

        refuse_different(self.on_each(doing, make))
        return made[0]

    def on_first(self, doing: str, work: Callable[[], _Result]) -> _Result:
        """Do ``work`` on rank 0; what it returned, on every rank. Collective; see ``on_each``."""
        refuse_different(self._exchange(doing, doing))
        results = self.on_each(doing, lambda: work() if self.rank == 0 else None)
        return cast(_Result, results[0])

    def lead(
        self,
        doing: str,
        work: Callable[[Callable[[int], None]], None],
        take_part: Callable[[int], None],
    ) -> None:
        """Rank 0 works, and on its way calls the others to take part. Collective; see ``on_each``.

        Args:
            doing: What this is about, the first words of an error.
            work: Runs on rank 0. It is given what calls the others, with a number from 0 on.
            take_part: Runs on the others with each of these numbers.
        """
        end = -1

        def call(number: int) -> None:
            if self._group is not None:
                with self._heard(doing):
                    dist.broadcast(torch.tensor(number, device="cpu"), src=0, group=self._group)

        def lead() -> None:
            try:
                work(call)
            finally:
                call(end)

        def follow() -> None:
            number = torch.tensor(end, device="cpu")
            while True:
                with self._heard(doing):
                    dist.broadcast(number, src=0, group=self._group)
                if number == end:
                    return
                take_part(int(number))

        refuse_different(self._exchange(doing, doing))
        self.on_each(doing, lead if self.rank == 0 else follow)

    def _exchange(self, doing: str, outcome: Any) -> list[Any]:
        if self._group is None:
            return [outcome]
        outcomes: list[Any] = [None] * self.world_size
        with self._heard(doing):
            dist.all_gather_object(outcomes, outcome, group=self._group)
        return outcomes

    @contextmanager
    def _heard(self, doing: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise LostRankError(
                f"{doing} (rank {self.rank} of {self.world_size}): expected every rank to get "
                "here, but at least one ended or did not come. Checkpoints that were finished "
                "before are whole. Start again from the last one."
            ) from error

    def _describe(self, doing: str, failures: dict[int, _Failure]) -> str:
        found = ranks_by_statement({rank: failure.message for rank, failure in failures.items()})
        if self.world_size == 1:
            return f"{doing}: {'; '.join(found)}"
        told = (f"({ranks} of {self.world_size}): {message}" for message, ranks in found.items())
        return f"{doing} " + "; ".join(told)


def refuse_different(doing: Sequence[str]) -> None:
    """Refuse a save in which ranks save different things.

    Args:
        doing: What each rank is about to do, by rank.

    Raises:
        ValueError: They differ, as where parts of the ranks have models of their own.
    """
    found = ranks_by_statement(dict(enumerate(doing)))
    if len(found) > 1:
        got = "; ".join(f"{each} ({ranks})" for each, ranks in found.items())
        raise ValueError(
            "checkpoints: expected all ranks of the default process group to save or load alike, "
            f"got {got}. Give the same path on all. Of a model that only some of them train, save "
            "full_state_dict(module), which is collective over those alone."
        )


def words_for_ranks(tensors: Iterable[object]) -> str:
    """Which ranks hold sharded tensors together, for ``refuse_different``; "" if all ranks do."""
    holders = {holding for tensor in tensors if (holding := _holders(tensor)) is not None}
    parts = sorted(each for each in holders if len(each) < dist.get_world_size())
    return "".join(f" of a model of ranks {', '.join(map(str, each))}" for each in parts)


def _holders(tensor: object) -> tuple[int, ...] | None:
    if isinstance(tensor, ShardedTensor):
        return control_of(tensor.spec.communicator).ranks
    if isinstance(tensor, DTensor):
        return tuple(sorted(tensor.device_mesh.mesh.flatten().tolist()))
    return None


class GroupBeside:
    """A group of gloo beside the default one, with the same ranks: one for each default group."""

    # Weakly: ``destroy_process_group`` ends both.
    _known: tuple[weakref.ref[dist.ProcessGroup], weakref.ref[dist.ProcessGroup]] | None = None

    def get(self) -> dist.ProcessGroup:
        """Collective, the first time after the default process group was made."""
        default = dist.group.WORLD
        assert default is not None, "asked only where a default group is initialized"
        group = self._known[1]() if self._known and self._known[0]() is default else None
        if group is None:
            group = dist.new_group(backend="gloo", timeout=group_timeout(default))
            self._known = weakref.ref(default), weakref.ref(group)
        return group


_beside_training = GroupBeside()
