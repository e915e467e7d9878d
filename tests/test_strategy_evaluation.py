"""Evaluation around training, and what a module is after it: as with DDP, whole, ready to go on."""

import copy
import gc
import io
import itertools
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from tests.support.cases import each_on_trainer_ranks
from tests.support.trainer import (
    SHARDED,
    Regressor,
    assert_like_ddp,
    at_both_stages,
    fit,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    outcome_of,
    seeded,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("kept_ranks")


@at_both_stages
def _evaluate_around_fit(strategy, folder, rank):
    trainer = make_trainer(strategy, folder, num_sanity_val_steps=2)
    model = seeded(Regressor)
    loader, other = make_loader(24, seed=1), make_loader(16, seed=2)
    outcome = {"before": trainer.validate(model, loader, verbose=False)}
    outcome["test before"] = trainer.test(model, other, verbose=False)
    outcome["predict before"] = trainer.predict(model, other)
    trainer.fit(model, make_loader(), loader)
    outcome["fit"] = outcome_of(trainer, model)
    outcome["after"] = trainer.validate(model, loader, verbose=False)
    outcome["test after"] = trainer.test(model, other, verbose=False)
    outcome["predict after"] = trainer.predict(model, other)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, make_loader(), loader)
    assert trainer.global_step == 8
    outcome["second fit"] = outcome_of(trainer, model)
    outcome["plain forward"] = model(torch.ones(2, 5)).detach()
    return outcome


def test_validate_test_and_predict_before_and_after_fit_and_a_second_fit(tmp_path):
    assert_like_ddp(_evaluate_around_fit, tmp_path)


def _evaluate_in_inference_mode(strategy, folder, rank):
    trainer, model = fit(strategy, folder)
    with torch.inference_mode():
        outcome = {"test": trainer.test(model, make_loader(16, seed=2), verbose=False)}
        outcome["predict"] = trainer.predict(model, make_loader(16, seed=2))
    assert not any(parameter.is_inference() for parameter in model.parameters())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, make_loader())
    return {**outcome, **outcome_of(trainer, model)}


def test_after_an_evaluation_in_inference_mode_the_module_trains_on(tmp_path):
    assert_like_ddp(_evaluate_in_inference_mode, tmp_path, sharded=SHARDED)


def _given_back(rank, world_size, folder):
    for strategy in (*SHARDED[:2], "fsdp1_zero2", "fsdp2_zero3"):
        model = seeded(Regressor)
        model.head.weight.mark = "mine"
        parameters = dict(model.named_parameters())
        structure = repr(model)
        trainer, _ = fit(strategy, folder, model)
        assert type(model) is Regressor
        assert repr(model) == structure
        for module in model.modules():
            assert not module._forward_pre_hooks
            assert not module._forward_hooks
            assert not any("fsdp" in name for name in vars(module))
        for name, parameter in model.named_parameters():
            assert parameter is parameters[name]
            assert type(parameter) is nn.Parameter
            assert parameter.is_leaf
        assert vars(model.head.weight) == {"mark": "mine"}
        assert model.device == torch.device("cpu")
        state = trainer.optimizers[0].state[model.head.weight]
        if strategy.startswith("scratch"):
            assert type(state["momentum_buffer"]).__name__ == "ShardedTensor"
        copy.deepcopy(model).head.weight.sum().backward()
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)


def test_the_module_is_given_back_as_it_was(tmp_path):
    on_trainer_ranks(_given_back, 2, tmp_path)


class _ChangesParts(Regressor):
    """What a hook puts into the module is the user's, and outlives the fit."""

    def on_fit_start(self):
        self.scale = nn.Module()
        self.scale.register_buffer("factor", torch.tensor(1.5))
        self.blocks[0].register_buffer("shift", torch.ones(3))
        self.blocks[0].up = nn.Sequential(self.blocks[0].up, nn.Tanh())
        self.blocks[1].register_forward_hook(lambda block, args, out: self.scale.factor * out)
        self.head.register_forward_pre_hook(lambda head, args: (args[0] / 2,))

    def on_train_epoch_end(self):
        self.inlet, self.first = nn.Sequential(self.inlet, nn.ReLU()), self.inlet
        self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "inside.ckpt")


@at_both_stages
def _changes_parts(strategy, folder, rank):
    model = seeded(_ChangesParts)
    trainer = make_trainer(strategy, folder)
    trainer.fit(model, make_loader())
    trainer.test(model, make_loader(8), verbose=False)
    saved = torch.load(folder / "inside.ckpt")["state_dict"]
    return {**outcome_of(trainer, model), "saved": saved, "parts": len(list(model.modules()))}


def test_parts_that_hooks_have_put_in_stay_after_the_fit_as_under_ddp(tmp_path):
    assert_like_ddp(_changes_parts, tmp_path)


class _KeepsFirst(pl.Callback):
    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 0:
            self.kept = copy.deepcopy(module.state_dict())

    def on_train_end(self, trainer, module):
        module.load_state_dict(self.kept)


def _goes_back(strategy, folder, rank):
    keeps = _KeepsFirst()
    trainer, model = fit(strategy, folder, max_epochs=2, callbacks=[keeps])
    whole = weights_of(model)
    if strategy.startswith(("scratch", "fsdp2")):  # the state is sharded, and the module no more
        with pytest.raises(RuntimeError, match="copying the parameter named"):
            model.load_state_dict(keeps.kept)
        torch.testing.assert_close(weights_of(model), whole, rtol=0, atol=0)
    return outcome_of(trainer, model)


def test_weights_that_a_callback_has_kept_are_loaded_where_the_fit_ends(tmp_path):
    assert_like_ddp(_goes_back, tmp_path)


class _FailsOnce(Regressor):
    fails_at = ("forward", 1)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if (self.fails_at, batch_idx) == (("forward", 1), 1):
            self.fails_at = None
            raise ValueError("once")
        return loss

    def on_after_backward(self):
        if self.fails_at == ("backward", 1) and len(self.losses) == 2:
            self.fails_at = None
            raise ValueError("once")


@at_both_stages
def _goes_on(strategy, folder, rank):
    outcome = {}
    for place in ("forward", "backward"):
        model = seeded(_FailsOnce)
        model.fails_at = (place, 1)
        trainer = make_trainer(strategy, folder)
        with pytest.raises(ValueError, match="once"):
            trainer.fit(model, make_loader())
        trainer = make_trainer(strategy, folder)
        trainer.fit(model, make_loader())
        outcome[place] = outcome_of(trainer, model)
    return outcome


def test_after_an_exception_the_same_module_trains_on(tmp_path):
    assert_like_ddp(_goes_on, tmp_path)


def _goes_on_elsewhere(rank, world_size, folder):
    outcomes = []
    for first, second in itertools.permutations(("scratch_fsdp", "fsdp1_zero3", "fsdp2_zero3"), 2):
        model = seeded(_FailsOnce)
        with pytest.raises(ValueError, match="once"):
            make_trainer(first, folder).fit(model, make_loader())
        gc.collect()  # nobody keeps the Trainer that has failed
        make_trainer(second, folder).fit(model, make_loader())
        outcomes.append(weights_of(model))
    for outcome in outcomes:
        torch.testing.assert_close(outcome, outcomes[0])


def test_after_an_exception_a_module_trains_on_under_another_engine(tmp_path):
    on_trainer_ranks(_goes_on_elsewhere, 2, tmp_path)


def _new_trainer_same_model(strategy, folder, rank):
    _, model = fit(strategy, folder)
    model(torch.ones(2, 5)).sum().backward()  # gradients of the user's own are no obstacle
    return outcome_of(*fit(strategy, folder, model))


def test_a_trained_module_can_be_given_to_a_new_trainer(tmp_path):
    assert_like_ddp(_new_trainer_same_model, tmp_path)


def _inference_mode_is_off(rank, world_size, folder):
    seen = []

    class Watch(Regressor):
        def validation_step(self, batch, batch_idx):
            seen.append(torch.is_inference_mode_enabled())
            super().validation_step(batch, batch_idx)

    # Only gloo makes Lightning avoid inference mode by itself; without that it would be on.
    import lightning.pytorch.loops.utilities as loops

    with mock.patch.object(loops, "_distributed_is_initialized", return_value=False):
        model = seeded(Watch)
        names = *SHARDED[:2], "fsdp1_zero3", "fsdp2_zero2"
        for strategy, expected in (("ddp", True), *((name, False) for name in names)):
            seen.clear()
            trainer = make_trainer(strategy, folder)
            trainer.validate(model, make_loader(16), verbose=False)
            assert set(seen) == {expected}, strategy
        trainer.fit(model, make_loader())


def test_evaluation_leaves_no_inference_tensors(tmp_path):
    on_trainer_ranks(_inference_mode_is_off, 2, tmp_path)


class _Grows(Regressor):
    """A table that is as long as this rank needed it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(2), persistent=False)

    def training_step(self, batch, batch_idx):
        self.table = torch.zeros(3 + self.global_rank)
        return super().training_step(batch, batch_idx)


def _evaluate_grown(rank, world_size, strategy, folder):
    trainer = make_trainer(strategy, folder)
    message = r"buffers on every rank, got .*table.*\(3,\).*rank 0 and .*\(4,\).* plain attr"
    with pytest.raises(ValueError, match=message):
        trainer.fit(seeded(_Grows), make_loader(), make_loader(24, seed=1))


def test_buffers_of_another_shape_on_some_rank_are_named(tmp_path):
    each_on_trainer_ranks(_evaluate_grown, 2, SHARDED[::2], tmp_path)


def _saved_with_another(rank, world_size, folder):
    for strategy in ("fsdp1_zero3", "fsdp2_zero3"):
        trainer, _ = fit(strategy, folder)
        trainer.validate(seeded(Regressor), make_loader(16), verbose=False)
        with pytest.raises(ValueError, match="LightningModule only, got"):
            trainer.save_checkpoint(folder / "another.ckpt")


def test_optimizers_are_not_saved_with_another_module_that_was_evaluated(tmp_path):
    on_trainer_ranks(_saved_with_another, 2, tmp_path)
