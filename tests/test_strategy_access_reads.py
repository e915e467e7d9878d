"""What reading gradients and weights costs: no bit, and one unit of memory; micro-batches apart."""

import copy
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from tests.support.access import NAMES, separately
from tests.support.cases import each_on_trainer_ranks
from tests.support.memory import StorageTracker
from tests.support.trainer import (
    SHARDED,
    Regressor,
    make_loader,
    make_trainer,
    seeded,
    weights_of,
    with_options,
)


def test_micro_batches_are_kept_apart(tmp_path):
    each_on_trainer_ranks(separately, 2, SHARDED, str(tmp_path))


class _LeavesOneOut(Regressor):
    """A unit that the second micro-batch of a step does not use; rank 1 alone has its bias."""

    def __init__(self):
        super().__init__()
        self.early = nn.Linear(7, 3)
        self.seen = [set(), set()]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 2 else loss + self.early(batch[0] @ torch.ones(5, 7)).mean()

    def on_train_start(self):
        access = self.trainer.strategy.gradients
        access.on_reduced(lambda name, shard, micro_batch: self.seen[micro_batch].add(name))
        self.context = access.micro_batches("separate")
        self.context.__enter__()

    def on_before_optimizer_step(self, optimizer):
        access = self.trainer.strategy.gradients
        for micro_batch, more in enumerate([{"early.weight", "early.bias"}, set()]):
            assert set(access.shards(micro_batch)) == {*NAMES, *more}, micro_batch
        everywhere = [None, None]
        dist.all_gather_object(everywhere, self.seen)
        assert everywhere[0] == everywhere[1], "on_reduced is called alike"
        assert set(access.shards()) == {*NAMES, "early.weight", "early.bias"}

    def on_train_end(self):
        self.context.__exit__(None, None, None)


def _left_out(rank, world_size, strategy, folder):
    strategy = with_options(strategy, accumulation="sum")
    options = {"accumulate_grad_batches": 2, "limit_train_batches": 2}
    make_trainer(strategy, Path(folder), **options).fit(seeded(_LeavesOneOut), make_loader())


def test_what_a_micro_batch_leaves_out_is_not_there_on_any_rank(tmp_path):
    each_on_trainer_ranks(_left_out, 2, SHARDED, str(tmp_path))


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


@pytest.mark.parametrize(("world_size", "names"), [(1, SHARDED[::2]), (2, SHARDED)], ids=[1, 2])
def test_reading_changes_no_bit(tmp_path, world_size, names):
    each_on_trainer_ranks(_with_and_without_reading, world_size, names, str(tmp_path))


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


# At ZeRO-2 all units are whole where the pass begins, whatever is in them.
@pytest.mark.parametrize(
    ("kind", "names"), [(_Wide, SHARDED[::2]), (_Embeds, SHARDED)], ids=["_Wide", "_Embeds"]
)
def test_a_pass_over_all_gradients_or_weights_adds_one_unit_at_most(tmp_path, kind, names):
    for strategy, ranks in each_on_trainer_ranks(_streamed, 2, names, kind, str(tmp_path)).items():
        for rank, (parameter, unit, most, left) in enumerate(ranks):
            # Where rows do not divide, FSDP2 gathers from a padded copy of this rank's piece.
            padded = parameter / 2 if strategy.startswith("fsdp2") and rank == 1 else 0
            for what in ("gradients", "weights"):
                assert parameter <= most[what] <= 1.02 * unit + padded, (strategy, what, most, unit)
                assert left[what] == 0, (strategy, what, left)


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
