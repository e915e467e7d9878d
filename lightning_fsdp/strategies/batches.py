"""Ranks with different numbers of batches: finished or refused by name, never a hang.

A rank without a batch does not enter the forward, and the others would wait for it in a gather for
ever. So ranks compare before they start, and where lengths cannot be trusted at every batch:

==============================  ===================================================================
loader                          what happens
==============================  ===================================================================
map-style, equal lengths        left alone; the usual case, no cost
training, lengths differ        every rank stops at the shortest, with a warning
evaluation, lengths differ      all batches are used: with the last common batch every unit is
                                gathered and kept, and the rest runs without communication
no length, or one that may lie  ranks ask each other at every batch (one all-reduce of a number)
no batch at all on some rank    refused: its metrics would have nothing to reduce
==============================  ===================================================================

Prediction needs this with Lightning's own sampler, which does not pad there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from lightning_fsdp.engines.base import Engine
from lightning_fsdp.engines.rank_grid import all_gather_objects
from lightning_fsdp.strategies.host_numbers import all_reduce_numbers

_END = object()


class Lockstep:
    """Whether the ranks of one run still call the module the same number of times.

    Attributes:
        is_apart: Ranks run on without each other; every unit is whole until :meth:`meet`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.is_apart = False

    def wrap(self, loader: Any, *, is_training: bool, allows_empty: bool = False) -> Any:
        """A loader that keeps the ranks together; ``loader`` itself if nothing has to be done.

        Collective.

        Args:
            loader: A ``DataLoader`` or any iterable of batches.
            is_training: Stop at the shortest rank; otherwise use every batch.
            allows_empty: Accept a rank without any batch.

        Raises:
            ValueError: On every rank, where some rank has no batch and another has.
        """
        every = all_gather_objects((_length(loader), _has_exact_length(loader)))
        lengths = [length for length, _ in every]
        is_exact = all(exact for _, exact in every)
        is_even = len(set(lengths)) == 1
        if None in lengths:
            return _wrap(loader, _Pace(self, None, is_exact=False, is_training=is_training))
        if min(lengths) == 0 < max(lengths) and not allows_empty:
            raise ValueError(
                f"batches: expected at least one on every rank, got {_by_rank(lengths)}. Use fewer "
                "devices or a smaller batch size; or set "
                "LightningModule.allow_zero_length_dataloader_with_multiple_devices."
            )
        if is_exact and is_even:
            return loader
        if not is_even and is_training:
            rank_zero_warn(
                f"Ranks have different numbers of training batches ({_by_rank(lengths)}): every "
                f"rank stops after {min(lengths)}. Give all ranks the same number "
                "(Trainer(use_distributed_sampler=True) does)."
            )
        return _wrap(loader, _Pace(self, lengths, is_exact=is_exact, is_training=is_training))

    def count_ready(self, has_batch: bool) -> int:
        """How many ranks have a next batch. Collective."""
        (count,) = all_reduce_numbers([has_batch], dist.ReduceOp.SUM)
        return count

    def part(self) -> None:
        """From here ranks may run different numbers of batches. Collective."""
        if not self.is_apart:
            self._engine.hold_whole()
            self.is_apart = True

    def meet(self) -> None:
        """All ranks are through with an evaluation."""
        if self.is_apart:
            self._engine.release_whole()
            self.is_apart = False

    def check_collective(self, what: str) -> None:
        """Refuse a collective inside a step that other ranks may not run.

        Raises:
            RuntimeError: Ranks are apart.
        """
        if self.is_apart:
            raise RuntimeError(
                f"{what} inside an evaluation step: expected every rank to run this batch, got "
                "different numbers of batches on the ranks, so that some would wait for ever. Log "
                "with on_step=False, on_epoch=True (reduced once, at the end), or give every rank "
                "the same number of batches."
            )


@dataclass(frozen=True)
class _Pace:
    """How one loader's batches are handed out.

    Attributes:
        lockstep: Of the run.
        lengths: Of the loader on each rank; ``None``: not all are known.
        is_exact: Whether they are promises.
        is_training: Stop at the shortest.
    """

    lockstep: Lockstep
    lengths: Sequence[int] | None
    is_exact: bool
    is_training: bool

    @property
    def length(self) -> int | None:
        """The same number on every rank, so that limits and progress agree."""
        if self.lengths is None:
            return None
        return min(self.lengths) if self.is_training else max(self.lengths)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        return self._counting(loader) if self.is_exact else self._asking(loader)

    def _counting(self, loader: Iterable[Any]) -> Iterator[Any]:
        assert self.lengths is not None, "exact lengths are known"
        shortest = min(self.lengths)
        if shortest == 0:
            self.lockstep.part()
        for index, batch in enumerate(loader, start=1):
            if index == shortest and not self.is_training:
                self.lockstep.part()
            yield batch
            if index == shortest and self.is_training:
                return

    def _asking(self, loader: Iterable[Any]) -> Iterator[Any]:
        iterator = iter(loader)
        while True:
            batch = next(iterator, _END)
            if not self.lockstep.is_apart:
                num_ready = self.lockstep.count_ready(batch is not _END)
                if 0 < num_ready < dist.get_world_size():
                    if self.is_training:
                        rank_zero_warn(
                            f"Only {num_ready} of {dist.get_world_size()} ranks have another "
                            "training batch: every rank ends the epoch here, and those drop it."
                        )
                        return
                    self.lockstep.part()
            if batch is _END:
                return
            yield batch


class _LockstepLoader:
    """Stands for a loader: iterates it at the common pace, and is the loader in all else."""

    _loader: Any
    _pace: _Pace

    def __init__(self, loader: Any, pace: _Pace) -> None:
        self.__dict__.update(_loader=loader, _pace=pace)  # other attributes are the loader's

    def __iter__(self) -> Iterator[Any]:
        return self._pace.batches(self._loader)

    def __len__(self) -> int:
        if self._pace.length is None:
            raise TypeError(f"{type(self._loader).__name__} has no length on some rank")
        return self._pace.length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)  # Lightning sets worker_init_fn, and resets _iterator


class _StatefulLockstepLoader(_LockstepLoader):
    """Of a loader that can be resumed; Lightning asks the class for these methods."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)


def _wrap(loader: Any, pace: _Pace) -> _LockstepLoader:
    is_stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return (_StatefulLockstepLoader if is_stateful else _LockstepLoader)(loader, pace)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _has_exact_length(loader: Any) -> bool:
    """Whether ``len`` is a promise: that of an iterable dataset is a guess by its author."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _by_rank(lengths: Sequence[int]) -> str:
    return ", ".join(f"{length} on rank {rank}" for rank, length in enumerate(lengths))
