"""Optimizers that a LightningModule built before the strategy sharded it, against DDP."""

import pytest
import torch
from torch import nn

from tests.support.trainer import (
    SHARDED,
    Regressor,
    assert_each_like_ddp,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
    weights_of,
)


def _groups(module):
    decayed = [p for p in module.parameters() if p.ndim >= 2]
    others = [p for p in module.parameters() if p.ndim < 2]
    return [{"params": decayed, "weight_decay": 0.3}, {"params": others, "lr": 0.02}]


class Early(Regressor):
    """Its optimizer and schedule are there from the start; two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.build()

    def build(self) -> None:
        self.optimizer = torch.optim.AdamW(_groups(self), lr=0.01, eps=1e-6)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)

    def configure_optimizers(self):
        return [self.optimizer], [{"scheduler": self.schedule, "interval": "step"}]


class InConfigureModel(Early):
    """Built as late as in configure_model."""

    def __init__(self) -> None:
        Regressor.__init__(self)
        self.extra = None

    def configure_model(self) -> None:
        if self.extra is None:
            self.extra = nn.Linear(3, 3)
            self.build()

    def forward(self, x):
        return self.extra(super().forward(x))


class Tied(Early):
    """One weight in two places."""

    def __init__(self) -> None:
        Regressor.__init__(self)
        self.again = nn.Linear(5, 7)
        self.again.weight = self.inlet.weight
        self.build()

    def forward(self, x):
        hidden = self.inlet(x) + self.again(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def _step_alone(module):
    """Optimizer steps in plain torch, so that there is state."""
    for x, y in [make_loader(4).dataset[:], make_loader(4, seed=1).dataset[:]]:
        nn.functional.mse_loss(module(x), y).backward()
        module.optimizer.step()
        module.optimizer.zero_grad()


def _outcome(module):
    """Weights, losses, learning rates, how far each parameter's state is."""
    state = module.optimizer.state
    assert {id(p) for p in state} <= {id(p) for p in module.parameters()}
    return {
        "weights": weights_of(module),
        "losses": list(module.losses),
        "lr": [group["lr"] for group in module.optimizer.param_groups],
        # FSDP1 does not step what it has no element of on this rank.
        "steps": max(int(values["step"]) for values in state.values()),
    }


def _fit(strategy, folder, module):
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = make_trainer(strategy, folder)
    trainer.fit(module, make_loader())
    after = module.state_dict()
    assert all(not torch.equal(after[key], value) for key, value in before.items())
    return trainer


def _in_init(strategy, folder, rank):
    module = seeded(Early)
    group_dicts = list(module.optimizer.param_groups)
    _fit(strategy, folder, module)
    assert all(a is b for a, b in zip(group_dicts, module.optimizer.param_groups, strict=True))
    return _outcome(module)


def _in_configure_model(strategy, folder, rank):
    module = seeded(InConfigureModel)
    _fit(strategy, folder, module)
    return _outcome(module)


def _tied(strategy, folder, rank):
    module = seeded(Tied)
    _fit(strategy, folder, module)
    return _outcome(module)


def _with_state(strategy, folder, rank):
    """Its state goes on, and again in a second fit."""
    module = seeded(Early)
    _step_alone(module)
    _fit(strategy, folder, module)
    first = _outcome(module)
    assert first["steps"] == 2 + 4
    trainer = make_trainer(strategy, folder)
    trainer.fit(module, make_loader())
    return {"first": first, "second": _outcome(module)}


def test_an_optimizer_built_before_sharding_trains_as_under_ddp(tmp_path):
    scenarios = [_in_init, _in_configure_model, _tied, _with_state]
    assert_each_like_ddp(scenarios, tmp_path, timeout_s=280)


class Foreign(Regressor):
    def configure_optimizers(self):
        elsewhere = nn.Linear(4, 2)
        return torch.optim.SGD([*self.parameters(), *elsewhere.parameters()], lr=0.1)


class Left(Regressor):
    """Steps an optimizer of its own that it never returned."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.kept = torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))
        self.kept.step()


def _refusals(rank, world_size, folder, strategy):
    trainer = make_trainer(strategy, folder)
    with pytest.raises(
        ValueError,
        match=r"SGD: expected parameters of the LightningModule only, got \(2, 4\) \(no name\) at "
        "position 16 of group 0",
    ):
        trainer.fit(seeded(Foreign), make_loader())
    if strategy.startswith("fsdp2"):
        trainer = make_trainer(strategy, folder)
        with pytest.raises(
            RuntimeError,
            match=r"SGD: expected parameters that train, got 'inlet.weight', .* and 13 more .* "
            "return the optimizer from configure_optimizers",
        ):
            trainer.fit(seeded(Left), make_loader())


@pytest.mark.parametrize("strategy", SHARDED)
def test_foreign_and_replaced_parameters_are_named(strategy, tmp_path):
    on_trainer_ranks(_refusals, 2, str(tmp_path), strategy)
