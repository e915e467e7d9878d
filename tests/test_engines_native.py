"""What torch's own engines see once, what they hold after an exception and a fit, norms in fp64."""

import weakref

import pytest
import torch
from torch import nn

from lightning_fsdp.engines.native_state import materialize_whole
from tests.support.cases import each_on_trainer_ranks
from tests.support.memory import StorageTracker, optimizer_tensors
from tests.support.trainer import Regressor, make_loader, make_trainer, seeded, weights_of


class _CallsTwice(Regressor):
    """Its blocks are called several times in a forward."""

    def forward(self, x):
        x = self.inlet(x)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x)

    def on_train_start(self):
        self.seen = []
        self.trainer.strategy.gradients.on_local(lambda name, *_: self.seen.append(name))


def _see_once(rank, world_size, strategy, folder):
    model = seeded(_CallsTwice)
    trainer = make_trainer(strategy, folder, limit_train_batches=3)
    if strategy.startswith("fsdp1"):
        with pytest.raises(RuntimeError, match=r"'blocks\.\d.* called several times"):
            trainer.fit(model, make_loader())
        return
    trainer.fit(model, make_loader())
    assert sorted(model.seen) == sorted(3 * [name for name, _ in model.named_parameters()])


def test_a_gradient_of_several_calls_is_seen_once_or_refused(tmp_path):
    names = ["fsdp1_zero2", "fsdp1_zero3", "fsdp2_zero3", "scratch_fsdp_zero3"]
    each_on_trainer_ranks(_see_once, 2, names, tmp_path)


class _Fails(Regressor):
    def on_after_backward(self):
        if self.trainer.fit_loop.batch_idx == 2:
            raise ArithmeticError


def _hand_over(rank, world_size, strategy, folder):
    expected = seeded(_Fails)
    with pytest.raises(ArithmeticError):
        make_trainer("ddp", folder).fit(expected, make_loader())
    model = seeded(_Fails)
    trainer = make_trainer(strategy, folder)
    with pytest.raises(ArithmeticError):
        trainer.fit(model, make_loader())
    trainer.validate(seeded(Regressor, seed=1), make_loader(8), verbose=False)
    torch.testing.assert_close(weights_of(model), weights_of(expected), atol=1e-6, rtol=1e-5)


def test_another_module_in_the_place_of_one_whose_fit_failed_leaves_it_whole(tmp_path):
    names = ["fsdp1_zero2", "fsdp2_zero3", "scratch_fsdp_zero3"]
    each_on_trainer_ranks(_hand_over, 2, names, tmp_path)


class _FreezesAndThaws(Regressor):
    def __init__(self):
        super().__init__()
        self.inlet.requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        self.head.bias.requires_grad_(False)
        self.inlet.requires_grad_()


def _frozen_after_fit(rank, world_size, strategy, folder):
    model = seeded(_FreezesAndThaws)
    make_trainer(strategy, folder, limit_train_batches=1).fit(model, make_loader())
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["head.bias"]


def test_what_a_fit_has_frozen_and_thawed_is_so_when_it_ends(tmp_path):
    names = ["fsdp1_zero3", "fsdp2_zero3", "scratch_fsdp_zero3"]
    each_on_trainer_ranks(_frozen_after_fit, 2, names, tmp_path)


ENGINES = ["fsdp1", "fsdp2", "scratch_fsdp"]


class _KeepsItsLoss(Regressor):
    """With the graph that it came from."""

    def training_step(self, batch, batch_idx):
        self.kept = super().training_step(batch, batch_idx)
        return self.kept


def _bytes_after_fit(rank, world_size, strategy, folder):
    model, loader = seeded(lambda: _KeepsItsLoss(width=32)), make_loader()
    trainer = make_trainer(strategy, folder, limit_train_batches=2)
    before = [*model.parameters(), *loader.dataset.tensors]
    with StorageTracker(model) as tracker:
        trainer.fit(model, loader)
        return tracker.settled_bytes([*before, *optimizer_tensors(*trainer.optimizers)])


def test_nothing_of_a_fit_stays_but_the_module_and_the_optimizer(tmp_path):
    names = [f"{engine}_zero{stage}" for engine in ENGINES for stage in (2, 3)]
    for strategy, found in each_on_trainer_ranks(_bytes_after_fit, 2, names, tmp_path).items():
        assert max(found) < 512, strategy  # losses; the least shard has 5 times as much


class _InFp64(Regressor):
    def __init__(self):
        super().__init__()
        self.double()

    def loss(self, batch):
        return super().loss([part.double() for part in batch])

    def on_before_optimizer_step(self, optimizer):
        found = self.trainer.strategy.gradients
        self.norm = found.norm()
        self.whole = torch.cat([gradient.flatten() for _, gradient in found.full()])


def _norm_in_fp64(rank, world_size, strategy, folder):
    model = seeded(_InFp64)
    make_trainer(strategy, folder, limit_train_batches=1).fit(model, make_loader())
    torch.testing.assert_close(
        model.norm, torch.linalg.vector_norm(model.whole), rtol=1e-14, atol=0
    )


def test_the_norm_of_gradients_in_fp64_is_fp64(tmp_path):
    each_on_trainer_ranks(_norm_in_fp64, 2, [f"{engine}_zero3" for engine in ENGINES], tmp_path)


@pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM])
def test_what_others_refer_to_weakly_gets_values(kind):
    with torch.device("meta"):
        module = kind(2, 3)
    named = {name: weakref.ref(parameter) for name, parameter in module.named_parameters()}
    materialize_whole(module)
    for name, parameter in module.named_parameters():
        assert parameter.device.type == "cpu", name
        assert named[name]() is parameter
    module(torch.ones(1, 2))
