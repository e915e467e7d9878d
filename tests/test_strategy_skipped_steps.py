"""A step whose gradients are not finite is left out, and training goes on."""

import csv
import itertools
import warnings
from math import isnan
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_fsdp import NonfiniteGradient
from tests.support.cases import each_on_trainer_ranks
from tests.support.nonfinite import BATCH, Broken, run_broken
from tests.support.trainer import (
    SHARDED,
    AdamwRegressor,
    fit,
    make_loader,
    on_trainer_ranks,
    seeded,
    weights_of,
    with_options,
)

_CLIPS = {
    "none": {},
    "norm": {"gradient_clip_val": 0.1},
    "value": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
}


def _skipped(rank, world_size, case, folder):
    clips, value = case
    folder = folder / f"{clips} {value}"
    names = (*SHARDED[:2], "fsdp1_zero2", "fsdp2_zero3")
    # Each clips in each way; the core meets both values with each, by its two stages.
    first = (list(_CLIPS).index(clips) + isnan(value)) % 2
    for name in names[first::2]:
        logger = CSVLogger(folder, name=name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = seeded(lambda: Broken("local", value))
            trainer, model = fit(
                with_options(name, on_nonfinite="skip"),
                folder,
                model,
                make_loader(48),
                accumulate_grad_batches=2,
                logger=logger,
                **_CLIPS[clips],
            )
        messages = [str(w.message) for w in caught if "Skipped" in str(w.message)]
        assert len(messages) == (rank == 0)
        assert trainer.strategy.num_skipped_steps == 1
        torch.testing.assert_close(model.after, model.before, atol=0, rtol=0, equal_nan=True)
        assert trainer.global_step == 3
        assert model.numbers == {0, 1}
        assert all(w.isfinite().all() for w in weights_of(model).values())
        if rank == 0:
            logger.save()
            with Path(logger.experiment.metrics_file_path).open() as file:
                logged = [row["skipped_steps"] for row in csv.DictReader(file)]
            assert [float(count) for count in logged if count] == [1]


def test_a_skipped_step_writes_no_bit_and_training_goes_on(tmp_path):
    cases = itertools.product(_CLIPS, (float("nan"), float("inf")))
    each_on_trainer_ranks(_skipped, 2, cases, tmp_path, timeout_s=250)


def _like_left_out(rank, world_size, folder):
    class LeavesOut(AdamwRegressor):
        """Does by hand what a skip does."""

        def optimizer_step(self, epoch, batch_idx, optimizer, closure):
            if batch_idx == BATCH:
                closure()
            else:
                optimizer.step(closure=closure)

    for name in ("scratch_fsdp_zero3", "scratch_fsdp_zero2"):
        _, expected = fit(
            name, folder, seeded(LeavesOut), make_loader(48), accumulate_grad_batches=2
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, _ = run_broken(name, folder, "loss", "skip")
        torch.testing.assert_close(weights_of(model), weights_of(expected), atol=0, rtol=0)


def test_the_run_goes_on_as_if_the_step_had_been_left_out(tmp_path):
    on_trainer_ranks(_like_left_out, 2, tmp_path)


def _scaled(rank, world_size, folder):
    def run(where, mode, scale):
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))
        return run_broken("scratch_fsdp_zero3", folder, where, mode, plugins=[plugin])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, (trainer, model) = run("local", "raise", 8.0)  # an overflow, for all it knows
        assert trainer.precision_plugin.scaler.get_scale() == 4.0
        torch.testing.assert_close(model.after, model.before, atol=0, rtol=0, equal_nan=True)
        _, (trainer, _) = run("local", "skip", 8.0)
        assert trainer.strategy.num_skipped_steps == 1
    with pytest.raises(NonfiniteGradient, match="The loss was not finite on rank 1") as caught:
        run("loss", "raise", 8.0)
    assert "in micro-batches 1." in str(caught.value)  # of this step, not of those before
    with pytest.raises(NonfiniteGradient, match=r"a loss scale of 1\.0.*'blocks\.0\.up\.weight'"):
        run("local", "raise", 1.0)


def test_a_gradient_scaler_may_look_for_its_scale(tmp_path):
    on_trainer_ranks(_scaled, 2, tmp_path)


def _by_hand(rank, world_size, folder):
    class ByHand(Broken):
        def __init__(self):
            super().__init__("local")
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.batch = batch_idx
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            if batch_idx % 2:
                self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()

    for name in ("scratch_fsdp_zero3", "fsdp2_zero3"):
        with pytest.raises(NonfiniteGradient, match=r"'blocks\.0\.up\.weight'.*micro-batch 0"):
            fit(with_options(name, on_nonfinite="raise"), folder, seeded(ByHand), make_loader(48))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer, model = fit(
                with_options(name, on_nonfinite="skip"), folder, seeded(ByHand), make_loader(48)
            )
        assert trainer.strategy.num_skipped_steps == 1
        torch.testing.assert_close(model.after, model.before, atol=0, rtol=0, equal_nan=True)


def test_manual_optimization_is_looked_at_before_each_step(tmp_path):
    on_trainer_ranks(_by_hand, 2, tmp_path)
