"""A resumed run on as many ranks is the run that was never stopped."""

import warnings
from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_fsdp import ResumableLoader
from tests.support.cases import each_on_trainer_ranks
from tests.support.resumed import Dropping, NoisySamples, keep_checkpoints, run_dropping
from tests.support.trainer import (
    SHARDED,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
    weights_of,
)


def _assert_same_run(resumed, whole, num_micro_batches):
    """Bit for bit: what was read, the losses, and the weights at the end."""
    assert resumed.numbers == whole.numbers[num_micro_batches:]
    assert [x.item() for x in resumed.losses] == [
        x.item() for x in whole.losses[num_micro_batches:]
    ]
    torch.testing.assert_close(weights_of(resumed), weights_of(whole), atol=0, rtol=0)


def _resumes(rank, world_size, strategy, folder):
    """16 samples on 2 ranks, 2 at a time, 2 at a step: 2 steps an epoch."""
    folder = folder / strategy
    options = {"length": 16, "max_epochs": 3}
    whole = run_dropping(
        strategy, folder, callbacks=[keep_checkpoints(folder)], enable_checkpointing=True, **options
    )
    assert len(whole.losses) == 3 * 4
    assert len({x.item() for x in whole.losses}) == len(whole.losses)
    # In the first epoch, at its end, in the second; where is nothing to a stage.
    for step in (1, 2) if strategy.endswith("zero3") else (3,):
        path = folder / "kept" / f"step={step}.ckpt"
        resumed = run_dropping(strategy, folder, seed=1 + rank, ckpt_path=path, **options)
        _assert_same_run(resumed, whole, 2 * step)


def test_resuming_inside_an_epoch_gives_the_run_that_was_never_stopped(tmp_path):
    # A stage is something to the core alone: there units are whole in other places.
    strategies = (*SHARDED[:2], "fsdp1_zero2", "fsdp2_zero3")
    each_on_trainer_ranks(_resumes, 2, strategies, tmp_path, timeout_s=250)


class _Epochs(pl.Callback):
    def __init__(self):
        self.started = []

    def on_train_epoch_start(self, trainer, module):
        self.started.append(trainer.current_epoch)


def _resumes_twice(rank, world_size, folder):
    """At the last batch of an epoch, which is where Lightning by itself loses count."""
    options = {"enable_checkpointing": True, "length": 16, "max_epochs": 4}
    whole = run_dropping(
        SHARDED[0], folder / "whole", callbacks=[keep_checkpoints(folder / "whole")], **options
    )
    run_dropping(
        SHARDED[0], folder, callbacks=[keep_checkpoints(folder, 2)], max_steps=2, **options
    )
    for step, seed in ((2, 1), (4, 2)):
        path = folder / "kept" / f"step={step}.ckpt"
        callbacks = [keep_checkpoints(folder, 2), epochs := _Epochs()]
        resumed = run_dropping(
            SHARDED[0], folder, seed=seed, callbacks=callbacks, ckpt_path=path, **options
        )
        _assert_same_run(resumed, whole, 2 * step)
        assert epochs.started == list(range(step // 2, 4))


def test_a_resumed_run_can_be_stopped_and_resumed_again(tmp_path):
    on_trainer_ranks(_resumes_twice, 2, tmp_path)


def _resumes_by_steps(rank, world_size, folder):
    """``max_steps``, workers that read ahead, and validation inside of the epoch."""

    def loaders():
        train = ResumableLoader(
            NoisySamples(32, is_noisy=False), 2, seed=7, num_workers=2, persistent_workers=True
        )
        return {
            "loader": train,
            "loaders": {"val_dataloaders": make_loader(8, generator=torch.Generator())},
            "val_check_interval": 4,
            "max_epochs": -1,
            "max_steps": 9,
        }

    whole = run_dropping(
        SHARDED[0],
        folder,
        callbacks=[keep_checkpoints(folder)],
        enable_checkpointing=True,
        **loaders(),
    )
    for step in (2, 4, 7):  # 2 and 4: just before a validation; 7: in the second epoch
        path = folder / "kept" / f"step={step}.ckpt"
        resumed = run_dropping(SHARDED[0], folder, seed=1 + rank, ckpt_path=path, **loaders())
        _assert_same_run(resumed, whole, 2 * step)


def test_so_do_limits_in_steps_workers_and_validation_inside_of_an_epoch(tmp_path):
    on_trainer_ranks(_resumes_by_steps, 2, tmp_path)


def _resumes_plain(rank, world_size, folder):
    """A loader that cannot be resumed, at the end of an epoch."""

    def loader():
        return DataLoader(NoisySamples(16), batch_size=2)

    at_end = ModelCheckpoint(folder / "kept", filename="{epoch}", save_top_k=-1)
    options = {"enable_checkpointing": True, "max_epochs": 3}
    whole = run_dropping(SHARDED[0], folder, callbacks=[at_end], loader=loader(), **options)
    resumed = run_dropping(
        SHARDED[0],
        folder,
        seed=1 + rank,
        loader=loader(),
        ckpt_path=folder / "kept" / "epoch=0.ckpt",
        max_epochs=3,
    )
    _assert_same_run(resumed, whole, 4)


def test_random_numbers_go_on_with_any_loader_at_the_end_of_an_epoch(tmp_path):
    on_trainer_ranks(_resumes_plain, 2, tmp_path)


def _handed(rank, world_size, folder):
    loader = ResumableLoader(NoisySamples(16), 4)
    trainer = make_trainer(SHARDED[0], folder)
    trainer.fit(seeded(Dropping), loader)
    assert trainer.train_dataloader is loader
    assert len(loader) == 2
    both = CombinedLoader([loader, make_loader(16)], "min_size")
    trainer = make_trainer(SHARDED[0], folder)
    trainer.fit(seeded(_First), both)
    with pytest.raises(TypeError, match=r"expected no batch_sampler.*use a plain DataLoader"):
        make_trainer(SHARDED[0], folder).predict(seeded(Dropping), loader)
    with (
        pytest.warns(UserWarning, match="You requested to overfit") if rank == 0 else nullcontext(),
        pytest.raises(TypeError, match=r"expected no sampler.*overfit_batches"),
    ):
        make_trainer(SHARDED[0], folder, overfit_batches=2).fit(seeded(Dropping), loader)


class _First(Dropping):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch[0], batch_idx)


def test_the_trainer_keeps_the_loader_as_it_is_or_is_refused(tmp_path):
    on_trainer_ranks(_handed, 2, tmp_path)


class _Plateaus(Dropping):
    """One scheduler goes by a loss of training, one by that of validation."""

    frequency = 1

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch[:2], batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        options = {"patience": 0, "threshold": 0.3, "factor": 0.8}
        plateaus = {
            "step": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **options),
            "epoch": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **options),
        }
        monitors = {"step": "train_loss", "epoch": "val_loss"}
        options = {"frequency": self.frequency}
        return [optimizer], [
            {"scheduler": plateau, "interval": interval, "monitor": monitors[interval], **options}
            for interval, plateau in plateaus.items()
        ]


class _EverySecond(_Plateaus):
    frequency = 2

    def configure_optimizers(self):
        optimizers, schedulers = super().configure_optimizers()
        never = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[0])
        missing = {"interval": "step", "monitor": "nothing", "strict": False}
        return optimizers, [*schedulers, {"scheduler": never, **missing}]


class _SavesAtEnds(pl.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"validated-step={trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer, module):
        trainer.save_checkpoint(self.folder / f"ended-step={trainer.global_step}.ckpt")


def _steps_at_plateaus(rank, world_size, folder):
    def run(**options):
        validated = DataLoader(NoisySamples(8, is_noisy=False), 2, generator=torch.Generator())
        loaders = {"val_dataloaders": validated}
        options = {"length": 16, "max_epochs": 3, "loaders": loaders, **options}
        return run_dropping(SHARDED[0], folder, **options)

    warnings.filterwarnings("ignore", "ReduceLROnPlateau conditioned on metric nothing")
    saved = {
        _Plateaus: (("", 1), ("", 3), ("validated-", 2), ("ended-", 4)),
        _EverySecond: (("", 2), ("", 4), ("ended-", 2)),  # 2, 4: the last batch of an epoch
    }
    for model, places in saved.items():
        kept = folder / model.__name__
        keeps = [keep_checkpoints(kept), _SavesAtEnds(kept / "kept")]
        whole = run(model=model, callbacks=keeps, enable_checkpointing=True)
        for name, step in places:
            path = kept / "kept" / f"{name}step={step}.ckpt"
            _assert_same_run(run(model=model, seed=1 + rank, ckpt_path=path), whole, 2 * step)


def test_schedulers_that_go_by_metrics_step_as_in_the_run_that_was_never_stopped(tmp_path):
    on_trainer_ranks(_steps_at_plateaus, 2, tmp_path)


class _Scheduled(_Plateaus):
    configure_optimizers = Dropping.configure_optimizers


def _stops_early(rank, world_size, folder):
    def run(*callbacks, **options):
        validated = DataLoader(NoisySamples(8, is_noisy=False), 2, generator=torch.Generator())
        stops = EarlyStopping("val_loss", patience=2, min_delta=100.0)  # after three epochs
        run = run_dropping(
            SHARDED[0],
            folder,
            model=_Scheduled,
            length=16,
            max_epochs=5,
            loaders={"val_dataloaders": validated},
            callbacks=[*callbacks, stops],
            **options,
        )
        return run, stops.state_dict()

    whole, state = run(_SavesAtEnds(folder / "kept"), enable_checkpointing=False)
    assert len(whole.losses) == 3 * 4
    for step in (2, 4):  # at the end of an epoch, where the callback looks later
        path = folder / "kept" / f"validated-step={step}.ckpt"
        resumed, state_then = run(seed=1 + rank, ckpt_path=path)
        _assert_same_run(resumed, whole, 2 * step)
        assert state_then == state


def test_callbacks_that_go_by_metrics_stop_as_in_the_run_that_was_never_stopped(tmp_path):
    on_trainer_ranks(_stops_early, 2, tmp_path)


class _Scheduler(GradientAccumulationScheduler):
    """With the arguments that Lightning's hook has."""

    def __init__(self):
        super().__init__({0: 1, 1: 3, 2: 2})
        self.called = []

    def on_train_epoch_start(self, trainer, pl_module):
        super().on_train_epoch_start(trainer, pl_module)
        self.called.append(trainer.current_epoch)


def _accumulates_as_scheduled(rank, world_size, folder):
    def run(**options):
        scheduler = _Scheduler()
        callbacks = [scheduler, *options.pop("callbacks", ())]
        options = {"callbacks": callbacks, "length": 24, "max_epochs": 3, **options}
        trained = run_dropping(SHARDED[0], folder, accumulate_grad_batches=1, **options)
        assert scheduler.called == [0, 1, 2][-len(scheduler.called) :], "once each"
        return trained

    whole = run(callbacks=[keep_checkpoints(folder)], enable_checkpointing=True)
    for step, num_micro_batches in ((2, 2), (7, 9), (9, 14)):  # an epoch is 6, 2 and 3 steps
        path = folder / "kept" / f"step={step}.ckpt"
        _assert_same_run(run(seed=1 + rank, ckpt_path=path), whole, num_micro_batches)


def test_a_resumed_epoch_accumulates_as_many_micro_batches_as_its_callback_says(tmp_path):
    on_trainer_ranks(_accumulates_as_scheduled, 2, tmp_path)
