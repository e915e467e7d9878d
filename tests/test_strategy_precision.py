"""Autocast under sharding computes in the dtypes, and to the values, of DDP."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.support.cases import each_on_trainer_ranks
from tests.support.trainer import (
    SHARDED,
    Regressor,
    assert_like_ddp,
    at_both_stages,
    fit,
    make_loader,
    make_trainer,
    seeded,
    weights_of,
)


class Lookup(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.dtypes = {}

    def training_step(self, batch, batch_idx):
        looked_up = self.embedding(batch)
        stream = looked_up
        for block in self.blocks:
            stream = stream + block(stream)
        self.dtypes = {"embedding": looked_up.dtype, "stream": stream.dtype}
        return stream.float().square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Labelled(nn.Module):
    """A unit with embeddings inside."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.labels = nn.Embedding(8, 4)
        self.bags = nn.EmbeddingBag(8, 4, mode="sum")

    def forward(self, stream, batch, dtypes):
        looked_up = self.labels(batch)
        summed = self.bags(batch[:, None])
        dtypes |= {"labels": looked_up.dtype, "bags": summed.dtype}
        return self.layer(stream) + looked_up + summed


class Seen(dict):
    """Goes into a unit as it is; of a plain dict among the arguments an engine may make another."""


class LookupInUnits(Lookup):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Labelled() for _ in range(2))
        self.seen_by_hook = []
        self.blocks[0].labels.register_forward_hook(
            lambda module, args, output: self.seen_by_hook.append(output.dtype)
        )

    def training_step(self, batch, batch_idx):
        stream, self.dtypes = self.embedding(batch), Seen()
        for block in self.blocks:
            stream = block(stream, batch, self.dtypes)
        self.dtypes |= {"stream": stream.dtype, "hook": self.seen_by_hook[0]}
        return stream.float().square().mean()


class Normed(nn.Module):
    """A unit with norms inside."""

    def __init__(self):
        super().__init__()
        self.by_token = nn.LayerNorm(4)
        self.by_group = nn.GroupNorm(2, 4)
        self.layer = nn.Linear(4, 4)
        for norm in (self.by_token, self.by_group):
            nn.init.normal_(norm.weight, 1.0, 0.3)
            nn.init.normal_(norm.bias, 0.0, 0.3)

    def forward(self, stream, batch, dtypes):
        normed = self.by_group(self.by_token(stream))
        dtypes |= {"normed": normed.dtype}
        return stream + self.layer(normed)


class LookupBetweenNorms(LookupInUnits):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Normed() for _ in range(2))
        self.seen_by_hook = [torch.float32]


class _Losses(pl.Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.losses.append(outputs["loss"].item())


class TiedLookup(LookupBetweenNorms):
    """Its head is its embedding, as in the recipes."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, self.embedding.num_embeddings, bias=False)
        self.head.weight = self.embedding.weight

    def training_step(self, batch, batch_idx):
        stream, self.dtypes = self.embedding(batch), Seen()
        for block in self.blocks:
            stream = block(stream, batch, self.dtypes)
        return nn.functional.cross_entropy(self.head(stream).float(), batch)


def _losses(rank, world_size, strategy, folder, build=LookupBetweenNorms, **options):
    seen = []
    for name in ("ddp", strategy):
        model, losses = seeded(build), _Losses()
        options |= {"precision": "bf16-mixed", "callbacks": [losses], "devices": world_size}
        trainer = make_trainer(name, Path(folder), **options)
        trainer.fit(model, DataLoader(torch.arange(8), batch_size=2))
        seen.append(losses.losses)
    return seen


def test_norms_in_units_train_under_bf16_as_under_ddp(tmp_path):
    for strategy, ranks in each_on_trainer_ranks(_losses, 2, SHARDED, str(tmp_path)).items():
        for ddp, sharded in ranks:
            assert len(ddp) > 1
            assert sharded == pytest.approx(ddp, rel=0.02), strategy


def _losses_accumulated(rank, world_size, strategy, folder):
    return _losses(rank, world_size, strategy, folder, TiedLookup, accumulate_grad_batches=2)


def test_one_rank_accumulates_under_bf16_as_under_ddp(tmp_path):
    found = each_on_trainer_ranks(_losses_accumulated, 1, SHARDED, str(tmp_path))
    for strategy, ((ddp, sharded),) in found.items():
        assert len(ddp) == 4
        assert sharded == pytest.approx(ddp, rel=0.02), strategy


class _CallsInHook(Regressor):
    def on_train_epoch_end(self):
        with torch.no_grad(), self.trainer.precision_plugin.forward_context():
            self.seen = self(torch.ones(2, 5)).float()


@at_both_stages
def _calls_in_hook(strategy, folder, rank):
    _, model = fit(strategy, folder, seeded(_CallsInHook), precision="bf16-mixed")
    return {"seen": model.seen}


def test_a_forward_in_a_hook_is_that_of_ddp_in_the_context_of_a_step(tmp_path):
    assert_like_ddp(_calls_in_hook, tmp_path, atol=0.02, rtol=0.02)


def _num_hooks(model):
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


def _dtypes(rank, world_size, strategy, folder, build):
    seen = []
    for name in ("ddp", strategy):
        model = build()
        hooks = _num_hooks(model)
        trainer = make_trainer(name, Path(folder), precision="bf16-mixed", max_steps=1)
        trainer.fit(model, DataLoader(torch.arange(8), batch_size=2))
        assert _num_hooks(model) == hooks
        seen.append(model.dtypes)
    return seen


@pytest.mark.parametrize("build", [Lookup, LookupInUnits, LookupBetweenNorms])
def test_the_residual_stream_has_the_dtype_that_it_has_under_ddp(tmp_path, build):
    found = each_on_trainer_ranks(_dtypes, 2, SHARDED, str(tmp_path), build)
    for strategy, ranks in found.items():
        for ddp, sharded in ranks:
            assert sharded == ddp, strategy
            assert set(ddp.values()) == {torch.float32}


class Counted(nn.Module):
    """A unit with running statistics of what autocast has computed in bf16."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.by_feature = nn.BatchNorm1d(5)
        self.by_sample = nn.InstanceNorm1d(1, affine=True, track_running_stats=True)

    def forward(self, stream, dtypes):
        inner = self.layer(stream)
        normed = self.by_feature(inner)
        again = self.by_sample(inner[:, None, :])[:, 0]
        dtypes |= {"layer": inner.dtype, "by feature": normed.dtype, "by sample": again.dtype}
        return stream + normed + again


class WithStatistics(Regressor):
    """Others of the stream itself, in fp32."""

    affine_trains = True

    def __init__(self):
        super().__init__(num_blocks=0)  # which have norms of another kind
        self.of_stream = nn.BatchNorm1d(5)
        self.units = nn.ModuleList(Counted() for _ in range(2))
        self.dtypes = {}
        for norm in self._norms():
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            if not self.affine_trains:
                norm.weight.data = norm.weight.data.bfloat16().float()
                norm.requires_grad_(False)

    def _norms(self):
        kinds = (nn.BatchNorm1d, nn.InstanceNorm1d)
        return [module for module in self.modules() if isinstance(module, kinds)]

    def forward(self, x):
        stream, seen = self.of_stream(x), Seen()
        for unit in self.units:
            stream = unit(stream, seen)
        self.dtypes = dict(seen)
        return super().forward(stream)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class WithFixedAffine(WithStatistics):
    """Weights of norms that bf16 has: what is left are the bits of DDP."""

    affine_trains = False


def _statistics(strategy, folder, rank, build):
    model, hooks = seeded(build), _num_hooks(seeded(build))
    trainer = make_trainer(strategy, folder, precision="bf16-mixed", max_epochs=2)
    trainer.fit(model, make_loader(), make_loader(24, seed=1))
    assert _num_hooks(model) == hooks
    weights = weights_of(model)
    if rank != 0:  # where DDP leaves this rank's own last update
        weights = {n: w for n, w in weights.items() if "running" not in n}
    metrics = {name: value.clone() for name, value in trainer.callback_metrics.items()}
    dtypes = {name: dtype.itemsize for name, dtype in model.dtypes.items()}
    return {"weights": weights, "losses": model.losses, "metrics": metrics, "dtypes": dtypes}


def _statistics_trained(strategy, folder, rank):
    return _statistics(strategy, folder, rank, WithStatistics)


def _statistics_fixed(strategy, folder, rank):
    return _statistics(strategy, folder, rank, WithFixedAffine)


def test_running_statistics_under_bf16_are_those_of_ddp(tmp_path):
    assert_like_ddp(_statistics_trained, tmp_path, atol=5e-3, rtol=5e-3)


def test_running_statistics_with_weights_that_bf16_has_are_those_of_ddp_to_the_bit(tmp_path):
    assert_like_ddp(_statistics_fixed, tmp_path, atol=1e-6, rtol=1e-6)
