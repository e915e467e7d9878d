"""Loss scaling under sharding is that of DDP."""

import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_fsdp.strategies.precision import ShardedPrecision
from tests.support.cases import each_on_trainer_ranks
from tests.support.trainer import (
    SHARDED,
    Regressor,
    assert_each_like_ddp,
    assert_like_ddp,
    make_loader,
    make_trainer,
    not_under,
    on_trainer_ranks,
    seeded,
    weights_of,
)

MAX = {"norm": 0.1, "value": 0.01}  # less than there is


# On CPU the Trainer takes it as a plugin only: by name it becomes bf16-mixed.
class Sgd(Regressor):
    """Its steps are proportional to the gradient: the rounding to fp16 stays as small as it is."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class Adamw(Regressor):
    """A large eps keeps the rounding to fp16 from being amplified."""

    fused = False

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-2, fused=self.fused)


class ByHand(Sgd):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class ClipsByHand(ByHand):
    algorithm = "norm"

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(Sgd.training_step(self, batch, batch_idx))
        self.clip_gradients(optimizer, MAX[self.algorithm], self.algorithm)
        optimizer.step()


class Scales(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *args):
        self.seen.append(trainer.precision_plugin.scaler.get_scale())


def fp16(scale=2.0**18):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    return MixedPrecision("16-mixed", "cpu", scaler)


def _fit_fp16(strategy, folder, model, loader=None, ckpt_path=None, **options):
    scales, plugin = Scales(), fp16()
    trainer = make_trainer(
        strategy, folder, plugins=[plugin], **{"max_epochs": 2, "callbacks": [scales], **options}
    )
    trainer.fit(model, loader or make_loader(), ckpt_path=ckpt_path)
    assert trainer.precision == "16-mixed"
    if not strategy.startswith("fsdp1"):  # which gets one that agrees over ranks
        assert trainer.precision_plugin.scaler is plugin.scaler
    state = trainer.precision_plugin.scaler.state_dict()
    return trainer, {
        "weights": weights_of(model),
        "losses": list(model.losses),
        "scales": scales.seen,
        "scaler": {name: torch.tensor(float(value)) for name, value in state.items()},
    }


def _plain(strategy, folder, rank):
    _, outcome = _fit_fp16(strategy, folder, seeded(Sgd))
    assert min(outcome["scales"]) < 2.0**18, "no step was skipped"
    assert len(set(outcome["scales"])) < len(outcome["scales"]), "no step was taken"
    return outcome


def _manual(strategy, folder, rank):
    return _fit_fp16(strategy, folder, seeded(ByHand))[1]


@not_under("fsdp1", reason="micro-batches are added up in fp16, where they overflow earlier")
def _accumulating(strategy, folder, rank):
    return _fit_fp16(strategy, folder, seeded(Sgd), accumulate_grad_batches=2, max_epochs=4)[1]


def _fused_and_clipped(strategy, folder, rank):
    # Lightning refuses the two together, so DDP runs the same without the fused kernel.
    model = seeded(Adamw)
    model.fused = strategy != "ddp"
    return _fit_fp16(strategy, folder, model, gradient_clip_val=0.1)[1]


def _clipped_by_value(strategy, folder, rank):
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    return _fit_fp16(strategy, folder, seeded(Sgd), **options)[1]


class SkipsSome(Sgd):
    """A training step may return nothing: there is no backward then, and nothing to unscale."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


@not_under("fsdp1", reason="on one rank, a forward without backward spoils the next gradient")
def _without_a_loss(strategy, folder, rank):
    warnings.filterwarnings("ignore", "`training_step` returned `None`")
    return _fit_fp16(strategy, folder, seeded(SkipsSome))[1]


@pytest.mark.quick
def test_fp16_skips_the_steps_that_ddp_skips_and_is_near_it(tmp_path):
    scenarios = [_plain, _manual, _accumulating, _fused_and_clipped, _clipped_by_value]
    assert_each_like_ddp(scenarios, tmp_path, atol=5e-3, rtol=5e-3)


def test_a_training_step_without_a_loss_is_no_step(tmp_path):
    """Lightning allows it on one rank only."""
    assert_like_ddp(_without_a_loss, tmp_path, world_size=1, atol=5e-3, rtol=5e-3)


def _clipped_by_hand(rank, world_size, case, folder):
    """Lightning's own plugin would clip what is still scaled."""
    strategy, algorithm = case
    by_hand = seeded(ClipsByHand)
    by_hand.algorithm = algorithm
    _, found = _fit_fp16(strategy, Path(folder), by_hand)
    options = {"gradient_clip_val": MAX[algorithm], "gradient_clip_algorithm": algorithm}
    _, expected = _fit_fp16(strategy, Path(folder), seeded(Sgd), **options)
    assert found["scales"] == expected["scales"]
    torch.testing.assert_close(found["weights"], expected["weights"], atol=0, rtol=0)


def test_what_is_clipped_by_hand_is_not_scaled(tmp_path):
    cases = [(SHARDED[1], "norm"), ("fsdp1_zero3", "value"), ("fsdp2_zero2", "norm")]
    each_on_trainer_ranks(_clipped_by_hand, 2, cases, str(tmp_path))


def _across(rank, world_size, folder):
    """Files of one strategy, resumed by another: the scaler goes on from where it was."""
    for writer, reader in (("ddp", SHARDED[0]), (SHARDED[0], "ddp"), (SHARDED[1], SHARDED[0])):
        path = Path(folder) / f"{writer}-{reader}.ckpt"
        trainer, _ = _fit_fp16(writer, Path(folder), seeded(Sgd), max_epochs=1)
        trainer.save_checkpoint(path)
        _, expected = _fit_fp16(reader, Path(folder), seeded(Sgd), max_epochs=2)
        model = seeded(Sgd, seed=5)
        _, found = _fit_fp16(reader, Path(folder), model, ckpt_path=path, max_epochs=2)
        assert found["scaler"] == expected["scaler"]
        assert found["scales"] == expected["scales"][4:]
        torch.testing.assert_close(found["weights"], expected["weights"], atol=5e-3, rtol=5e-3)


def test_the_scaler_is_in_checkpoints_that_other_strategies_read(tmp_path):
    on_trainer_ranks(_across, 2, str(tmp_path))


class _InfOnRankOne(Sgd):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if self.global_rank == 1 and batch_idx == 1 else loss


def _one_overflow(strategy, folder, rank):
    plugin, scales = fp16(scale=8.0), Scales()
    model = seeded(_InfOnRankOne)
    make_trainer(strategy, folder, plugins=[plugin], callbacks=[scales]).fit(model, make_loader())
    assert scales.seen == [8.0, 4.0, 4.0, 4.0]
    return {"weights": weights_of(model), "scales": scales.seen}


def test_an_overflow_on_one_rank_skips_one_step_on_all(tmp_path):
    assert_like_ddp(_one_overflow, tmp_path, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("given", ["plugin without a scaler", "own precision"])
def test_fp16_gets_torchs_scaler_where_none_is_given(tmp_path, given):
    plugin = ShardedPrecision("16-mixed")
    if given == "plugin without a scaler":
        plugin = MixedPrecision("16-mixed", "cpu")
    trainer = make_trainer("scratch_fsdp", tmp_path, plugins=[plugin])
    assert trainer.precision_plugin.precision == "16-mixed"
    assert trainer.precision_plugin.scaler.is_enabled()
    assert trainer.precision_plugin.scaler.get_scale() == 2.0**16


def test_on_cpu_the_trainer_itself_says_that_fp16_by_name_becomes_bf16(tmp_path):
    with pytest.warns(UserWarning, match="Using `precision='bf16-mixed'` instead"):
        trainer = make_trainer("scratch_fsdp", tmp_path, precision="16-mixed")
    assert trainer.precision == "bf16-mixed"
    assert trainer.precision_plugin.scaler is None
