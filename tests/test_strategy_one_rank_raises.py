"""An exception on one rank only, in any hook of Lightning: it ends, and so does the other rank."""

import itertools
import multiprocessing
import os

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from tests.support.ranks import ends_on_ranks
from tests.support.trainer import (
    Regressor,
    as_torchrun,
    make_data,
    make_loader,
    make_trainer,
    seeded,
)

SOON_S = 20.0  # the group's timeout is twice as long; a run takes one second

OF_MODULE = [
    *("setup", "configure_model", "configure_optimizers", "on_fit_start", "on_train_batch_start"),
    *("training_step", "on_before_optimizer_step", "optimizer_step", "validation_step"),
    *("on_save_checkpoint", "on_train_end", "teardown"),
]
OF_CALLBACK = ["on_train_batch_end", "on_validation_end", "on_save_checkpoint"]
PLACES = [
    *(("module", hook) for hook in OF_MODULE),
    *(("callback", hook) for hook in OF_CALLBACK),
    ("worker", "__getitem__"),
]
ENGINES = itertools.cycle(["scratch_fsdp", "fsdp1_zero3", "scratch_fsdp", "fsdp2_zero3"])


def _raising(cls, hook, rank):
    """A class whose hook raises on the second rank."""

    def raises(self, *args, **kwargs):
        if rank == 1:
            raise ValueError("only rank 1 says no")
        return getattr(super(derived, self), hook)(*args, **kwargs)

    derived = type(cls.__name__, (cls,), {hook: raises})
    return derived


class _Data(Dataset):
    """Its samples are made in a worker, which raises on the second rank."""

    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 32

    def __getitem__(self, index):
        if self.rank == 1:
            raise ValueError("only rank 1 says no")
        return make_data()[index]


def _one_raises(rank, world_size, engine, place, hook, folder):
    as_torchrun(rank, world_size)
    model, callbacks = Regressor, [ModelCheckpoint(folder, every_n_train_steps=2)]
    loader = make_loader()
    if place == "module":
        model = _raising(Regressor, hook, rank)
    elif place == "callback":
        callbacks.append(_raising(pl.Callback, hook, rank)())
    else:
        loader = DataLoader(_Data(rank), batch_size=4, num_workers=1)
    trainer = make_trainer(engine, folder, callbacks=callbacks, enable_checkpointing=True)
    try:
        trainer.fit(seeded(model), loader, make_loader(8, seed=1))
    except ValueError:
        for child in multiprocessing.active_children():  # as a process does at its end
            child.terminate()
            child.join()
        os._exit(0)  # the sockets close


@pytest.mark.parametrize(
    ("place", "hook", "engine"),
    [(*place, engine) for place, engine in zip(PLACES, ENGINES, strict=False)],
)
def test_an_exception_in_a_hook_of_one_rank_ends_both(place, hook, engine, tmp_path):
    ends = ends_on_ranks(_one_raises, 2, engine, place, hook, tmp_path, timeout_s=SOON_S)
    # After a fit there is nothing left to do together: the other rank has come to its end.
    assert ends == ["done" if hook == "teardown" else "RuntimeError", "died"]
