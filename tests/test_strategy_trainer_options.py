"""Options of the Trainer and callbacks of Lightning's that other files do not use: as under DDP."""

import pytest
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    ThroughputMonitor,
    Timer,
    throughput_monitor,
)
from lightning.pytorch.loggers import CSVLogger

from lightning_fsdp.strategies import lightning_internals
from tests.support.trainer import (
    Regressor,
    assert_each_like_ddp,
    make_loader,
    make_trainer,
    seeded,
    weights_of,
)


def _outcome(model):
    return {"losses": torch.stack(model.losses), **weights_of(model)}


class _Silent(Regressor):
    """``barebones`` warns of what is logged."""

    def log(self, *args, **kwargs):
        pass


def _fitted(strategy, folder, **options):
    model = seeded(_Silent)
    trainer = make_trainer(strategy, folder, **{"max_epochs": 2, **options})
    trainer.fit(model, make_loader(16), make_loader(8, seed=1))
    return _outcome(model)


def _accumulated_at_first(strategy, folder, rank):
    return _fitted(strategy, folder, callbacks=[GradientAccumulationScheduler({0: 2, 1: 1})])


def _barebones(strategy, folder, rank):
    return _fitted(strategy, folder, barebones=True)


def _timed(strategy, folder, rank):
    return _fitted(strategy, folder, callbacks=[Timer("00:00:10:00")], max_time="00:00:10:00")


def _tried(strategy, folder, rank):
    return _fitted(strategy, folder, fast_dev_run=2, logger=True)


class _OwnLoaders(Regressor):
    """Other data in each epoch."""

    def train_dataloader(self):
        return make_loader(16, seed=self.current_epoch)


def _reloaded(strategy, folder, rank):
    model = seeded(_OwnLoaders)
    make_trainer(strategy, folder, max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(model)
    return _outcome(model)


class _Decays(Regressor):
    example_input_array = torch.ones(2, 5)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def _monitored(strategy, folder, rank):
    model, summary = seeded(_Decays), ModelSummary()
    trainer = make_trainer(
        strategy,
        folder,
        max_epochs=2,
        logger=CSVLogger(folder, name="", version=""),
        callbacks=[LearningRateMonitor(), DeviceStatsMonitor(), summary],
        log_every_n_steps=1,
        profiler="simple",
    )
    trainer.fit(model, make_loader(16))
    found = summary._summary(trainer, model)
    totals = found.total_parameters, found.trainable_parameters
    rates = trainer.callbacks[0].lrs
    return {"totals": torch.tensor(totals), "rates": torch.tensor(next(iter(rates.values())))}


def _flops(device, dtype):
    return {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}[dtype]


def _measured_in_each_precision(strategy, folder, rank):
    precisions = ("32-true", "bf16-mixed", "bf16-true")
    return {each: _measured(strategy, folder / each, each) for each in precisions}


def _measured(strategy, folder, precision):
    """Lightning's share of a device's peak: that of the dtype that computes."""
    for module in (throughput_monitor, lightning_internals):
        module.get_available_flops = _flops
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]))
    trainer = make_trainer(
        strategy,
        folder,
        precision=precision,
        logger=CSVLogger(folder, name="", version=""),
        callbacks=[monitor],
        log_every_n_steps=1,
    )
    model = seeded(Regressor)
    model.flops_per_batch = 1000
    trainer.fit(model, make_loader(16))
    (throughput,) = monitor._throughputs.values()
    return torch.tensor([monitor.available_flops, throughput.available_flops])


class _Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.batches, self.epochs = [], []

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, number, loader):
        self.batches.append((prediction, torch.tensor(indices)))

    def write_on_epoch_end(self, trainer, module, predictions, indices):
        self.epochs += predictions


def _predicted(strategy, folder, rank):
    model, writer = seeded(Regressor), _Writer()
    trainer = make_trainer(strategy, folder, callbacks=[writer])
    trainer.predict(model, make_loader(16), return_predictions=False)
    assert all(map(torch.equal, writer.epochs, (batch for batch, _ in writer.batches)))
    parts = zip(*writer.batches, strict=True)
    return dict(zip(("predictions", "indices"), map(torch.cat, parts), strict=True))


class _Raises(Regressor):
    def on_train_batch_start(self, batch, batch_idx):
        if self.raises and self.global_step == 3:
            raise ZeroDivisionError


def _saved_at_an_exception(strategy, folder, rank):
    callback = ModelCheckpoint(folder, save_on_exception=True, every_n_epochs=100)
    model = seeded(_Raises)
    model.raises = True
    options = {"callbacks": [callback], "enable_checkpointing": True}
    with pytest.raises(ZeroDivisionError):
        make_trainer(strategy, folder, max_epochs=2, **options).fit(model, make_loader(16))
    (path,) = folder.glob("*.ckpt")
    resumed = seeded(_Raises, seed=1)
    resumed.raises = False
    trainer = make_trainer(strategy, folder, max_epochs=2)
    trainer.fit(resumed, make_loader(16), ckpt_path=path)
    assert trainer.global_step == 4
    return _outcome(resumed)


def test_each_is_as_under_ddp(tmp_path):
    scenarios = [
        _accumulated_at_first, _barebones, _timed, _tried, _measured_in_each_precision,
        _reloaded, _monitored, _predicted, _saved_at_an_exception,
    ]  # fmt: skip
    assert_each_like_ddp(scenarios, tmp_path)
