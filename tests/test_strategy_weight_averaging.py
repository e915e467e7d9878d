"""An average of shards is that of whole weights: Lightning's own callback under DDP."""

from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch.utils.data import DataLoader, Subset

from lightning_fsdp import ShardedEMA
from tests.support.counting import CollectiveCounter
from tests.support.trainer import (
    SHARDED,
    Regressor,
    assert_each_like_ddp,
    assert_like_ddp,
    at_both_stages,
    make_data,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
    weights_of,
    with_options,
)

pytestmark = pytest.mark.usefixtures("kept_ranks")


class _Net(Regressor):
    """With a buffer that moves, a frozen and a tied weight."""

    def __init__(self):
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.inlet.bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(2))
        self.validated = []

    def training_step(self, batch, batch_idx):
        self.seen += torch.tensor([1.0, 2.0])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.validated.append(self.loss(batch) + self.seen.sum())


def _ema(strategy, **options):
    kind = EMAWeightAveraging if strategy == "ddp" else ShardedEMA
    return kind(decay=0.6, **options)


def _fit(strategy, folder, model, *, ema=None, ckpt_path=None, callbacks=(), val=None, **options):
    averaging = _ema(strategy, **(ema or {}))
    trainer = make_trainer(
        with_options(strategy, **options.pop("engine", {})),
        folder,
        callbacks=[averaging, *callbacks],
        enable_checkpointing=bool(callbacks),
        **{"max_epochs": 2, **options},
    )
    trainer.fit(model, make_loader(), val or make_loader(8, seed=1), ckpt_path=ckpt_path)
    return trainer


def _outcome(model):
    return {"weights": weights_of(model), "losses": model.losses, "validated": model.validated}


@at_both_stages
def _between_micro_batches(strategy, folder, rank):
    """Validates in the middle of an accumulation, when units may be whole."""
    model = seeded(_Net)
    _fit(strategy, folder, model, accumulate_grad_batches=2, val_check_interval=1)
    return _outcome(model)


def _seldom(strategy, folder, rank):
    model = seeded(_Net)
    options = {"update_every_n_steps": 2, "update_starting_at_step": 3, "use_buffers": False}
    _fit(strategy, folder, model, ema={**options, "update_starting_at_epoch": 1}, max_epochs=3)
    return _outcome(model)


def _offloaded_and_recomputed(strategy, folder, rank):
    model = seeded(_Net)
    _fit(strategy, folder, model, engine={"cpu_offload": True, "activation_checkpointing": True})
    return _outcome(model)


@at_both_stages
def _uneven(strategy, folder, rank):
    """Every unit is kept whole for the rank that has more batches."""
    model = seeded(_Net)
    data = Subset(make_data(16, 1), range(4 * (1 + rank)))
    loader = DataLoader(data, batch_size=4)
    _fit(strategy, folder, model, val=loader, use_distributed_sampler=False)
    return _outcome(model)


def test_the_average_is_that_of_whole_weights_and_validation_uses_it(tmp_path):
    scenarios = [_between_micro_batches, _seldom, _offloaded_and_recomputed, _uneven]
    assert_each_like_ddp(scenarios, tmp_path)


class _WithStatistics(_Net):
    """Running statistics differ by rank; what they make of a batch shows in its loss alone."""

    def __init__(self):
        super().__init__()
        self.batch_norm = torch.nn.BatchNorm1d(5)

    def forward(self, x):
        return super().forward(self.batch_norm(x))


def _statistics(strategy, folder, rank, **ema):
    model = seeded(_WithStatistics)
    _fit(strategy, folder, model, ema=ema, val_check_interval=2)
    outcome = _outcome(model)
    if rank != 0:  # where DDP leaves this rank's own last update
        outcome["weights"] = {n: w for n, w in outcome["weights"].items() if "running" not in n}
    return outcome


def _averaged_statistics(strategy, folder, rank):
    return _statistics(strategy, folder, rank)


def _current_statistics(strategy, folder, rank):
    return _statistics(strategy, folder, rank, use_buffers=False)


def test_validation_uses_the_running_statistics_in_the_average_of_rank_0(tmp_path):
    scenarios = [_averaged_statistics, _current_statistics]
    assert_each_like_ddp(scenarios, tmp_path)


def _file(path):
    file = torch.load(path, weights_only=True)
    return {name: file[name] for name in ("state_dict", "current_model_state", "averaging_state")}


def _resumed(strategy, folder, rank):
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    uninterrupted = seeded(_Net)
    trainer = _fit(strategy, folder, uninterrupted, callbacks=[keep])
    trainer.save_checkpoint(folder / "after.ckpt")
    outcome = {"files": [_file(folder / f"{name}.ckpt") for name in ("step=3", "after")]}
    for name in ("step=3", "after"):
        model = seeded(_Net, seed=7)
        _fit(strategy, folder, model, ckpt_path=folder / f"{name}.ckpt", max_epochs=3)
        outcome[name] = _outcome(model)
    model = seeded(_Net, seed=7)
    trainer = make_trainer(strategy, folder)
    trainer.validate(model, make_loader(8, seed=1), folder / "step=3.ckpt", verbose=False)
    outcome["validated"] = model.validated
    return outcome


def test_an_average_is_saved_and_goes_on(tmp_path):
    assert_like_ddp(_resumed, tmp_path)


def _across(rank, world_size, folder):
    """A file of Lightning's callback under DDP, resumed by shards, and the reverse."""
    for writer, reader in (("ddp", SHARDED[0]), ("ddp", "fsdp1_zero3"), ("fsdp2_zero3", "ddp")):
        keep = ModelCheckpoint(folder / writer, filename="one", every_n_epochs=1)
        trainer = _fit(writer, folder, seeded(_Net), callbacks=[keep], max_epochs=1)
        expected, found = seeded(_Net), seeded(_Net, seed=8)
        _fit(reader, folder, expected)
        _fit(reader, folder, found, ckpt_path=keep.best_model_path)
        torch.testing.assert_close(weights_of(found), weights_of(expected), atol=1e-6, rtol=1e-5)
        assert trainer.global_step == 4


def test_a_run_may_change_its_strategy_and_keep_its_average(tmp_path):
    on_trainer_ranks(_across, 2, tmp_path)


class _Counting(ShardedEMA):
    def on_train_batch_end(self, *args):
        with CollectiveCounter() as counter:
            super().on_train_batch_end(*args)
        assert self._num_averaged > 0
        assert not counter.calls

    def on_train_start(self, trainer, module):
        whole = sum(p.numel() for p in seeded(_Net).parameters())
        mine = sum(a.numel() for n, a in self._average.items() if n != "seen")
        assert 0 < mine < 0.6 * whole + 32


def _counted(rank, world_size, folder):
    for strategy in (*SHARDED[:2], "fsdp1_zero3", "fsdp2_zero2"):
        model = seeded(_Net)
        make_trainer(strategy, folder, callbacks=[_Counting(0.9)]).fit(model, make_loader(16))


@pytest.mark.flat("a share of one is the whole")
def test_averaging_takes_a_share_of_the_memory_and_no_communication(tmp_path):
    on_trainer_ranks(_counted, 2, tmp_path)


def _refusals(rank, world_size, folder):
    with pytest.raises(TypeError, match=r"expected a strategy of lightning_fsdp, got DDPStrategy"):
        make_trainer("ddp", folder, callbacks=[ShardedEMA()]).fit(seeded(_Net), make_loader())
    trainer = make_trainer("ddp", folder)
    trainer.fit(seeded(_Net), make_loader())
    trainer.save_checkpoint(folder / "plain.ckpt")
    warns = pytest.warns(UserWarning, match="saved without an average")
    with warns if rank == 0 else nullcontext():
        _fit(SHARDED[0], folder, seeded(_Net), ckpt_path=folder / "plain.ckpt")


def test_without_sharding_or_an_average_in_the_file_it_says_so(tmp_path):
    on_trainer_ranks(_refusals, 2, tmp_path)


def test_a_decay_outside_of_0_to_1_is_refused():
    with pytest.raises(ValueError, match=r"decay: expected a number between 0 and 1, got 1\.5"):
        ShardedEMA(1.5)


def test_a_negative_number_of_steps_is_refused():
    with pytest.raises(ValueError, match=r"update_every_n_steps: expected .* got -1"):
        ShardedEMA(update_every_n_steps=-1)


def _never_updated(rank, world_size, folder):
    found = []
    for callbacks in ([], [ShardedEMA(update_starting_at_step=1000)]):
        warns = pytest.warns(UserWarning, match="ended before the first update")
        with warns if callbacks else nullcontext():
            trainer = make_trainer(SHARDED[0], folder, callbacks=callbacks)
            trainer.fit(model := seeded(Regressor), make_loader())
        found.append(weights_of(model))
    torch.testing.assert_close(found[1], found[0], atol=0, rtol=0)


def test_a_training_that_ends_before_the_first_update_keeps_its_weights(tmp_path):
    on_trainer_ranks(_never_updated, 1, tmp_path)


def _in_turn(rank, world_size, folder):
    """One callback for two models, beside one for each."""
    kept = ShardedEMA(decay=0.6)
    for seed in (1, 2):
        found = []
        for averaging in (kept, ShardedEMA(decay=0.6)):
            model = seeded(Regressor, seed=seed)
            make_trainer(SHARDED[0], folder, callbacks=[averaging], max_epochs=1).fit(
                model, make_loader()
            )
            found.append(weights_of(model))
        torch.testing.assert_close(found[0], found[1], atol=0, rtol=0)


def test_a_second_fit_begins_a_new_average(tmp_path):
    on_trainer_ranks(_in_turn, 1, tmp_path)


class _SavesAround(_Net):
    """Before a validation, and inside of it, where the average is in the module."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.save_checkpoint(self.folder / "before.ckpt")

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.trainer.save_checkpoint(self.folder / "inside.ckpt")


def _saved_around(rank, world_size, folder):
    for strategy in SHARDED[::2]:
        model = seeded(_SavesAround)
        model.folder = folder / strategy
        _fit(strategy, folder, model, max_epochs=1, num_sanity_val_steps=0)
        before, inside = (
            torch.load(model.folder / name, weights_only=True)
            for name in ("before.ckpt", "inside.ckpt")
        )
        for part in ("state_dict", "current_model_state"):
            torch.testing.assert_close(inside[part], before[part], atol=0, rtol=0)


def test_a_checkpoint_of_a_validation_has_weights_and_average_in_their_places(tmp_path):
    on_trainer_ranks(_saved_around, 2, tmp_path)


class _Fails(_Net):
    """Inside of a forward of its second validation, once."""

    fails_in = 2

    def validation_step(self, batch, batch_idx):
        self.fails_in -= 1  # the number of the validation
        super().validation_step(batch, batch_idx)

    def forward(self, x):
        hidden = self.blocks[0](self.inlet(x))
        if self.fails_in == 0 and not self.training:
            self.fails_in = None
            raise ZeroDivisionError("on every rank")
        return self.head(self.blocks[1](hidden))


def _after_a_failure(strategy, folder, rank):
    """The run that goes on has the weights, which are those of a run without an average."""
    model = seeded(_Fails)
    averaging = [] if strategy == "ddp" else [ShardedEMA(decay=0.6)]
    options = {"num_sanity_val_steps": 0, "limit_val_batches": 1}
    trainer = make_trainer(strategy, folder, callbacks=averaging, max_epochs=3, **options)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(model, make_loader(), make_loader(8, seed=1))
    assert trainer.global_step == 8
    model.train()  # the Trainer leaves it as it was
    trainer = make_trainer(strategy, folder, max_epochs=1, limit_val_batches=0)
    trainer.fit(model, make_loader(seed=2), make_loader(8, seed=1))
    return {"losses": model.losses[8:], "weights": weights_of(model)}


def test_after_a_validation_that_fails_the_module_has_the_weights(tmp_path):
    assert_like_ddp(_after_a_failure, tmp_path, sharded=SHARDED)
