"""Ranks with different numbers of batches: finished or refused by name, never a hang."""

import re
from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_fsdp.core.sharded_module import units_in
from lightning_fsdp.strategies.batches import _LockstepLoader
from tests.support.ranks import assert_errors, errors_on_ranks
from tests.support.trainer import (
    SHARDED,
    Regressor,
    as_torchrun,
    assert_each_like_ddp,
    assert_like_ddp,
    at_both_stages,
    make_data,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("kept_ranks")

STRATEGY = SHARDED[0]
FEW = (SHARDED[1], "fsdp1_zero3")  # what a loader says of its length is nothing to an engine


class _Stream(IterableDataset):
    """So many samples on this rank; may say so, or say something else."""

    def __init__(self, num_samples, seed=0):
        self.data = Subset(make_data(64, seed), range(num_samples))

    def __iter__(self):
        return iter(self.data)


class _SaysLength(_Stream):
    def __init__(self, num_samples, said, seed=0):
        super().__init__(num_samples, seed)
        self.said = said

    def __len__(self):
        return self.said


def _map_style(num_batches, seed):
    data = Subset(make_data(64, seed), range(4 * num_batches))
    return DataLoader(data, batch_size=4)


def _stream(num_batches, seed):
    return DataLoader(_Stream(4 * num_batches, seed), batch_size=4)


def _lying(num_batches, seed):
    return DataLoader(_SaysLength(4 * num_batches, said=64, seed=seed), batch_size=4)


class _Own:
    """A loader that is not torch's."""

    def __init__(self, num_batches, seed):
        self.loader = _map_style(num_batches, seed)

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        return iter(self.loader)


KINDS = {"map-style": _map_style, "stream": _stream, "lying": _lying, "own": _Own}


# -- evaluation: every batch is used ---------------------------------------------------------------


def _predict_by_lightnings_sampler(strategy, folder, rank):
    trainer = make_trainer(strategy, folder)
    model = seeded(Regressor)
    found = trainer.predict(model, make_loader(9, batch_size=2))  # dealt out without padding
    assert len(found) == (3 if rank == 0 else 2)
    trainer.fit(model, make_loader())
    return {"found": found, "weights": weights_of(model)}


def test_prediction_gives_every_sample_once(tmp_path):
    assert_like_ddp(_predict_by_lightnings_sampler, tmp_path)


class _TwoLoaders(Regressor):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)


def _evaluate(kind):
    def scenario(strategy, folder, rank):
        options = {"use_distributed_sampler": False, "max_epochs": 2, "num_sanity_val_steps": 2}
        trainer = make_trainer(strategy, folder, **options)
        make = KINDS[kind]
        uneven = make(2 + 3 * rank, seed=rank)
        model = seeded(_TwoLoaders)
        outcome = {"before": trainer.validate(model, uneven, verbose=False)}
        train = make_loader(16, seed=10 + rank)
        trainer.fit(model, train, [uneven, make(4 - rank, seed=5 + rank)])
        outcome["metrics"] = {k: v.clone() for k, v in trainer.callback_metrics.items()}
        outcome["test"] = trainer.test(model, uneven, verbose=False)
        outcome["predict"] = trainer.predict(model, uneven)
        assert len(outcome["predict"]) == 2 + 3 * rank
        outcome["weights"] = weights_of(model)
        return outcome

    return scenario


@at_both_stages
def _evaluate_map_style(strategy, folder, rank):
    return _evaluate("map-style")(strategy, folder, rank)


def _evaluate_stream(strategy, folder, rank):
    return _evaluate("stream")(strategy, folder, rank)


def _evaluate_lying(strategy, folder, rank):
    return _evaluate("lying")(strategy, folder, rank)


def _evaluate_own(strategy, folder, rank):
    return _evaluate("own")(strategy, folder, rank)


def test_evaluation_uses_every_batch_of_every_rank(tmp_path):
    assert_each_like_ddp([_evaluate_map_style, _evaluate_stream], tmp_path / "of torch")
    scenarios = [_evaluate_lying, _evaluate_own]
    assert_each_like_ddp(scenarios, tmp_path / "others", sharded=FEW)


def _frees_again(rank, world_size, folder):
    states = []

    class Watch(pl.Callback):
        def on_validation_batch_end(self, trainer, module, *args):
            states.append([unit.is_held for unit in units_in(module)])

        def on_train_epoch_start(self, trainer, module):
            self.on_validation_batch_end(trainer, module)
            for unit in units_in(module):
                assert unit.reshard_after_forward

    options = {"use_distributed_sampler": False, "max_epochs": 2, "num_sanity_val_steps": 0}
    trainer = make_trainer(STRATEGY, folder, callbacks=[Watch()], **options)
    trainer.fit(seeded(Regressor), make_loader(16), _map_style(2 + rank, seed=rank))
    assert set(states[0]) == {False}, "before the first epoch"
    assert set(states[1]) == {False}, "after the first validation batch"
    assert set(states[2]) == {True}, "from the last common batch on"
    assert set(states[3 + rank]) == {False}, "in the second epoch"


def test_what_was_gathered_for_an_uneven_evaluation_is_freed_after_it(tmp_path):
    on_trainer_ranks(_frees_again, 2, tmp_path)


def _limited(strategy, folder, rank):
    outcome = {}
    for limit in (1, 2, 3, 0.5):
        trainer = make_trainer(
            strategy, folder, use_distributed_sampler=False, limit_val_batches=limit
        )
        model = seeded(Regressor)
        loader = _map_style(3 + rank, seed=rank)
        if limit == 0.5:  # a fraction means that of the longest on every rank
            loader = _map_style(4, seed=rank) if strategy == "ddp" and rank == 0 else loader
        outcome[str(limit)] = trainer.validate(model, loader, verbose=False)
        if limit == 2:
            trainer.fit(model, make_loader(16))
    return outcome


def test_limits_mean_the_same_on_every_rank(tmp_path):
    assert_like_ddp(_limited, tmp_path)


class _LogsEachStep(Regressor):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True, on_step=True)


def _log_each_step(rank, world_size, folder, kind):
    as_torchrun(rank, world_size)
    trainer = make_trainer(STRATEGY, folder, use_distributed_sampler=False)
    trainer.validate(seeded(_LogsEachStep), KINDS[kind](2 + rank, seed=0), verbose=False)


@pytest.mark.parametrize("kind", ["map-style", "stream"])
def test_a_collective_in_a_step_that_not_all_ranks_take_is_refused(tmp_path, kind):
    errors = errors_on_ranks(_log_each_step, 2, tmp_path, kind)
    for error in errors:
        assert error.type_name == "RuntimeError"
        assert re.search("reduce inside an evaluation step.*on_epoch=True", error.message)


def _no_batch(rank, world_size, folder, stage):
    as_torchrun(rank, world_size)
    trainer = make_trainer(STRATEGY, folder, use_distributed_sampler=False)
    loader = _map_style(3 * rank, seed=0)
    if stage == "fit":
        trainer.fit(seeded(Regressor), loader)
    else:
        trainer.predict(seeded(Regressor), loader)


@pytest.mark.parametrize("stage", ["fit", "predict"])
def test_a_rank_without_any_batch_is_refused_on_every_rank(tmp_path, stage):
    said = "expected at least one on every rank, got 0 on rank 0, 3 on rank 1"
    assert_errors(errors_on_ranks(_no_batch, 2, tmp_path, stage), "ValueError", said)


# -- training: every rank stops at the shortest ----------------------------------------------------


def _train(kind, model_class=Regressor):
    def scenario(strategy, folder, rank):
        # Five batches on rank 0, three on rank 1; DDP would hang, so it gets what is used.
        loader = KINDS[kind](3 if strategy == "ddp" else 5 - 2 * rank, seed=rank)
        trainer = make_trainer(
            strategy,
            folder,
            use_distributed_sampler=False,
            max_epochs=2,
            accumulate_grad_batches=2,
        )
        model = seeded(model_class)
        if strategy != "ddp" and rank == 0:
            with pytest.warns(UserWarning, match=r"Ranks have different|Only 1 of 2 ranks"):
                trainer.fit(model, loader, make_loader(16))
        else:
            trainer.fit(model, loader, make_loader(16))
        if kind != "lying":  # then Lightning cannot know which batch is the last
            assert trainer.global_step == 4  # per epoch: two batches, then the last alone
        return {"weights": weights_of(model), "losses": model.losses}

    return scenario


class _CountsSteps(Regressor):
    """Has the loader made before there is an optimizer."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches == 4
        return super().configure_optimizers()


def _train_counted(strategy, folder, rank):
    return _train("map-style", _CountsSteps)(strategy, folder, rank)


@at_both_stages
def _train_map_style(strategy, folder, rank):
    return _train("map-style")(strategy, folder, rank)


def _train_stream(strategy, folder, rank):
    return _train("stream")(strategy, folder, rank)


def _train_lying(strategy, folder, rank):
    return _train("lying")(strategy, folder, rank)


def _train_own(strategy, folder, rank):
    return _train("own")(strategy, folder, rank)


@pytest.mark.quick
def test_training_stops_at_the_shortest_rank(tmp_path):
    assert_each_like_ddp([_train_map_style, _train_stream], tmp_path / "of torch")
    scenarios = [_train_counted, _train_lying, _train_own]
    assert_each_like_ddp(scenarios, tmp_path / "others", sharded=FEW)


# -- the loader itself -----------------------------------------------------------------------------


def _keeps_loaders(rank, world_size, folder):
    even = make_loader()
    trainer = make_trainer(STRATEGY, folder)
    trainer.fit(seeded(Regressor), even)
    assert type(trainer.train_dataloader) is DataLoader

    trainer = make_trainer(STRATEGY, folder, use_distributed_sampler=False)
    with pytest.warns(UserWarning, match="Ranks have different") if rank == 0 else nullcontext():
        trainer.fit(seeded(Regressor), _map_style(2 + rank, seed=0))
    assert len(trainer.train_dataloader) == len(list(trainer.train_dataloader)) == 2

    stream = DataLoader(_Stream(16, seed=rank), batch_size=4)
    trainer = make_trainer(STRATEGY, folder)
    trainer.fit(seeded(Regressor), stream)
    wrapped = trainer.train_dataloader
    assert isinstance(wrapped, _LockstepLoader)
    assert wrapped.dataset is stream.dataset
    assert wrapped.batch_size == 4
    wrapped.worker_init_fn = print
    assert stream.worker_init_fn is print
    with pytest.raises(TypeError, match="has no length"):
        len(wrapped)

    class Resumable(DataLoader):
        position = 0

        def state_dict(self):
            return {"position": self.position}

        def load_state_dict(self, state):
            self.position = state["position"]

    stream = Resumable(_Stream(16, seed=rank), batch_size=4)
    stream.position = 3 + rank
    trainer = make_trainer(STRATEGY, folder)
    trainer.fit(seeded(Regressor), stream)
    trainer.save_checkpoint(folder / "loader.ckpt")
    states = torch.load(folder / "loader.ckpt", weights_only=True)["loops"]["fit_loop"]
    assert states["state_dict"]["combined_loader"] == [{"position": 3}]
    trainer.train_dataloader.load_state_dict({"position": 7})
    assert stream.position == 7


def test_a_loader_that_needs_nothing_is_left_alone_and_a_wrapped_one_stays_itself(tmp_path):
    on_trainer_ranks(_keeps_loaders, 2, tmp_path)
