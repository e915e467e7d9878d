"""A save at an exception: all ranks take part in it, or it is refused before anything is sent.

Lightning saves where a rank is when it raises (``ModelCheckpoint(save_on_exception=True)``). If it
raises alone, the others are in a collective of the step, and one of the save would meet that: torch
waits for the group's timeout, or mixes both up and aborts the process. So ranks meet in the store
where they have found each other, which no collective uses::

    each rank that saves      says that it is here, waits for all, for a limited time
    all are here              the save
    some are not              an error that says so, beneath the exception; nothing is saved
"""

from __future__ import annotations

import itertools
from datetime import timedelta

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_fsdp.checkpoint.ranks import LostRankError
from lightning_fsdp.checkpoint.torch_internals import default_store

LIMIT = timedelta(seconds=60)  # ranks of one step are not further apart, where all of them raise

_meetings = itertools.count()


def meet_if_interrupted(trainer: pl.Trainer) -> None:
    """Where an exception has ended a run, wait for all ranks before they save together.

    Raises:
        LostRankError: Some do not come, as they have not raised.
    """
    if trainer.state.status != TrainerStatus.INTERRUPTED or not dist.is_initialized():
        return
    store, number = default_store(), next(_meetings)
    keys = [f"save_at_exception_{number}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], "here")
    try:
        store.wait(keys, LIMIT)
    except RuntimeError as error:  # the store may be gone, with rank 0
        raise LostRankError(
            f"checkpoint at an exception (rank {dist.get_rank()} of {len(keys)}): expected every "
            f"rank to save, got not all of them within {LIMIT.total_seconds():.0f} s, as those "
            "that have not raised go on with the step. Nothing is saved; the exception is above."
        ) from error
