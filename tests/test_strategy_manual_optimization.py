"""Modules that step by hand train as with DDP."""

from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.own_parameter import ScaledRegressor
from tests.support.trainer import (
    Block,
    Regressor,
    assert_each_like_ddp,
    assert_like_ddp,
    at_both_stages,
    fit,
    make_loader,
    make_trainer,
    not_under,
    seeded,
    weights_of,
)


class _Gan(pl.LightningModule):
    """Two networks, two optimizers, a parameter of its own; toggled, clipped, accumulated."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
        self.critic = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 1))
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = -self.critic(self.generator(x)).mean()
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        first.step()
        self.untoggle_optimizer(first)

        self.toggle_optimizer(second)
        fake = self.generator(x).detach()
        critic_loss = F.softplus(self.critic(fake)).mean() + F.softplus(-self.critic(y)).mean()
        second.zero_grad()
        self.manual_backward(critic_loss)
        second.step()
        self.untoggle_optimizer(second)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.losses += [loss.detach(), critic_loss.detach()]

    def configure_optimizers(self):
        first = torch.optim.Adam(self.generator.parameters(), lr=0.02)
        second = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
        return [first, second], [
            torch.optim.lr_scheduler.ExponentialLR(first, 0.9),
            torch.optim.lr_scheduler.ExponentialLR(second, 0.8),
        ]


@not_under("fsdp1", reason="refuses two optimizers by hand")
def _gan(strategy, folder, rank):
    strategy = "ddp_find_unused_parameters_true" if strategy == "ddp" else strategy
    model = seeded(_Gan)
    trainer = make_trainer(strategy, folder, max_epochs=2)
    trainer.fit(model, make_loader())
    assert trainer.global_step == 16
    return {"weights": weights_of(model), "losses": model.losses}


def test_two_optimizers_by_hand_with_toggling_are_those_of_ddp(tmp_path):
    assert_like_ddp(_gan, tmp_path, atol=3e-6)


def _fit(kind, strategy, folder):
    strategy = "ddp_find_unused_parameters_true" if strategy == "ddp" else strategy
    _, model = fit(strategy, folder, seeded(kind))
    return {"weights": weights_of(model), "losses": model.losses}


class _Clipped(_Gan):
    """Clips the weights of its critic, which are gathered with the generator's last."""

    def __init__(self):
        super().__init__()
        blocks = nn.Sequential(Block(3), Block(3))
        self.generator = nn.Sequential(nn.Linear(5, 3), blocks, nn.LayerNorm(3))
        self.critic = nn.Sequential(nn.Linear(3, 7), nn.PReLU())

    def training_step(self, batch, batch_idx):
        x, y = batch
        critic = self.optimizers()[1]
        fake = self.generator(x).detach()
        loss = self.critic(fake).mean() - self.critic(y).mean()
        critic.zero_grad()
        self.manual_backward(loss)
        critic.step()
        with torch.no_grad():
            for parameter in self.critic.parameters():
                parameter.clamp_(-0.2, 0.2)
        self.losses.append(loss.detach())


@not_under("fsdp1", reason="refuses two optimizers by hand")
@at_both_stages
def _clipped(strategy, folder, rank):
    return _fit(_Clipped, strategy, folder)


def test_weights_that_are_written_to_after_a_step_by_hand_keep_what_was_written(tmp_path):
    assert_like_ddp(_clipped, tmp_path)


class _Alternating(_Gan):
    """The critic steps between the generator's forward and its backward."""

    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(Block(width), Block(width)) for width in (3, 7)]
        self.generator = nn.Sequential(nn.Linear(5, 3), blocks[0], nn.LayerNorm(3))
        self.critic = nn.Sequential(nn.Linear(3, 7), blocks[1], nn.PReLU())

    def training_step(self, batch, batch_idx):
        x, y = batch
        fake, optimizers = self.generator(x), self.optimizers()
        for optimizer, shown in zip(reversed(optimizers), (fake.detach(), fake), strict=True):
            loss = self.critic(shown).mean() - self.critic(y).mean()
            optimizer.zero_grad()
            self.manual_backward(loss if optimizer is optimizers[1] else -loss)
            optimizer.step()
            self.losses.append(loss.detach())


@not_under("fsdp1", reason="refuses two optimizers by hand")
@at_both_stages
def _alternating(strategy, folder, rank):
    return _fit(_Alternating, strategy, folder)


def test_networks_that_take_turns_in_a_step_are_those_of_ddp(tmp_path):
    assert_like_ddp(_alternating, tmp_path)


class _ForgetsHalf(Regressor):
    """Two optimizers accumulate; one clears its own gradients in between, and only those."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        body, head = self.optimizers()
        is_last = batch_idx % 2 == 1
        with nullcontext() if is_last else self.trainer.strategy.block_backward_sync():
            loss = self.loss(batch)
            self.manual_backward(loss / 2)
        self.losses.append(loss.detach())
        if not is_last:
            head.zero_grad()
            return
        for optimizer in (body, head):
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        body = [*self.inlet.parameters(), *self.blocks.parameters()]
        return [torch.optim.SGD(p, lr=0.05) for p in (body, self.head.parameters())]


@not_under("fsdp1", reason="refuses two optimizers by hand")
def _forgets_half(strategy, folder, rank):
    _, model = fit(strategy, folder, seeded(_ForgetsHalf))
    return {"weights": weights_of(model), "losses": model.losses}


def test_an_optimizer_clears_its_own_gradients_only(tmp_path):
    assert_like_ddp(_forgets_half, tmp_path)


class _ByHand(Regressor):
    """Accumulates over two batches and steps inside ``training_step``."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        is_last = batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=is_last):
            loss = self.loss(batch)
            self.manual_backward(loss / 2)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():  # the new weights must be seen at once, the module's own as well
                self.losses.append(self.loss(batch))
        self.losses.append(loss.detach())


def _by_hand(strategy, folder, rank, kind=_ByHand):
    trainer, model = fit(strategy, folder, seeded(kind))
    assert trainer.global_step == 2
    return {"weights": weights_of(model), "losses": model.losses}


class _OwnsByHand(ScaledRegressor, _ByHand):
    """Uses its own parameter right after the step, without a call in between."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.losses.append(self.scale.detach().clone())


@not_under("fsdp1", "fsdp2", reason="refuse own parameters with manual optimization")
def _owns_by_hand(strategy, folder, rank):
    return _by_hand(strategy, folder, rank, _OwnsByHand)


@pytest.mark.quick
def test_accumulation_by_hand_is_that_of_ddp(tmp_path):
    scenarios = [_by_hand, _owns_by_hand]
    assert_each_like_ddp(scenarios, tmp_path)


class _OwnsToggled(ScaledRegressor):
    """One of its two optimizers has the module's own parameter."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.3, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.detach())

    def configure_optimizers(self):
        others = [self.scale, *self.inlet.parameters(), *self.head.parameters()]
        return [torch.optim.SGD(p, lr=0.05) for p in (self.blocks.parameters(), others)]


@not_under("fsdp1", "fsdp2", reason="refuse own parameters with manual optimization")
def _owns_toggled(strategy, folder, rank):
    strategy = "ddp_find_unused_parameters_true" if strategy == "ddp" else strategy
    _, model = fit(strategy, folder, seeded(_OwnsToggled))
    return {"weights": weights_of(model), "losses": model.losses}


def test_toggling_holds_for_parameters_of_the_module_itself(tmp_path):
    assert_like_ddp(_owns_toggled, tmp_path)
