"""A SIGTERM reaches ranks anywhere in a step; all of them end at the same place."""

import os
import signal

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_fsdp import ResumableLoader
from tests.support.trainer import (
    SHARDED,
    AdamwRegressor,
    make_data,
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


# Each engine at each place. Where ranks ask one another is no matter of stages: each has its own.
PLACES = {3: (["forward"], ["forward", "backward"]), 2: (["nowhere", "zero_grad"],)}


@pytest.mark.parametrize(
    ("strategy", "places"),
    [(strategy, places) for strategy in SHARDED for places in PLACES[int(strategy[-1])]],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_fit_ends_on_all_ranks_before_the_same_batch(tmp_path, strategy, places):
    on_trainer_ranks(_fit, 2, tmp_path, strategy, places, timeout_s=40.0)


@pytest.mark.parametrize("strategy", SHARDED[::2])
def test_so_does_a_fit_on_one_rank(tmp_path, strategy):
    on_trainer_ranks(_fit, 1, tmp_path, strategy, ["forward"], timeout_s=40.0)


class _ToldAt(AdamwRegressor):
    """The last rank alone hears it, at a place."""

    place = None

    def _arrive(self, *place):
        is_last = self.global_rank == self.trainer.world_size - 1
        if is_last and (self.trainer.current_epoch, *place) == self.place:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_epoch_start(self):
        self._arrive("epoch")

    def training_step(self, batch, batch_idx):
        self._arrive("batch", batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self._arrive("validation")
        super().validation_step(batch, batch_idx)


def _ends_and_goes_on(rank, world_size, folder, strategy, places, num_micro_batches):
    def fit(place=None, callbacks=(), ckpt_path=None):
        model, loader = seeded(_ToldAt), ResumableLoader(make_data(), batch_size=4, seed=0)
        model.place = place
        options = {"max_epochs": 2, "accumulate_grad_batches": num_micro_batches}
        trainer = make_trainer(strategy, folder, callbacks=list(callbacks), **options)
        trainer.fit(model, loader, make_loader(16), ckpt_path=ckpt_path)
        return weights_of(model)

    expected = fit()
    for place in places:
        with pytest.raises(SIGTERMException):
            fit(place, [_SavesAtTheEnd()])
        found = fit(ckpt_path=folder / "ended.ckpt")
        assert all(found[name].equal(value) for name, value in expected.items()), place


def test_a_fit_that_ends_where_an_epoch_does_goes_on_with_the_next(tmp_path):
    places = [(0, "epoch"), (0, "validation"), (1, "epoch"), (1, "validation")]
    told = tmp_path, "scratch_fsdp", places, 1
    on_trainer_ranks(_ends_and_goes_on, 2, *told, timeout_s=60.0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_fit_ends_after_an_optimizer_step_not_inside_of_one(tmp_path, world_size):
    told = tmp_path, "fsdp2_zero3", [(0, "batch", 0)], 2
    on_trainer_ranks(_ends_and_goes_on, world_size, *told, timeout_s=60.0)


class _ToldInEvaluation(AdamwRegressor):
    hears, last = (0, 1), -1

    def _hear(self, batch_idx):
        self.last = batch_idx
        if batch_idx == 1 and self.global_rank in self.hears:
            os.kill(os.getpid(), signal.SIGTERM)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self._hear(batch_idx)

    def predict_step(self, batch, batch_idx):
        self._hear(batch_idx)
        return super().predict_step(batch, batch_idx)


def _evaluate(rank, world_size, folder, strategy, hears):
    for fn in ("validate", "predict"):
        told = seeded(_ToldInEvaluation)
        told.hears = hears
        with pytest.raises(SIGTERMException):
            getattr(make_trainer(strategy, folder), fn)(told, make_loader())
        assert told.last == 1, fn


@pytest.mark.parametrize(
    ("strategy", "hears"), [(SHARDED[0], (0, 1)), *((name, (1,)) for name in SHARDED[::2])], ids=str
)
def test_an_evaluation_alone_ends_on_all_ranks_before_the_same_batch(tmp_path, strategy, hears):
    on_trainer_ranks(_evaluate, 2, tmp_path, strategy, hears, timeout_s=40.0)


def test_so_does_an_evaluation_on_one_rank(tmp_path):
    on_trainer_ranks(_evaluate, 1, tmp_path, "scratch_fsdp", (0,), timeout_s=40.0)
