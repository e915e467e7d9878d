"""What hooks, callbacks and hyper-parameters put into a checkpoint is whole, or refused by name."""

import re
import warnings

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from tests.support.cases import each_on_trainer_ranks
from tests.support.trainer import (
    SHARDED,
    Regressor,
    make_loader,
    make_trainer,
    seeded,
    with_options,
)


class _Average(pl.Callback):
    """Keeps a mean of the weights."""

    def __init__(self, *, saves_whole=False):
        self.mean, self.saves_whole = {}, saves_whole

    def on_fit_start(self, trainer, pl_module):
        self.mean = {n: p.detach().clone() for n, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer, pl_module, *_):
        for name, parameter in pl_module.named_parameters():
            self.mean[name].lerp_(parameter.detach(), 0.1)

    def state_dict(self):
        means = self.mean.items()
        return {"mean": {n: m.full_tensor() if self.saves_whole else m for n, m in means}}


class _PutsWeight(Regressor):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = [{"head": self.head.weight.detach()}]


class _Saves(pl.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, *_):
        trainer.save_checkpoint(self.path)


class _Around(Regressor):
    """Keeps a module among its hyper-parameters."""

    def __init__(self, inner, loss):
        super().__init__()
        self.save_hyperparameters()
        self.inner = inner

    def forward(self, x):
        return self.inner(super().forward(x))


def _around():
    with warnings.catch_warnings(action="ignore"):  # Lightning advises what is required here
        return _Around(nn.Linear(3, 3), nn.MSELoss())


def _put_slices(rank, world_size, strategy, folder):
    """A DTensor would have been saved with the slice of rank 0 alone."""
    for name, options in (("checkpoint", {}), ("extra", {"checkpoint": "sharded"})):
        path = folder / f"{strategy}-{name}.ckpt"
        for average, model, at in (
            ([_Average()], Regressor, r"['callbacks']['_Average']['mean']['inlet.weight']"),
            ([], _PutsWeight, r"['mine'][0]['head']"),
            ([], _around, r"['hyper_parameters']['inner']"),
        ):
            chosen = with_options(strategy, **options) if options else strategy
            trainer = make_trainer(chosen, folder, callbacks=[*average, _Saves(path)])
            message = re.escape(f"{name}{at}: expected ") + ".*(full_tensor|ignore=)"
            with pytest.raises(TypeError, match=message):
                trainer.fit(seeded(model), make_loader(8))
        assert not path.exists()


def test_a_slice_and_a_sharded_module_are_refused_with_their_place(tmp_path):
    each_on_trainer_ranks(_put_slices, 2, [SHARDED[0], SHARDED[4]], tmp_path)


def _put_wholes(rank, world_size, strategy, folder):
    path, average = folder / f"{strategy}.ckpt", _Average(saves_whole=True)
    trainer = make_trainer(strategy, folder, callbacks=[average, _Saves(path)])
    trainer.fit(seeded(Regressor), make_loader(8))
    saved = torch.load(path, weights_only=True)["callbacks"]["_Average"]["mean"]
    assert {n: m.shape for n, m in saved.items()} == {
        n: p.shape for n, p in seeded(Regressor).named_parameters()
    }


def test_what_is_made_whole_is_saved(tmp_path):
    each_on_trainer_ranks(_put_wholes, 2, [SHARDED[0], SHARDED[4]], tmp_path)


def _keep_module(rank, world_size, strategy, folder):
    """Before the first step, not when the first checkpoint is due."""
    message = r"got 'inner', a Linear that is sharded.*ignore=\['inner'\]"
    trainer = make_trainer(strategy, folder, enable_checkpointing=True)
    with pytest.raises(NotImplementedError, match=message):
        trainer.fit(seeded(_around), make_loader(8))
    assert trainer.global_step == 0
    make_trainer(strategy, folder).fit(seeded(_around), make_loader(8))
    evaluates = make_trainer(strategy, folder, enable_checkpointing=True)
    evaluates.validate(seeded(_around), make_loader(8), verbose=False)


def test_a_module_among_hyper_parameters_is_refused_where_checkpoints_are_due(tmp_path):
    each_on_trainer_ranks(_keep_module, 2, [SHARDED[1], SHARDED[2], SHARDED[4]], tmp_path)
