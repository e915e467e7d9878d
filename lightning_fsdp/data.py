"""Which rank reads which sample, and where to go on after a checkpoint.

An epoch is one permutation of all samples, the same on every rank, dealt out like cards::

    order of the epoch    7 2 | 5 0 | 3 6 | 1 4        4 batches, 2 ranks, 1 sample each
    rank 0                7     5     3     1
    rank 1                  2     0     6     4

Batch k of all ranks together is therefore the same stretch of the permutation for every number of
ranks with the same global batch, and a position in the data is one number: how many samples of the
epoch all ranks together were given. What workers have read ahead does not count. Samples that do
not fill a batch on every rank are left out, other ones in every epoch where they are shuffled;
nothing is read twice to fill up.

Note: a loader of torch draws a seed for its workers from the process's generator whenever it is
iterated, and would shift all that a resumed run draws later. This one has a generator of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

T_co = TypeVar("T_co", covariant=True)

_LISTED_AT_ONCE = 2**14  # samples
_OWN = ("sampler", "batch_sampler", "drop_last", "generator")


class DealtSampler(DistributedSampler[int]):
    """One rank's samples of an epoch, from a place inside the epoch on.

    A ``DistributedSampler``, so the Trainer adds none of its own and tells it each epoch's number.

    Args:
        dataset: Anything with a length.
        num_replicas: Ranks that share the samples. ``None``: those of the process group once there
            is one, so that a loader may be made before the Trainer starts it; until then one.
        rank: This one's place among them.
        shuffle: Permute the samples, otherwise in every epoch.
        seed: Of the permutation; the same on every rank.

    Attributes:
        start: Samples of this rank that are passed over at the beginning of an iteration.
    """

    start: int

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if (num_replicas is None) is not (rank is None):
            raise ValueError(
                f"DealtSampler: expected num_replicas and rank together, got {num_replicas} and "
                f"{rank}. Give both, or none to take those of the process group."
            )
        self._given = None if num_replicas is None or rank is None else (num_replicas, rank)
        super().__init__(
            dataset, *self._ranks(), shuffle=shuffle, seed=seed, drop_last=True
        )  # refuses a rank that is not among them
        self.start = 0

    @override
    def __iter__(self) -> Iterator[int]:
        self._look_around()
        order = torch.arange(len(self.dataset), device="cpu")  # type: ignore[arg-type]
        if self.shuffle:
            generator = torch.Generator("cpu").manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(order), generator=generator, device="cpu")
        first = self.rank + self.start * self.num_replicas
        mine = order[first : self.total_size : self.num_replicas]
        # In parts: 8 bytes a sample in a tensor, 36 in a list.
        return (sample for part in torch.split(mine, _LISTED_AT_ONCE) for sample in part.tolist())

    @override
    def __len__(self) -> int:
        self._look_around()
        return self.num_samples

    def _look_around(self) -> None:
        """Find out which ranks there are by now."""
        self.num_replicas, self.rank = self._ranks()
        self.num_samples = len(self.dataset) // self.num_replicas  # type: ignore[arg-type]
        self.total_size = self.num_samples * self.num_replicas

    def _ranks(self) -> tuple[int, int]:
        if self._given is not None:
            return self._given
        if dist.is_available() and dist.is_initialized():
            return dist.get_world_size(), dist.get_rank()
        return 1, 0


class ResumableLoader(DataLoader[T_co]):
    """A training ``DataLoader`` that shards by rank, and goes on after a checkpoint exactly.

    With the Trainer there is nothing else to do: give it to ``fit``, and resume with ``ckpt_path``.
    Without, call ``loader.sampler.set_epoch(epoch)`` before each epoch, save ``state_dict()``
    (equal on all ranks) and load it before the first iteration.

    The position may be taken up by another number of ranks and another batch size, if what was read
    are whole global batches. Every rank gets equally many batches, all of ``batch_size`` samples.

    Without workers, ``dataset[i]`` draws random numbers from this process's generators, which the
    strategies of this package restore. Workers are seeded by seed, epoch, position and rank: after
    a checkpoint in the middle of an epoch they draw other numbers than without it.

    Args:
        dataset: Map-style.
        batch_size: Samples per rank and micro-batch.
        shuffle: Permute the samples, otherwise in every epoch.
        seed: Of the permutation; the same on every rank.
        num_replicas: As of :class:`DealtSampler`.
        rank: As of :class:`DealtSampler`.
        options: Of ``DataLoader``: ``num_workers``, ``collate_fn``, ``pin_memory``, ...

    Attributes:
        sampler: Deals out the samples.
        batch_size: Samples per rank and micro-batch.
        num_batches_read: Of this rank, in the current epoch; what workers read ahead not counted.

    Raises:
        TypeError: The dataset has no order, or an option that this loader sets itself.
    """

    sampler: DealtSampler
    batch_size: int
    num_batches_read: int

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        **options: Any,
    ) -> None:
        taken = [name for name in _OWN if options.get(name) is not None]
        if taken:
            raise TypeError(
                f"ResumableLoader: expected no {', '.join(taken)}, which it sets itself: every "
                "rank's share of whole global batches. Leave it out; for prediction and "
                "overfit_batches, where the Trainer puts in its own, use a plain DataLoader."
            )
        if isinstance(dataset, IterableDataset):
            raise TypeError(
                f"ResumableLoader: expected a map-style dataset, got {type(dataset).__name__}, an "
                "IterableDataset, which cannot be entered at a position. Give it __len__ and "
                "__getitem__, or use a plain DataLoader."
            )
        super().__init__(
            dataset,
            batch_size,
            sampler=DealtSampler(
                dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed
            ),
            drop_last=True,
            generator=torch.Generator(),
            **{name: value for name, value in options.items() if name not in _OWN},
        )
        self.num_batches_read = 0
        self._epoch_read = self._num_samples_read = 0  # the latter by all ranks together
        self._goes_on = False

    @override
    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]
        """The batches of the sampler's epoch.

        A generator: it begins at the first ``next``. The Trainer makes the first iterator before it
        restores a checkpoint, and sets the epoch after it made one.
        """
        if not self._goes_on or self._epoch_read != self.sampler.epoch:
            self._num_samples_read = 0
        # Only now are there as many ranks as read on: a position may be loaded before.
        global_batch = self._global_batch
        self.num_batches_read = self._batches_in(self._num_samples_read)
        self._goes_on = False
        self._epoch_read = self.sampler.epoch
        self.sampler.start = self.num_batches_read * self.batch_size
        place = (self.sampler.seed, *self._position, self.sampler.rank)
        self.generator.manual_seed(random.Random(repr(place)).getrandbits(63))
        for batch in super().__iter__():
            self.num_batches_read += 1  # before it is used: a checkpoint written then counts it
            self._num_samples_read += global_batch
            yield batch

    @property
    def _global_batch(self) -> int:
        len(self.sampler)  # looks around
        return self.batch_size * self.sampler.num_replicas

    @property
    def _position(self) -> tuple[int, int]:
        return self._epoch_read, self._num_samples_read

    def state_dict(self) -> dict[str, Any]:
        """The position, independent of ranks, batch size and workers.

        Returns:
            ``epoch``; ``num_samples`` given out in it to all ranks together; ``seed``, ``shuffle``
            and ``total`` samples, which say which permutation that was.
        """
        epoch, num_samples = self._position
        return {
            "epoch": epoch,
            "num_samples": num_samples,
            "seed": self.sampler.seed,
            "shuffle": self.sampler.shuffle,
            "total": len(self.sampler.dataset),  # type: ignore[arg-type]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position: the next iteration over that epoch leaves out what was read.

        Raises:
            ValueError: The position belongs to other data, another order, or lies inside a batch.
        """
        here = self.state_dict()
        for key in ("seed", "shuffle", "total"):
            if state[key] != here[key]:
                raise ValueError(
                    f"ResumableLoader: expected the training data that the checkpoint was written "
                    f"with ({key} {state[key]}), got {key} {here[key]}. Give it the dataset, seed "
                    "and shuffle of that run, or start from the weights alone."
                )
        self.num_batches_read = self._batches_in(state["num_samples"])
        self._epoch_read, self._num_samples_read = state["epoch"], state["num_samples"]
        self._goes_on = True

    def _batches_in(self, num_samples: int) -> int:
        num_batches, inside = divmod(num_samples, self._global_batch)
        if inside:
            raise ValueError(
                f"ResumableLoader: expected a global batch that divides the {num_samples} samples "
                f"read, got {self._global_batch} ({self.sampler.num_replicas} ranks x "
                f"{self.batch_size}). Choose batch_size so that the product stays the same."
            )
        return num_batches
