"""Every kind of module that the Trainer steps trains as with DDP."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.support.trainer import (
    Block,
    Regressor,
    assert_each_like_ddp,
    assert_like_ddp,
    at_both_stages,
    fit,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    outcome_of,
    seeded,
)
from tests.support.versions import TORCH


class _DecayByShape(Regressor):
    """The usual two groups: matrices decay, vectors do not. Wrong shapes would move every one."""

    def configure_optimizers(self):
        parameters = list(self.parameters())
        matrices = [p for p in parameters if p.ndim >= 2]
        vectors = [p for p in parameters if p.ndim < 2]
        assert (len(matrices), len(vectors)) == (6, 10)
        assert self.head.weight.shape == (3, 7)
        self.num_elements = sum(p.numel() for p in parameters)
        groups = [
            {"params": matrices, "weight_decay": 0.5},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=0.01)


def _decay_by_shape(strategy, folder, rank):
    trainer, model = fit(strategy, folder, seeded(_DecayByShape))
    return {**outcome_of(trainer, model), "num_elements": model.num_elements}


class _Configured(Regressor):
    """Layers made in ``configure_model``, under the strategy's own context."""

    def __init__(self):
        pl.LightningModule.__init__(self)
        self.lr, self.losses, self.inlet = 0.05, [], None

    def configure_model(self):
        if self.inlet is None:
            torch.manual_seed(5)
            self.inlet = nn.Linear(5, 7)
            self.blocks = nn.ModuleList(Block(7) for _ in range(3))
            self.head = nn.Linear(7, 3)


def _configure_model(strategy, folder, rank):
    trainer, model = fit(strategy, folder, seeded(_Configured))
    trainer.validate(model, make_loader(), verbose=False)
    return outcome_of(trainer, model)


class _ConfiguredOnMeta(_Configured):
    """The same without values: sharding draws those that DDP's module was built with."""

    def configure_model(self):
        is_whole = isinstance(self.trainer.strategy, DDPStrategy)
        with torch.device("cpu" if is_whole else "meta"):
            super().configure_model()
        assert self.head.weight.is_meta is not is_whole


def _configure_on_meta(strategy, folder, rank):
    trainer, model = fit(strategy, folder, seeded(_ConfiguredOnMeta))
    return outcome_of(trainer, model)


class _Frozen(Regressor):
    def __init__(self):
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[1].up.bias.requires_grad_(False)
        self.head.weight.requires_grad_(False)


def _frozen(strategy, folder, rank):
    model = seeded(_Frozen)
    frozen = model.blocks[0].up.weight.detach().clone()
    trainer, model = fit(strategy, folder, model)
    assert torch.equal(model.blocks[0].up.weight, frozen)
    assert not model.head.weight.requires_grad
    assert model.head.bias.requires_grad
    return outcome_of(trainer, model)


class _OtherKinds(Regressor):
    """Weights whose memory has another order than their elements, beside some of another dtype."""

    def __init__(self):
        super().__init__()
        self.head.weight = nn.Parameter(0.3 * torch.randn(7, 3).t())
        for block in self.blocks:
            block.up.weight = nn.Parameter(0.3 * torch.randn(7, 14).t())
            block.norm.double().register_forward_pre_hook(lambda _, args: args[0].double())
            block.norm.register_forward_hook(lambda *args: args[-1].float())


def _other_kinds(strategy, folder, rank):
    return outcome_of(*fit(strategy, folder, seeded(_OtherKinds)))


class _Tied(pl.LightningModule):
    """An embedding whose weight is also that of the head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.losses = []

    def training_step(self, batch, batch_idx):
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch.roll(-1, 1).flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _token_loader(num_samples=16):
    tokens = torch.randint(0, 11, (num_samples, 5), generator=torch.Generator().manual_seed(3))
    return DataLoader(tokens, batch_size=4)


def _tied(strategy, folder, rank):
    trainer, model = fit(strategy, folder, seeded(_Tied), _token_loader())
    assert model.head.weight is model.embedding.weight
    trainer, model = fit(strategy, folder, model, _token_loader())
    assert model.head.weight is model.embedding.weight
    return outcome_of(trainer, model)


class _OwnsParameters(Regressor):
    """Uses a parameter of its own before, in and after its forward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 0.5))
        self.shift = nn.Parameter(torch.linspace(0, 1, 5))

    def forward(self, x):
        return super().forward(x) * self.scale

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self(x + self.shift) + self.scale * self.shift.sum(), y)


def _owns_parameters(strategy, folder, rank):
    trainer = make_trainer(strategy, folder)
    model = seeded(_OwnsParameters)
    trainer.fit(model, make_loader(), make_loader(16, seed=1))
    return outcome_of(trainer, model)


if TORCH < (2, 13):
    _owns_parameters.not_under = ("fsdp2",)


def _is_refused(rank, world_size, folder):
    with pytest.raises(RuntimeError, match="expected reduced gradients, but that of 'shift'"):
        _owns_parameters("fsdp2_zero3", folder, rank)


@pytest.mark.skipif(TORCH >= (2, 13), reason="later torches reduce them")
def test_own_parameters_beside_the_forward_are_named_by_an_older_fsdp2(tmp_path):
    on_trainer_ranks(_is_refused, 2, str(tmp_path))


class _Checkpointed(Regressor):
    """Recomputes its blocks in the backward: what the refusal of the option recommends."""

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def _checkpointed(strategy, folder, rank):
    return outcome_of(*fit(strategy, folder, seeded(_Checkpointed)))


class _Thawed(Regressor):
    """Freezes and thaws while it trains: what the refusal of the finetuning callback recommends."""

    def on_train_epoch_start(self):
        self.blocks.requires_grad_(self.current_epoch != 1)


@at_both_stages
def _thawed(strategy, folder, rank):
    strategy = "ddp_find_unused_parameters_true" if strategy == "ddp" else strategy
    trainer, model = fit(strategy, folder, seeded(_Thawed), make_loader(16), max_epochs=3)
    return outcome_of(trainer, model)


class _Scaled(Block):
    """Its forward goes by attributes that others write."""

    def __init__(self, width):
        super().__init__(width)
        self.gain = 1.0
        self.register_buffer("mask", torch.ones(width))

    def forward(self, x):
        return super().forward(x * self.mask) * self.gain + getattr(self, "shift", 0.0)


class _WritesToBlocks(Regressor):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Scaled(7) for _ in range(2))

    def on_train_batch_start(self, batch, batch_idx):
        self.blocks[0].shift = 0.1 * batch_idx
        self.blocks[1].gain = 1.0 + batch_idx
        self.blocks[1].mask = torch.full((7,), 1 / (1 + batch_idx))


@at_both_stages
def _writes_to_blocks(strategy, folder, rank):
    trainer, model = fit(strategy, folder, seeded(_WritesToBlocks))
    written = {"shift": model.blocks[0].shift, "gain": model.blocks[1].gain}
    return {**outcome_of(trainer, model), **written}


class _Nested(Regressor):
    """Layers are lists, as in many vision models: nobody calls those."""

    def forward(self, x):
        layers = zip(self.blocks, self.gains, strict=True)
        return self.head(sum(block(self.inlet(x)) * own[0] for (block,), own in layers))


def _nested(strategy, folder, rank):
    model = seeded(_Nested)
    model.blocks = nn.ModuleList(nn.ModuleList([block]) for block in model.blocks)
    model.gains = nn.ModuleList(nn.ParameterList([torch.ones(7)]) for _ in range(2))
    return outcome_of(*fit(strategy, folder, model))


@pytest.mark.quick
def test_kinds_of_modules_train_as_with_ddp(tmp_path):
    scenarios = [
        _decay_by_shape, _configure_model, _configure_on_meta, _frozen, _other_kinds, _tied,
        _owns_parameters, _checkpointed, _thawed, _writes_to_blocks, _nested,
    ]  # fmt: skip
    assert_each_like_ddp(scenarios, tmp_path, atol=3e-6)


class _Summarizes(pl.callbacks.ModelSummary):
    def _summary(self, trainer, module):
        self.seen = super()._summary(trainer, module)
        self.counts = {
            "total": self.seen.total_parameters,
            "trainable": self.seen.trainable_parameters,
            "layers": dict(zip(self.seen.layer_names, self.seen.param_nums, strict=True)),
        }
        return self.seen

    def summarize(self, *args, **kwargs):
        pass


def _summary(strategy, folder, rank):
    seen, outcome = {}, {}

    class Watch(pl.Callback):
        def on_fit_start(self, trainer, module):
            seen["total"] = ModelSummary(module).total_parameters

    for kind in (_Frozen, _Tied):
        summary = _Summarizes(max_depth=-1)
        loader = make_loader(8) if kind is _Frozen else _token_loader(8)
        options = {"callbacks": [summary, Watch()], "enable_model_summary": True}
        for _ in range(2):
            trainer, model = fit(strategy, folder, seeded(kind), loader, **options)
            outcome[kind.__name__] = {**summary.counts, **outcome_of(trainer, model)}
        if not strategy.startswith("fsdp1"):  # by hand it counts what FSDP1 shows
            assert seen["total"] == summary.counts["total"]
    return outcome


def test_the_model_summary_counts_whole_parameters(tmp_path):
    assert_like_ddp(_summary, tmp_path)


class _UsesInTurns(Regressor):
    """One block sits out every other step, on all ranks; one parameter is never used."""

    def __init__(self):
        super().__init__(num_blocks=3)
        self.never = nn.Linear(2, 2)
        self.turn = 0

    def training_step(self, batch, batch_idx):
        self.turn = batch_idx % 2
        return super().training_step(batch, batch_idx)

    def forward(self, x):
        x = self.inlet(x)
        for index, block in enumerate(self.blocks):
            if index != self.turn:
                x = block(x)
        return self.head(x)


@at_both_stages
def _in_turns(strategy, folder, rank):
    strategy = "ddp_find_unused_parameters_true" if strategy == "ddp" else strategy
    never = seeded(_UsesInTurns).never.weight.detach().clone()
    trainer, model = fit(strategy, folder, seeded(_UsesInTurns), max_epochs=2)
    assert torch.equal(model.never.weight, never)
    return outcome_of(trainer, model)


def test_modules_that_sit_out_a_step_keep_their_weights_as_with_ddp(tmp_path):
    assert_like_ddp(_in_turns, tmp_path)
