"""What users do to parameters between a forward and the next one is seen by the next one."""

import functools

import torch
from torch import nn

from tests.support.own_parameter import ScaledRegressor
from tests.support.trainer import (
    SHARDED,
    Block,
    Regressor,
    assert_each_like_ddp,
    make_loader,
    make_trainer,
    not_under,
    seeded,
    weights_of,
    with_options,
)

CORE, ZERO3, ZERO2 = SHARDED[:2], SHARDED[2::2], SHARDED[3::2]


class _LooksFirst(Regressor):
    """Calls parts of the module before any step has called the whole."""

    def on_fit_start(self):
        with torch.no_grad():
            self.losses.append(self(torch.ones(2, 5)).sum())


class _LooksBeforeStep(Regressor):
    """As one logs an accuracy, with what the backward has left."""

    def on_before_optimizer_step(self, optimizer):
        with torch.no_grad():
            self.losses.append(self(torch.ones(2, 5)).sum())


class _LooksByHand(Regressor):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.losses.append(self(torch.ones(2, 5)).sum().detach())  # with a graph that is dropped
        optimizer.step()


class _Perturbs(Regressor):
    """Adversarial samples: a backward in the step, beside gradients of the step before."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = x.clone().requires_grad_()
        (towards,) = torch.autograd.grad(self.loss((x, y)), x)
        return super().training_step((x.detach() + 0.1 * towards.sign(), y), batch_idx)


class _Freezes(ScaledRegressor):
    def on_train_epoch_start(self):
        self.requires_grad_(self.current_epoch != 1)
        self.head.requires_grad_()


class _Scales(ScaledRegressor):
    def on_train_epoch_start(self):
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.5)


class _Assigns(Regressor):
    """The last time, no forward follows."""

    def on_train_epoch_end(self):
        for parameter in self.parameters():
            parameter.data = 0.5 * parameter.data


class _GoesBack(ScaledRegressor):
    def on_train_epoch_start(self):
        state = {name: torch.full_like(value, 0.1) for name, value in self.first.items()}
        self.trainer.strategy.load_model_state_dict({"state_dict": state})


class _Follows(Regressor):
    """A teacher that follows its student, and has no backward."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.ModuleList(Block(7) for _ in self.blocks).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.no_grad():
            target = self.inlet(x)
            for block in self.teacher:
                target = block(target)
            y = y + target[:, :3]
        return super().training_step((x, y), batch_idx)

    def on_train_batch_end(self, *_):
        with torch.no_grad():
            pairs = zip(self.teacher.parameters(), self.blocks.parameters(), strict=True)
            for theirs, mine in pairs:
                theirs.mul_(0.5).add_(mine, alpha=0.5)


class _FreezesAPart(Regressor):
    """Of a unit, in the second micro-batch of each step."""

    def on_train_batch_start(self, batch, batch_idx):
        self.blocks[1].up.requires_grad_(batch_idx % 2 == 0)


class _HasReference(Regressor):
    """A forward to compare with, in which all is frozen, as with ``disable_adapter`` of peft."""

    def training_step(self, batch, batch_idx):
        self.blocks.requires_grad_(False)
        with torch.no_grad():
            reference = self.loss(batch)
        self.blocks.requires_grad_(True)
        return super().training_step(batch, batch_idx) / reference


class _TakesTurns(Regressor):
    """A step runs and trains one block, as ``set_adapter`` of peft chooses an adapter."""

    def on_fit_start(self):
        self.blocks.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        for i, block in enumerate(self.blocks):
            block.requires_grad_(i == batch_idx % 2)
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.blocks[batch_idx % 2](self.inlet(x))), y)
        self.losses.append(loss.detach())
        return loss


class _IsFrozenInAForward(ScaledRegressor):
    """In that of every second step, as with ``disable_adapter``: until after the forward."""

    def training_step(self, batch, batch_idx):
        frozen = nn.ModuleList([*self.blocks, self.inlet]) if batch_idx % 2 == 0 else nn.Module()
        self.scale.requires_grad_(batch_idx % 3 != 0)
        frozen.requires_grad_(False)
        loss = super().training_step(batch, batch_idx)
        frozen.requires_grad_(True)
        return loss


def _trained(kind, strategy, folder, rank, max_epochs=3):
    model = seeded(kind)
    model.first = weights_of(model)
    if strategy == "ddp":
        strategy = "ddp_find_unused_parameters_true"
    trainer = make_trainer(strategy, folder, max_epochs=max_epochs, num_sanity_val_steps=2)
    trainer.fit(model, make_loader(16), make_loader(8, seed=1))
    return {"losses": torch.stack(model.losses), **weights_of(model)}


def test_what_happens_between_two_passes_is_as_under_ddp(tmp_path):
    # At ZeRO-2 torch's units may be whole after a forward, and at ZeRO-3 the root.
    at = {
        SHARDED: {_Scales: 2, _GoesBack: 2},
        (*CORE, *ZERO2): {_LooksFirst: 1, _LooksBeforeStep: 2, _Freezes: 3},
        (*CORE, *ZERO3): {_LooksByHand: 2, _Perturbs: 2, _Follows: 2},
        SHARDED[:4]: {_Assigns: 2},  # not FSDP2
    }
    for number, (strategies, epochs_of) in enumerate(at.items()):
        scenarios = [
            functools.partial(_trained, kind, max_epochs=max_epochs)
            for kind, max_epochs in epochs_of.items()
        ]
        assert_each_like_ddp(scenarios, tmp_path / str(number), sharded=strategies)


def test_what_is_frozen_and_thawed_inside_of_a_step_is_as_under_ddp(tmp_path):
    kinds = _TakesTurns, _IsFrozenInAForward
    turns, frozen = (functools.partial(_trained, kind) for kind in kinds)
    frozen = not_under("fsdp1", reason="thawed before a backward")(frozen)
    assert_each_like_ddp([turns, frozen], tmp_path, sharded=SHARDED)


def _accumulated(kind, accumulation, strategy, folder, rank, **options):
    model = seeded(kind)
    if strategy == "ddp":
        strategy = "ddp_find_unused_parameters_true"
    chosen = with_options(strategy, accumulation=accumulation, **options)
    trainer = make_trainer(chosen, folder, accumulate_grad_batches=2)
    trainer.fit(model, make_loader())
    return {"losses": torch.stack(model.losses), **weights_of(model)}


def test_what_is_frozen_between_two_micro_batches_keeps_its_gradient(tmp_path):
    at = {  # each stage of torch's engines with each kind and each accumulation
        ZERO3: [(_FreezesAPart, "local"), (_HasReference, "sum")],
        ZERO2: [(_FreezesAPart, "sum"), (_HasReference, "local")],
    }
    for strategies, ways in at.items():
        scenarios = [functools.partial(_accumulated, *way) for way in ways]
        assert_each_like_ddp(scenarios, tmp_path / strategies[0], sharded=(*CORE, *strategies))


def test_what_some_micro_batches_train_alone_is_averaged_over_replicas(tmp_path):
    kinds = _FreezesAPart, _TakesTurns
    scenarios = [functools.partial(_accumulated, kind, "sum", shard_size=2) for kind in kinds]
    engines = "scratch_fsdp_zero3", *SHARDED[-2:]
    assert_each_like_ddp(scenarios, tmp_path, sharded=engines, world_size=4)
