"""``async_save=True``: the Trainer's checkpoints are written while training goes on."""

import contextlib
import errno
import os
import time

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fsdp import ResumableLoader
from lightning_fsdp.checkpoint import is_checkpoint, wait_for_saving
from tests.support.checkpointed import Adamw
from tests.support.checkpoints import disk_stops
from tests.support.trainer import (
    SHARDED,
    make_data,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
    weights_of,
    with_options,
)

STEPS_PER_EPOCH = 4


def _trainer(strategy, folder, *callbacks, is_async=True, **options):
    strategy = with_options(strategy, checkpoint="sharded", async_save=is_async)
    options["enable_checkpointing"] = any(isinstance(c, ModelCheckpoint) for c in callbacks)
    return make_trainer(strategy, folder, callbacks=list(callbacks), max_epochs=2, **options)


class _DiskStops(pl.Callback):
    """What is saved after ``at_step`` reaches the disk during the second step from then."""

    def __init__(self, at_step, seen_meanwhile, save_to=None):
        self.at_step = at_step
        self.seen_meanwhile = seen_meanwhile
        self.save_to = save_to
        self.stopped = contextlib.ExitStack()
        self.seen = None

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.at_step - 1:
            wait_for_saving()  # what was saved earlier is to get there
            self.stopped.enter_context(disk_stops())

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.at_step and self.save_to:
            trainer.save_checkpoint(self.save_to)
        if trainer.global_step == self.at_step + 1:
            self.seen = self.seen_meanwhile()
            trainer.strategy.barrier()  # before any rank lets the save go on
            self.stopped.close()


class _Saves(pl.Callback):
    def __init__(self, path, at_step):
        self.path = path
        self.at_step = at_step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.at_step:
            trainer.save_checkpoint(self.path)


def _files(path):
    return {file.name: file.read_bytes() for file in (path / "current").iterdir()}


# -- what is saved ---------------------------------------------------------------------------------


def _as_at_once(rank, world_size, folder, strategy):
    paths = {kind: folder / kind / "run.ckpt" for kind in ("later", "at once")}
    stop = _DiskStops(
        STEPS_PER_EPOCH, lambda: is_checkpoint(paths["later"]), save_to=paths["later"]
    )
    callbacks = {"later": stop, "at once": _Saves(paths["at once"], STEPS_PER_EPOCH)}
    runs = {}
    for kind, callback in callbacks.items():
        torch.manual_seed(rank)
        runs[kind] = seeded(Adamw)
        _trainer(strategy, folder, callback, is_async=kind == "later").fit(
            runs[kind], make_loader()
        )
    assert stop.seen is False, "training did not go on while it was saved"
    assert _files(paths["later"]) == _files(paths["at once"])

    resumed = seeded(Adamw, seed=9)
    _trainer(strategy, folder).fit(resumed, make_loader(), ckpt_path=paths["later"])
    for run in (runs["later"], resumed):
        torch.testing.assert_close(weights_of(run), weights_of(runs["at once"]), atol=0, rtol=0)


@pytest.mark.parametrize("strategy", [SHARDED[0], SHARDED[1], SHARDED[2], SHARDED[4]])
def test_the_files_are_those_of_a_save_at_that_step(tmp_path, strategy):
    on_trainer_ranks(_as_at_once, 2, tmp_path, strategy)


# -- who waits -------------------------------------------------------------------------------------


def _fsync_takes(seconds):
    plain = os.fsync

    def fsync(descriptor):
        time.sleep(seconds)
        plain(descriptor)

    os.fsync = fsync


def _resumable_loader():
    return ResumableLoader(make_data(), 4, seed=7)


def _save_in_each_step(rank, world_size, folder):
    _fsync_takes(0.05)
    keep = ModelCheckpoint(
        folder / "kept", every_n_train_steps=1, save_top_k=-1, save_last=True, filename="{step}"
    )
    whole = seeded(Adamw)
    _trainer(SHARDED[0], folder, keep).fit(whole, _resumable_loader())
    num_steps = 2 * STEPS_PER_EPOCH
    names = {f"step={step}.ckpt" for step in range(1, num_steps + 1)} | {"last.ckpt"}
    # The end of the fit has waited: nothing is under way.
    assert {path.name for path in (folder / "kept").iterdir()} == names
    for name, num_left in (("step=3.ckpt", num_steps - 3), ("last.ckpt", 0)):
        resumed = seeded(Adamw, seed=9)
        trainer = _trainer(SHARDED[4], folder)
        trainer.fit(resumed, _resumable_loader(), ckpt_path=folder / "kept" / name)
        assert len(resumed.losses) == num_left
        torch.testing.assert_close(weights_of(resumed), weights_of(whole), atol=5e-6, rtol=0)


def test_a_save_waits_for_the_one_before_and_the_fit_for_the_last(tmp_path):
    on_trainer_ranks(_save_in_each_step, 2, tmp_path)


def _name_alike(rank, world_size, folder):
    _fsync_takes(0.05)
    keep = ModelCheckpoint(
        folder / "kept",
        every_n_train_steps=1,
        monitor="train_loss",
        save_top_k=-1,
        filename="{epoch}",
    )
    _trainer(SHARDED[0], folder, keep).fit(seeded(Adamw), make_loader())
    versions = ["", *(f"-v{number}" for number in range(1, STEPS_PER_EPOCH))]
    names = {f"epoch={epoch}{version}.ckpt" for epoch in range(2) for version in versions}
    assert {path.name for path in (folder / "kept").iterdir()} == names


def test_a_name_that_is_still_being_saved_to_is_not_given_twice(tmp_path):
    on_trainer_ranks(_name_alike, 2, tmp_path)


def _remove_late(rank, world_size, folder):
    keep = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=1, filename="{step}")
    stop = _DiskStops(4, lambda: sorted(path.name for path in folder.glob("*.ckpt")))
    _trainer(SHARDED[0], folder, keep, stop).fit(seeded(Adamw), make_loader())
    assert stop.seen == ["step=2.ckpt"]
    dist.barrier()  # rank 0 removes; the others do not wait for that
    assert [path.name for path in folder.glob("*.ckpt")] == ["step=8.ckpt"]


def test_a_checkpoint_stays_until_the_next_one_is_in_place(tmp_path):
    on_trainer_ranks(_remove_late, 2, tmp_path)


def _save_after_the_fit(rank, world_size, folder):
    _fsync_takes(0.05)
    trainer = _trainer(SHARDED[0], folder)
    trainer.fit(seeded(Adamw), make_loader())
    trainer.save_checkpoint(folder / "run.ckpt")
    assert is_checkpoint(folder / "run.ckpt")


def test_a_save_between_two_fits_is_done_when_it_returns(tmp_path):
    on_trainer_ranks(_save_after_the_fit, 2, tmp_path)


class _ReadsBack(_Saves):
    """As the LearningRateFinder does between the epochs of a fit."""

    seen = None

    def on_train_batch_end(self, trainer, *_):
        super().on_train_batch_end(trainer, *_)
        if trainer.global_step == self.at_step:
            self.seen = trainer.strategy.load_checkpoint(self.path)["global_step"]


def _read_back(rank, world_size, folder):
    _fsync_takes(0.05)
    reads = _ReadsBack(folder / "run.ckpt", 3)
    _trainer(SHARDED[0], folder, reads).fit(seeded(Adamw), make_loader())
    assert reads.seen == 3


def test_what_is_loaded_in_a_fit_has_been_saved_before(tmp_path):
    on_trainer_ranks(_read_back, 2, tmp_path)


# -- what fails ------------------------------------------------------------------------------------


class _DiskFull(pl.Callback):
    """On rank 1, for what is saved after ``at_step``."""

    def __init__(self, at_step):
        self.at_step = at_step
        self.plain = os.fsync

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_rank == 1:
            is_full = trainer.global_step == self.at_step - 1
            os.fsync = self.full if is_full else os.fsync

    def full(self, descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fail(rank, world_size, folder, at_step):
    keep = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=1, filename="{step}")
    full = _DiskFull(at_step)
    with pytest.raises(OSError, match=r"rank 1 of 2.*could not write '__1_0.distcp'") as caught:
        _trainer(SHARDED[0], folder, keep, full).fit(seeded(Adamw), _resumable_loader())
    os.fsync = full.plain
    is_last = at_step == 2 * STEPS_PER_EPOCH
    assert ("the save before this one failed" in str(caught.value)) == (not is_last)
    assert [path.name for path in folder.glob("*.ckpt")] == [f"step={at_step - 2}.ckpt"]
    resumed = seeded(Adamw, seed=9)
    path = folder / f"step={at_step - 2}.ckpt"
    _trainer(SHARDED[0], folder).fit(resumed, _resumable_loader(), ckpt_path=path)
    whole = seeded(Adamw)
    _trainer(SHARDED[0], folder).fit(whole, _resumable_loader())
    torch.testing.assert_close(weights_of(resumed), weights_of(whole), atol=0, rtol=0)


@pytest.mark.parametrize("at_step", [4, 8], ids=["next save", "end of fit"])
def test_a_save_that_fails_comes_up_on_every_rank_and_costs_no_checkpoint(tmp_path, at_step):
    on_trainer_ranks(_fail, 2, tmp_path, at_step)


class _Stops(pl.Callback):
    def __init__(self, at_step, error):
        self.at_step = at_step
        self.error = error

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.at_step:
            raise self.error


def _interrupt(rank, world_size, folder, error):
    _fsync_takes(0.2)
    trainer = _trainer(SHARDED[0], folder, _Saves(folder / "run.ckpt", 3), _Stops(3, error))
    # Lightning turns Ctrl-C into the end of the process.
    with pytest.raises(SystemExit if isinstance(error, KeyboardInterrupt) else type(error)):
        trainer.fit(seeded(Adamw), make_loader())
    assert is_checkpoint(folder / "run.ckpt")
    trainer.save_checkpoint(folder / "after.ckpt")  # the module is still sharded
    assert is_checkpoint(folder / "after.ckpt")


@pytest.mark.parametrize("error", [RuntimeError("stop here"), KeyboardInterrupt()], ids=repr)
def test_a_save_ends_well_when_the_run_does_not(tmp_path, error):
    on_trainer_ranks(_interrupt, 2, tmp_path, error)


def _linked(rank, world_size, folder):
    keep = ModelCheckpoint(folder, save_last="link")
    with pytest.raises(
        NotImplementedError, match=r"save_last='link'\) with async_save=True.*=True"
    ):
        _trainer(SHARDED[0], folder, keep).fit(seeded(Adamw), make_loader())


def test_a_link_to_what_is_not_there_yet_is_refused(tmp_path):
    on_trainer_ranks(_linked, 2, tmp_path)
