"""Gradients and weights by name under every engine, at every moment, against plain modules.

The reference of a step is a plain copy of the model with the weights that the strategy shows: its
gradient on this rank's batch is the local one, the mean over ranks the reduced one.
"""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lightning_fsdp import GradientUnavailable
from tests.support.access import watched
from tests.support.cases import each_on_trainer_ranks
from tests.support.own_parameter import ScaledRegressor
from tests.support.trainer import (
    SHARDED,
    Regressor,
    assert_each_like_ddp,
    make_loader,
    make_trainer,
    seeded,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("kept_ranks")


# In each precision both stages of the core, and each of torch's engines at one of its own.
@pytest.mark.parametrize(
    ("precision", "names"),
    [
        ("32-true", SHARDED),
        ("bf16-true", (*SHARDED[:2], "fsdp1_zero3", "fsdp2_zero2")),
        ("bf16-mixed", (*SHARDED[:2], "fsdp1_zero2", "fsdp2_zero3")),
    ],
    ids=["32-true", "bf16-true", "bf16-mixed"],
)
def test_every_gradient_is_right_at_every_moment(tmp_path, precision, names):
    each_on_trainer_ranks(watched, 2, names, precision, str(tmp_path))


@pytest.mark.parametrize("world_size", [1, 4])
def test_gradients_are_right_at_other_world_sizes(tmp_path, world_size):
    each_on_trainer_ranks(watched, world_size, SHARDED[::2], "32-true", str(tmp_path))


class _LeavesOver(Regressor):
    """Accumulates without communication, clears in one of three ways, and trains another batch."""

    way = "optimizer"

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        strategy = self.trainer.strategy
        if batch_idx == 0:
            with strategy.block_backward_sync():
                self.manual_backward(self.loss((x[:2], y[:2])))
            if hasattr(strategy, "gradients"):
                assert strategy.gradients["head.weight"].state == "local"
                with pytest.raises(GradientUnavailable, match=r"Trainer.* last micro-batch"):
                    strategy.gradients["head.weight"].full()
                with pytest.raises(RuntimeError, match="no_sync"):
                    strategy.optimizers[0].step()
            for owner in {
                "optimizer": [optimizer],
                "raw": [strategy.optimizers[0]],
                "module": [self],
                "children": self.children(),
            }[self.way]:
                owner.zero_grad()
            if hasattr(strategy, "gradients"):
                assert strategy.gradients["head.weight"].state == "none"
        self.manual_backward(self.loss((x[2:], y[2:])))
        optimizer.step()
        optimizer.zero_grad()


def _left_over(rank, world_size, strategy, folder):
    found = {}
    for way in ("optimizer", "raw", "module", "children"):
        model = seeded(_LeavesOver)
        model.way = way
        make_trainer(strategy, Path(folder), limit_train_batches=2).fit(model, make_loader())
        found[way] = weights_of(model)
    return found


def test_zero_grad_leaves_nothing_over(tmp_path):
    found = each_on_trainer_ranks(_left_over, 2, ("ddp", *SHARDED), str(tmp_path))
    for strategy in SHARDED:
        torch.testing.assert_close(
            found[strategy], found["ddp"], msg=lambda text, s=strategy: f"{s}: {text}"
        )


class _LooksForFrozen(pl.Callback):
    """From the third batch on one more is frozen, when its forward is through."""

    def on_before_backward(self, trainer, module, loss):
        if trainer.fit_loop.batch_idx == 2:
            module.get_parameter("head.bias").requires_grad_(False)

    def on_train_start(self, trainer, module):
        self.seen = []
        trainer.strategy.gradients.on_local(
            lambda name, *_: self.seen.append((trainer.fit_loop.batch_idx, name)), edits=False
        )
        gradients, weights = trainer.strategy.gradients, trainer.strategy.weights
        frozen = [name for name in weights if name not in gradients]
        assert frozen == ["inlet.weight"]
        assert [name for name in weights if name in gradients] == list(gradients)
        assert "nowhere" not in gradients
        with pytest.raises(GradientUnavailable, match="Unfreeze"):
            gradients[frozen[0]]


def _frozen(rank, world_size, strategy, folder):
    module = seeded(Regressor)
    module.get_parameter("inlet.weight").requires_grad_(False)
    looks = _LooksForFrozen()
    make_trainer(strategy, Path(folder), callbacks=[looks]).fit(module, make_loader())
    names = {name for name, _ in module.named_parameters()} - {"inlet.weight"}
    assert {name for batch, name in looks.seen if batch < 2} == names
    assert {name for batch, name in looks.seen if batch > 2} == names - {"head.bias"}


def test_a_frozen_parameter_is_not_among_the_gradients(tmp_path):
    each_on_trainer_ranks(_frozen, 2, SHARDED[::2], str(tmp_path))


class _ThawsItsScale(ScaledRegressor):
    """Inside of the step, which FSDP2 takes for its forward: the whole one is there."""

    def on_train_batch_start(self, batch, batch_idx):
        self.scale.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        self.scale.requires_grad_(batch_idx % 2 == 0)
        return super().training_step(batch, batch_idx)

    def on_train_start(self):
        self.seen = []
        self.trainer.strategy.gradients.on_local(
            lambda name, *_: self.seen.append((self.trainer.fit_loop.batch_idx, name))
        )


def _thawed(rank, world_size, strategy, folder):
    module = seeded(_ThawsItsScale)
    make_trainer(strategy, Path(folder)).fit(module, make_loader())
    assert {batch for batch, name in module.seen if name == "scale"} == {0, 2}
    assert len({batch for batch, _ in module.seen}) == 4


def test_a_parameter_that_a_step_thaws_is_seen_before_the_reduction(tmp_path):
    names = [name for name in SHARDED if not name.startswith("fsdp1")]
    each_on_trainer_ranks(_thawed, 2, names, str(tmp_path))


class _ReadsAll(pl.Callback):
    """Before the step; what was frozen from the beginning has none."""

    def __init__(self, freezes):
        self.freezes = freezes

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if self.freezes:
            module.requires_grad_(False)
        named = dict(module.named_parameters())
        if (gradients := getattr(trainer.strategy, "gradients", None)) is None:
            self.seen = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
            self.norm = torch.nn.utils.clip_grad_norm_(named.values(), 1e9)
        else:
            self.norm = gradients.norm()
            torch.testing.assert_close(
                self.norm, trainer.strategy.engine.clip_grad_norm_(named.values(), 1e9)
            )
            self.seen = {name: whole.clone() for name, whole in gradients.full()}
            assert list(gradients) == list(gradients.shards())
            for name, whole in self.seen.items():
                assert torch.equal(gradients[name].full(), whole)


def beside_a_frozen_one(strategy, folder, rank, freezes=False):
    """Which is all that a rank has of their unit under FSDP1."""
    module = seeded(Regressor)
    module.get_parameter("inlet.weight").requires_grad_(False)
    reads = _ReadsAll(freezes)
    make_trainer(strategy, folder, callbacks=[reads], max_steps=1).fit(module, make_loader())
    return {**reads.seen, "norm": reads.norm}


def frozen_after_the_backward(strategy, folder, rank):
    return beside_a_frozen_one(strategy, folder, rank, freezes=True)


def test_what_has_a_gradient_counts_as_in_torch_also_where_it_or_another_is_frozen(tmp_path):
    scenarios = [beside_a_frozen_one, frozen_after_the_backward]
    assert_each_like_ddp(scenarios, tmp_path, sharded=SHARDED)


class _Keeps(pl.Callback):
    def on_train_start(self, trainer, module):
        self.gradients, self.weights = trainer.strategy.gradients, trainer.strategy.weights


def _outside(rank, world_size, strategy, folder):
    keeps = _Keeps()
    trainer = make_trainer(strategy, Path(folder), callbacks=[keeps])
    engine = trainer.strategy.engine.name
    for _ in range(2):
        with pytest.raises(GradientUnavailable, match=rf"^gradients \({engine} engine\): expected"):
            trainer.strategy.gradients  # noqa: B018
        with pytest.raises(RuntimeError, match=rf"^weights \({engine} engine\): expected.* hook"):
            trainer.strategy.weights  # noqa: B018
        trainer.fit(seeded(Regressor), make_loader())
    if engine != "scratch":  # what is kept from a run would be read in a way that waits for ever
        with pytest.raises(GradientUnavailable, match="expected a sharded module"):
            keeps.gradients.norm()
        with pytest.raises(RuntimeError, match="expected a sharded module"):
            dict(keeps.weights.full())


def test_outside_of_a_run_there_is_nothing_to_read(tmp_path):
    each_on_trainer_ranks(_outside, 2, SHARDED[::2], str(tmp_path))
