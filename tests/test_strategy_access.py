"""Gradients and weights by name under every engine, at every moment, against plain modules.

The reference of a step is a plain copy of the model with the weights that the strategy shows: its
gradient on this rank's batch is the local one, the mean over ranks the reduced one.
"""

import copy
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from lightning_fsdp import GradientUnavailable
from tests.support.cases import each_on_trainer_ranks
from tests.support.memory import StorageTracker
from tests.support.trainer import (
    SHARDED,
    Regressor,
    make_loader,
    make_trainer,
    seeded,
    weights_of,
)

NAMES = ["inlet.weight", "inlet.bias", "head.weight"]
NAMES += [
    f"blocks.{i}.{part}.{kind}"
    for i in (0, 1)
    for part in ("norm", "up", "down")
    for kind in ("weight", "bias")
]
NAMES += ["head.bias"]


def _plain_model():
    return seeded(Regressor)


def _local_reference(weights, batch, dtype):
    """Gradients of this rank's batch, unsharded."""
    model = _plain_model().to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    x, y = (t.to(dtype) for t in batch)
    F.mse_loss(model(x), y).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _mean(local):
    """Over ranks, in fp32; a sum of two terms has one result."""
    reduced = {}
    for name, gradient in local.items():
        reduced[name] = gradient.float().clone()
        dist.all_reduce(reduced[name])
        reduced[name] /= dist.get_world_size()
    return reduced


def _refused(read):
    try:
        read()
    except GradientUnavailable as error:
        return str(error)
    raise AssertionError("expected GradientUnavailable")


class _Watch(pl.Callback):
    """Looks at every moment of two steps of two micro-batches each."""

    def __init__(self, dtype, tolerance):
        self.dtype = dtype
        self.tolerance = tolerance
        self.waiting = {}  # local gradients of the micro-batches so far, summed
        self.seen_local = {}
        self.micro_batches = []
        self.checked = []

    def on_train_start(self, trainer, module):
        strategy = trainer.strategy
        assert strategy.gradients.names() == strategy.weights.names()
        assert sorted(strategy.gradients.names()) == sorted(NAMES)
        self.handle = strategy.gradients.on_local(self.on_local)

    def on_local(self, name, gradient, micro_batch):
        assert name not in self.seen_local, "a gradient arrives once per backward"
        self.seen_local[name] = gradient.clone()
        self.micro_batches.append(micro_batch)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        weights = {name: weight.clone() for name, weight in trainer.strategy.weights.full()}
        for name, whole in weights.items():
            assert torch.equal(trainer.strategy.weights[name].full(), whole)
        self.local = _local_reference(weights, batch, self.dtype)
        if batch_idx % 2 == 0:
            self.waiting = {name: torch.zeros_like(g) for name, g in self.local.items()}
        self.waiting = {name: g + self.local[name] / 2 for name, g in self.waiting.items()}

    def on_before_backward(self, trainer, module, loss):
        first = trainer.strategy.gradients["head.weight"]
        expected = "none" if trainer.fit_loop.batch_idx % 2 == 0 else "local"
        assert first.state == expected
        if expected == "none":
            message = _refused(lambda: first.shard)
            assert trainer.strategy.engine.name in message
            assert "'head.weight'" in message
        self.seen_local, self.micro_batches = {}, []

    def on_after_backward(self, trainer, module):
        gradients, index = trainer.strategy.gradients, trainer.fit_loop.batch_idx
        assert set(self.micro_batches) == {index % 2}
        for name in NAMES:  # Lightning divides the loss by the number of micro-batches
            self.close(self.seen_local[name], self.local[name] / 2, f"on_local {name}")
        if index % 2 == 0:
            for name in NAMES:
                assert gradients[name].state == "local", name
                self.close(gradients[name].local(), self.waiting[name], f"local {name}")
                assert "'local'" in _refused(lambda name=name: gradients[name].full())
                assert "'local'" in _refused(lambda name=name: gradients[name].shard)
            self.checked.append("local")
        else:
            self.check_reduced(gradients)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.check_reduced(trainer.strategy.gradients)

    def check_reduced(self, gradients):
        expected = _mean(self.waiting)
        for name in NAMES:
            assert gradients[name].state == "reduced", name
            self.close(gradients[name].full(), expected[name], f"reduced {name}")
            assert "'reduced'" in _refused(lambda name=name: gradients[name].local())
        streamed = dict(gradients.full())
        assert sorted(streamed) == sorted(NAMES)
        for name, whole in streamed.items():
            self.close(whole, expected[name], f"streamed {name}")
        pieces = sum(shard.numel() for shard in gradients.shards().values())
        total = torch.tensor(pieces)
        dist.all_reduce(total)
        assert int(total) == sum(g.numel() for g in expected.values())
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in expected.values()]))
        self.close(gradients.norm(), norm, "norm")
        self.close(gradients.dot(None).float(), norm**2, "dot")
        self.checked.append("reduced")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx % 2 == 1:
            trainer.optimizers[0].zero_grad()
            for name in NAMES:
                assert trainer.strategy.gradients[name].state == "none"
            self.checked.append("none")
        self.seen_local = {}

    def close(self, found, expected, what):
        assert found.shape == expected.shape, what
        torch.testing.assert_close(
            found.float(),
            expected.float(),
            rtol=self.tolerance,
            atol=self.tolerance,
            msg=lambda text: f"{what}: {text}",
        )


def _watched(rank, world_size, strategy, precision, folder):
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    watch = _Watch(dtype, {"32-true": 1e-6, "bf16-true": 1e-2, "bf16-mixed": 2e-2}[precision])
    trainer = make_trainer(
        strategy,
        Path(folder),
        precision=precision,
        accumulate_grad_batches=2,
        limit_train_batches=4,
        callbacks=[watch],
    )
    trainer.fit(_plain_model(), make_loader(64))
    assert watch.checked == ["local", "reduced", "reduced", "none"] * 2
    watch.handle.remove()


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_every_gradient_is_right_at_every_moment(tmp_path, precision):
    each_on_trainer_ranks(_watched, 2, SHARDED, precision, str(tmp_path))


@pytest.mark.parametrize("world_size", [1, 4])
def test_gradients_are_right_at_other_world_sizes(tmp_path, world_size):
    each_on_trainer_ranks(_watched, world_size, SHARDED[::2], "32-true", str(tmp_path))


# -- micro-batches apart ---------------------------------------------------------------------------


class _Separately(Regressor):
    """Two micro-batches by hand, each kept apart."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.landed = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        gradients = self.trainer.strategy.gradients
        halves = [(x[:2], y[:2]), (x[2:], y[2:])]
        weights = dict(self.trainer.strategy.weights.full())
        weights = {name: whole.clone() for name, whole in weights.items()}
        expected = [_mean(_local_reference(weights, half, torch.float32)) for half in halves]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        handle = gradients.on_reduced(
            lambda name, shard, i: self.landed.append((name, shard.clone(), i))
        )
        with gradients.micro_batches("separate"):
            for half in halves:
                self.manual_backward(self.loss(half))
        handle.remove()
        assert {micro_batch for _, _, micro_batch in self.landed} == {0, 1}
        for name in gradients.names():
            for index in (0, 1):
                torch.testing.assert_close(
                    gradients[name].full(micro_batch=index), expected[index][name]
                )
            total = expected[0][name] + expected[1][name]
            torch.testing.assert_close(gradients[name].full(), total)
        shards = {(name, index): shard for name, shard, index in self.landed}
        for name, shard in gradients.shards(micro_batch=1).items():
            assert torch.equal(shards[name, 1], shard)
        self.landed.clear()
        dot = sum((expected[0][n].double() * expected[1][n].double()).sum() for n in expected[0])
        torch.testing.assert_close(gradients.dot(0, 1), dot, rtol=1e-5, atol=1e-8)
        assert "micro-batch 2" in _refused(lambda: gradients["head.bias"].full(micro_batch=2))
        optimizer.step()
        optimizer.zero_grad()
        assert "'head.bias'" in _refused(lambda: gradients["head.bias"].full(micro_batch=0))


def _separately(rank, world_size, strategy, folder):
    trainer = make_trainer(strategy, Path(folder), limit_train_batches=2)
    trainer.fit(seeded(_Separately), make_loader())
    assert trainer.global_step == 2


def test_micro_batches_are_kept_apart(tmp_path):
    each_on_trainer_ranks(_separately, 2, SHARDED, str(tmp_path))


# -- reading changes nothing -----------------------------------------------------------------------


class _ReadsEverything(pl.Callback):
    def on_train_start(self, trainer, module):
        trainer.strategy.gradients.on_local(lambda *_: None)
        trainer.strategy.gradients.on_reduced(lambda *_: None)

    def on_after_backward(self, trainer, module):
        gradients = trainer.strategy.gradients
        if gradients["head.weight"].state == "reduced":
            dict(gradients.full())
            gradients.norm()
        dict(trainer.strategy.weights.full())


def _with_and_without_reading(rank, world_size, strategy, folder):
    found = []
    for callbacks in ([], [_ReadsEverything()]):
        model = seeded(Regressor)
        options = {"accumulate_grad_batches": 2, "callbacks": copy.copy(callbacks)}
        make_trainer(strategy, Path(folder), **options).fit(model, make_loader())
        found.append(weights_of(model))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_reading_changes_no_bit(tmp_path, world_size):
    each_on_trainer_ranks(_with_and_without_reading, world_size, SHARDED, str(tmp_path))


# -- memory of a pass over everything --------------------------------------------------------------


class _Wide(Regressor):
    """Blocks that hold nearly all, of a width that two ranks do not divide."""

    def __init__(self):
        super().__init__(width=63)


class _Embeds(_Wide):
    """The two largest units are one weight each, without a bias."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(301, 63)
        self.out = nn.Linear(63, 300, bias=False)

    def forward(self, x):
        hidden = self.table(x.abs().mul(100).long().clamp(max=300)).sum(1) + self.inlet(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) + self.out(hidden)[:, :3]


class _Streams(pl.Callback):
    """Goes over all gradients, then over all weights, and keeps the most bytes that this added."""

    def __init__(self):
        self.most, self.left = {}, {}

    def on_before_optimizer_step(self, trainer, module, optimizer):
        for what in ("gradients", "weights"):
            access = getattr(trainer.strategy, what)
            with StorageTracker(module) as tracker:
                tracker.track([access[name].shard for name in access.names()])
                before, sizes, seen = tracker.settled_bytes(), [], []
                tracker.at_each_operation = lambda t=tracker, s=sizes: s.append(t.live_bytes())
                for name, whole in access.full():
                    assert type(whole) is torch.Tensor
                    seen.append(name)
                    del whole
                    tracker.settled_bytes()  # gloo's threads let go a little later
                self.most[what] = max(sizes) - before
                self.left[what] = tracker.settled_bytes() - before
            assert sorted(seen) == sorted(access.names())


def _streamed(rank, world_size, strategy, kind, folder):
    model, streams = seeded(kind), _Streams()
    units = [*model.blocks, *(m for n, m in model.named_children() if n in ("table", "out"))]
    unit = 4 * max(sum(p.numel() for p in unit.parameters()) for unit in units)
    parameter = 4 * max(p.numel() for p in model.parameters())
    trainer = make_trainer(strategy, Path(folder), limit_train_batches=1, callbacks=[streams])
    trainer.fit(model, make_loader())
    return parameter, unit, streams.most, streams.left


@pytest.mark.parametrize("kind", [_Wide, _Embeds])
def test_a_pass_over_all_gradients_or_weights_adds_one_unit_at_most(tmp_path, kind):
    for strategy, ranks in each_on_trainer_ranks(
        _streamed, 2, SHARDED, kind, str(tmp_path)
    ).items():
        for rank, (parameter, unit, most, left) in enumerate(ranks):
            # Where rows do not divide, FSDP2 gathers from a padded copy of this rank's piece.
            padded = parameter / 2 if strategy.startswith("fsdp2") and rank == 1 else 0
            for what in ("gradients", "weights"):
                assert parameter <= most[what] <= 1.02 * unit + padded, (strategy, what, most, unit)
                assert left[what] == 0, (strategy, what, left)


# -- nothing left over -----------------------------------------------------------------------------


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


# -- frozen parameters -----------------------------------------------------------------------------


class _LooksForFrozen(pl.Callback):
    def on_train_start(self, trainer, module):
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
    make_trainer(strategy, Path(folder), callbacks=[_LooksForFrozen()]).fit(module, make_loader())


def test_a_frozen_parameter_is_not_among_the_gradients(tmp_path):
    each_on_trainer_ranks(_frozen, 2, SHARDED[::2], str(tmp_path))


# -- outside of a run ------------------------------------------------------------------------------


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


# -- counting micro-batches ------------------------------------------------------------------------


class _Overflows(Regressor):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if batch_idx < 2 else loss


def _counted(rank, world_size, strategy, folder):
    seen = []

    class Counts(pl.Callback):
        def on_train_start(self, trainer, module):
            trainer.strategy.gradients.on_local(lambda *hook: seen.append(hook[2]))

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    options = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "callbacks": [Counts()]}
    trainer = make_trainer(strategy, Path(folder), accumulate_grad_batches=2, **options)
    trainer.fit(seeded(_Overflows), make_loader())
    assert trainer.precision_plugin.scaler.get_scale() == 4.0  # the first step was skipped
    assert seen == [index for index in (0, 1, 0, 1) for _ in NAMES]


def test_micro_batches_are_counted_from_a_step_that_the_scaler_skipped(tmp_path):
    each_on_trainer_ranks(_counted, 2, SHARDED[::2], str(tmp_path))
