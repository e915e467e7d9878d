"""A SLURM job that requeues itself: its signal reaches ranks anywhere in a step."""

import functools
import os
import signal
from pathlib import Path
from unittest import mock

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.trainer.connectors import signal_connector

from lightning_fsdp import ResumableLoader
from lightning_fsdp.checkpoint.files import _own_file_beside
from lightning_fsdp.checkpoint.place import Place
from tests.support.trainer import (
    AdamwRegressor,
    assert_each_like_ddp,
    make_data,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
    weights_of,
    with_options,
)


class _Signalled(AdamwRegressor):
    """In the third batch of four, rank 0 hears it before its forward, rank 1 after its step."""

    def __init__(self, is_sharded):
        super().__init__()
        self.where = ("forward", "zero_grad") if is_sharded else ("end", "end")

    def _arrive(self, where):
        epoch = self.trainer.fit_loop.epoch_loop
        if epoch.batch_idx == 2 and where == self.where[self.global_rank]:
            os.kill(os.getpid(), signal.SIGUSR1)

    def forward(self, x):
        self._arrive("forward")
        return super().forward(x)

    def on_before_zero_grad(self, optimizer):
        self._arrive("zero_grad")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self._arrive("end")  # under DDP it saves at once


def _in_a_job(rank):
    told = {"JOB_ID": 77, "JOB_NAME": "train", "NNODES": 1, "NTASKS": 2, "NTASKS_PER_NODE": 2}
    told |= {"PROCID": rank, "LOCALID": rank, "NODEID": 0}
    return {f"SLURM_{name}": str(value) for name, value in told.items()}


def _requeued(saving, strategy, folder, rank):
    saved, calls = folder / "hpc_ckpt_1.ckpt", []

    def trainer():
        chosen, job = with_options(strategy, **saving), SLURMEnvironment()
        return make_trainer(chosen, folder, plugins=[job])

    def call(command):
        calls.append((*command, saved.exists()))
        return 0

    with (
        mock.patch.dict(os.environ, _in_a_job(rank)),
        mock.patch.object(signal_connector, "call", call),
    ):
        model = seeded(lambda: _Signalled(strategy != "ddp"))
        trainer().fit(model, make_loader())
        assert calls == [("scontrol", "requeue", "77", True)] * (rank == 0)
        again = seeded(AdamwRegressor, seed=1)
        trainer().fit(again, make_loader())  # goes on from what was saved, unasked
    assert list(folder.glob("*.ckpt")) == [saved]
    return {"weights": weights_of(model), "resumed": weights_of(again), "losses": again.losses}


def test_all_ranks_save_after_the_batch_in_which_they_hear_the_signal(tmp_path):
    savings = ({}, {"checkpoint": "sharded"}, {"checkpoint": "sharded", "async_save": True})
    scenarios = [functools.partial(_requeued, saving) for saving in savings]
    assert_each_like_ddp(scenarios, tmp_path, atol=2e-6)


class _SignalledInAStep(AdamwRegressor):
    """In the third batch, the first of two of its step."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().training_step(batch, batch_idx)


def _requeued_in_a_step(rank, world_size, folder):
    def fit(model):
        options = {"plugins": [SLURMEnvironment()], "accumulate_grad_batches": 2, "max_epochs": 1}
        loader = ResumableLoader(make_data(), batch_size=2, seed=0)
        make_trainer("scratch_fsdp", folder, **options).fit(model, loader)
        return weights_of(model)

    with (
        mock.patch.dict(os.environ, _in_a_job(rank)),
        mock.patch.object(signal_connector, "call", return_value=0),
    ):
        expected = fit(seeded(_SignalledInAStep))
        assert list(folder.glob("*.ckpt"))
        again = seeded(AdamwRegressor, seed=1)
        found = fit(again)
    assert len(again.losses) == 4, "of eight batches"
    assert all(found[name].equal(value) for name, value in expected.items())


def test_they_save_after_an_optimizer_step_not_inside_of_one(tmp_path):
    on_trainer_ranks(_requeued_in_a_step, 2, tmp_path)


def test_what_a_killed_save_has_left_is_not_taken_for_a_checkpoint(tmp_path):
    whole, killed = tmp_path / "hpc_ckpt_1.ckpt", tmp_path / "hpc_ckpt_2.ckpt"
    whole.touch()
    saving = Place(killed)
    saving.begin()
    saving.release()  # and has left what it wrote
    with _own_file_beside(killed):
        assert len(list(tmp_path.glob(".*"))) == 2
        trainer = make_trainer("auto", tmp_path)
        connector = trainer._checkpoint_connector
        assert Path(connector._hpc_resume_path) == whole
        assert Path(connector.hpc_save_path(tmp_path)) == killed
