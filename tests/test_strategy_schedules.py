"""Learning rates, early stopping, logging and finders, as under DDP."""

import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.tuner import Tuner

from tests.support.trainer import (
    Regressor,
    assert_like_ddp,
    fit,
    make_loader,
    make_trainer,
    outcome_of,
    seeded,
    weights_of,
)

# -- schedulers and callbacks ----------------------------------------------------------------------


class _Scheduled(Regressor):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class _Plateau(Regressor):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"},
        }


def _schedulers(strategy, folder, rank):
    outcome = {}
    for kind in (_Scheduled, _Plateau):
        trainer = make_trainer(strategy, folder, max_epochs=3)
        model = seeded(kind)
        trainer.fit(model, make_loader(), make_loader(16, seed=1))
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        assert rates[0] < 0.1
        outcome[kind.__name__] = {**outcome_of(trainer, model), "rates": rates}
    return outcome


def test_learning_rate_schedules_are_those_of_ddp(tmp_path):
    assert_like_ddp(_schedulers, tmp_path)


def _early_stopping(strategy, folder, rank):
    stopping = EarlyStopping("val_loss", patience=1, min_delta=0.3)
    trainer = make_trainer(strategy, folder, max_epochs=20, callbacks=[stopping])
    model = seeded(Regressor)
    trainer.fit(model, make_loader(), make_loader(16, seed=1))
    assert 0 < trainer.current_epoch < 20
    return {**outcome_of(trainer, model), "epochs": trainer.current_epoch}


def test_early_stopping_is_that_of_ddp(tmp_path):
    assert_like_ddp(_early_stopping, tmp_path)


# -- logging and finders --------------------------------------------------------------------------


class _Sampled(Regressor):
    """Logs what it was given, summed over ranks only on request."""

    def training_step(self, batch, batch_idx):
        first = batch[0][0, 0]
        self.log("synced", first, sync_dist=True, on_step=True, on_epoch=True)
        self.log("summed", first, sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("local", first, on_step=False, on_epoch=True)
        self.gathered = self.all_gather(first)
        return super().training_step(batch, batch_idx)


def _logging(strategy, folder, rank):
    trainer, model = fit(strategy, folder, seeded(_Sampled))
    return {**outcome_of(trainer, model), "gathered": model.gathered}


def test_ranks_get_different_data_and_logs_are_reduced(tmp_path):
    assert_like_ddp(_logging, tmp_path)


def _lr_find(strategy, folder, rank):
    model = seeded(Regressor)
    before = weights_of(model)
    trainer = make_trainer(strategy, folder)
    finder = Tuner(trainer).lr_find(model, make_loader(64), num_training=8, update_attr=True)
    torch.testing.assert_close(weights_of(model), before)
    trainer.fit(model, make_loader())
    return {**outcome_of(trainer, model), "losses found": finder.results["loss"], "lr": model.lr}


def test_the_learning_rate_finder_finds_what_it_finds_with_ddp(tmp_path):
    assert_like_ddp(_lr_find, tmp_path)
