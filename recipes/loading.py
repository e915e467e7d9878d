"""Which rank reads which sequence, and where to go on after a checkpoint.

An epoch is one permutation of all sequences, the same on every rank, dealt out like cards::

    order of the epoch    7 2 | 5 0 | 3 6 | 1 4        4 steps, 2 ranks, 1 sequence each
    rank 0                7     5     3     1
    rank 1                  2     0     6     4

Batch k of all ranks together is therefore the same stretch of the permutation for every number of
ranks with the same global batch, and a position in the data is one number: how many sequences of
the epoch all ranks together have read. Sequences that do not fill a batch on every rank are left
out, other ones in every epoch; nothing is read twice to fill up.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from recipes.errors import RecipeError
from recipes.packing import PackedSequences


class DealtSampler(DistributedSampler[int]):
    """One rank's sequences of an epoch, from a place inside the epoch on.

    A ``DistributedSampler``, so the Trainer adds none of its own and tells it each epoch's number.

    Attributes:
        start: Sequences of this rank that are passed over at the beginning of the next iteration.
    """

    start: int

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        num_replicas: int,
        rank: int,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(
            dataset,
            num_replicas=num_replicas,
            rank=rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=True,
        )
        self.start = 0

    @override
    def __iter__(self) -> Iterator[int]:
        return itertools.islice(super().__iter__(), self.start, None)


class ResumableLoader(DataLoader[Any]):
    """A training DataLoader that knows its position and can go on from it.

    Attributes:
        sampler: Deals out the sequences.
        batch_size: Sequences per rank and micro-batch.
    """

    sampler: DealtSampler
    batch_size: int

    def __init__(
        self,
        dataset: PackedSequences,
        *,
        batch_size: int,
        sampler: DealtSampler,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            num_workers=num_workers,
            pin_memory=pin_memory,
            drop_last=True,
            persistent_workers=num_workers > 0,
        )
        self._num_batches_read = 0
        self._epoch_read = 0
        self._goes_on = False

    @property
    def _global_batch(self) -> int:
        return self.batch_size * self.sampler.num_replicas

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches of the sampler's epoch.

        A generator: it begins at the first ``next``. The Trainer makes the first iterator before it
        restores a checkpoint, and sets the epoch after it made one.
        """
        if not self._goes_on or self._epoch_read != self.sampler.epoch:
            self._num_batches_read = 0
        self._goes_on = False
        self._epoch_read = self.sampler.epoch
        self.sampler.start = self._num_batches_read * self.batch_size
        for batch in super().__iter__():
            self._num_batches_read += 1  # before it is used: a checkpoint written then counts it
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The position, independent of the number of ranks.

        Returns:
            ``epoch``; ``num_sequences`` read in it by all ranks together; ``seed`` and ``total``
            sequences, which say which permutation that was.
        """
        return {
            "epoch": self._epoch_read,
            "num_sequences": self._num_batches_read * self._global_batch,
            "seed": self.sampler.seed,
            "total": len(self.sampler.dataset),  # type: ignore[arg-type]
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a position: the next iteration over that epoch leaves out what was read.

        Raises:
            RecipeError: The position belongs to other data, another order, or lies inside a batch.
        """
        here = self.state_dict()
        for key, cure in (("seed", "--data.seed"), ("total", "--data.path or --data.seq_len")):
            if state[key] != here[key]:
                raise RecipeError(
                    f"checkpoint: expected the training data it was written with ({key} "
                    f"{state[key]}), got {key} {here[key]}. Change {cure} back, or start from the "
                    f"weights alone."
                )
        num_batches, inside = divmod(state["num_sequences"], self._global_batch)
        if inside:
            raise RecipeError(
                f"checkpoint: expected a global batch that divides the {state['num_sequences']} "
                f"sequences read, got {self._global_batch} ({self.sampler.num_replicas} ranks x "
                f"{self.batch_size}). Choose --data.batch_size so that the product stays the same."
            )
        self._epoch_read, self._num_batches_read = state["epoch"], num_batches
        self._goes_on = True
