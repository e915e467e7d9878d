"""A SIGTERM reaches ranks anywhere in a step; all of them end at the same place."""

import os
import signal

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.support.trainer import (
    SHARDED,
    AdamwRegressor,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
    weights_of,
)


class _Told(AdamwRegressor):
    """Ranks hear it in the third batch, each at its own place, or not at all."""

    def __init__(self, places):
        super().__init__()
        self.places = places

    def _arrive(self, place):
        is_here = self.global_rank < len(self.places) and self.places[self.global_rank] == place
        if is_here and self.trainer.fit_loop.epoch_loop.batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def forward(self, x):
        self._arrive("forward")
        return super().forward(x)

    def on_after_backward(self):
        self._arrive("backward")

    def on_before_zero_grad(self, optimizer):
        self._arrive("zero_grad")


class _SavesAtTheEnd(Callback):
    def on_exception(self, trainer, pl_module, exception):
        trainer.save_checkpoint(f"{trainer.default_root_dir}/ended.ckpt")


def _fit(rank, world_size, folder, strategy, places):
    told, to_its_end = seeded(lambda: _Told(places)), seeded(AdamwRegressor)
    with pytest.raises(SIGTERMException):
        make_trainer(strategy, folder, callbacks=[_SavesAtTheEnd()]).fit(told, make_loader())
    make_trainer(strategy, folder, limit_train_batches=3).fit(to_its_end, make_loader())
    found = torch.load(folder / "ended.ckpt", weights_only=True)["state_dict"]
    expected = weights_of(to_its_end)
    assert found.keys() == expected.keys()
    assert all(value.equal(expected[name]) for name, value in found.items())


@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize(
    "places", [["forward"], ["nowhere", "zero_grad"], ["forward", "backward"]], ids="-".join
)
def test_a_fit_ends_on_all_ranks_before_the_same_batch(tmp_path, strategy, places):
    on_trainer_ranks(_fit, 2, tmp_path, strategy, places, timeout_s=40.0)


@pytest.mark.parametrize("strategy", SHARDED[::2])
def test_so_does_a_fit_on_one_rank(tmp_path, strategy):
    on_trainer_ranks(_fit, 1, tmp_path, strategy, ["forward"], timeout_s=40.0)


class _ToldInEvaluation(AdamwRegressor):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if batch_idx == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        self.last = batch_idx


def _validate(rank, world_size, folder, strategy):
    told = seeded(_ToldInEvaluation)
    with pytest.raises(SIGTERMException):
        make_trainer(strategy, folder).validate(told, make_loader(), verbose=False)
    assert told.last == 1


def test_an_evaluation_alone_ends_after_its_batch(tmp_path):
    on_trainer_ranks(_validate, 2, tmp_path, "scratch_fsdp", timeout_s=40.0)
