"""The probe's records against plain gradients of the same batches."""

import functools
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, Subset

from lightning_fsdp import GradientAccessProbe
from lightning_fsdp.callbacks.plain_access import gradients_of
from tests.support.trainer import (
    STRATEGIES,
    Regressor,
    make_data,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
)

LAYERS = {"inlet", "head", "blocks.0", "blocks.1"}


def _reference(rank, world_size, loader):
    """Norms by name: this rank's first micro-batch, and the mean over ranks of two."""
    model = seeded(Regressor)
    local = []
    for batch, _ in zip(loader, range(2), strict=False):
        model.zero_grad()
        (model.loss(batch) / 2).backward()
        local.append({name: p.grad.double() for name, p in model.named_parameters()})
    waiting, reduced = {}, {}
    for name in local[0]:
        square = local[0][name].square().sum()
        total = local[0][name] + local[1][name]
        dist.all_reduce(square)
        dist.all_reduce(total)
        waiting[name] = (square / world_size).sqrt().item()
        reduced[name] = (total / world_size).norm().item()
    return waiting, reduced


def _seen(rank, world_size, strategy, folder):
    loader = DataLoader(Subset(make_data(), range(rank, 32, world_size)), batch_size=4)
    waiting, reduced = _reference(rank, world_size, loader)
    probe = GradientAccessProbe(steps=[0])
    logger = TensorBoardLogger(folder, name=None, version="run")
    trainer = make_trainer(
        strategy,
        Path(folder),
        accumulate_grad_batches=2,
        callbacks=[probe],
        logger=logger,
        use_distributed_sampler=False,
    )
    trainer.fit(seeded(Regressor), loader)
    expected = [
        (0, "after_zero_grad", "none", {}),
        (0, "after_backward", "local", waiting),
        (1, "before_backward", "local", waiting),
        (1, "after_backward", "reduced", reduced),
        (1, "before_step", "reduced", reduced),
    ]
    assert len(probe.records) == len(expected)
    for record, (micro_batch, moment, state, norms) in zip(probe.records, expected, strict=True):
        assert (record.step, record.micro_batch, record.moment) == (0, micro_batch, moment)
        assert set(record.states) == set(reduced), record
        assert set(record.states.values()) == {state}, record
        assert record.num_total == len(reduced)
        assert record.num_accessible == (0 if state == "none" else len(reduced))
        torch.testing.assert_close(record.norms, norms, rtol=1e-4, atol=1e-7)
        assert record.nan == record.inf == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_moment_is_recorded_with_its_states_and_norms(tmp_path, strategy):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    on_trainer_ranks(_seen, 2, strategy, str(tmp_path))
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert [e.value for e in events.Scalars("probes/gradient_access/before_step/accessible")] == [
        16
    ]
    assert [
        e.value for e in events.Scalars("probes/gradient_access/after_zero_grad/accessible")
    ] == [0]
    assert set(events.Tags()["histograms"]) == {
        f"probes/gradient_norms/{layer}" for layer in LAYERS
    }
    (histogram,) = events.Histograms("probes/gradient_norms/blocks.0")
    assert histogram.histogram_value.num == 6  # a norm per parameter of the block
    assert all(e.value > 0 for e in events.Scalars("probes/gradient_norm/blocks.0"))


class _Poisoned(Regressor):
    """On rank 1, the second step has a NaN in one gradient and an infinity in another."""

    def on_train_start(self):
        self.poison = {"head.bias": math.nan, "inlet.weight": math.inf}
        access = getattr(self.trainer.strategy, "gradients", None)
        if access is not None:
            access.on_local(self.spoil)
            return
        for name, parameter in self.named_parameters():
            parameter.register_hook(functools.partial(self.spoil_copy, name))

    def spoil_copy(self, name, gradient):
        gradient = gradient.clone()
        self.spoil(name, gradient, 0)
        return gradient

    def spoil(self, name, gradient, micro_batch):
        is_here = self.trainer.global_step == 1 and self.trainer.global_rank == 1
        if is_here and name in self.poison:
            gradient.view(-1)[-1] = self.poison[name]


def _poisoned(rank, world_size, strategy, folder):
    import warnings

    probe = GradientAccessProbe(steps=1)
    trainer = make_trainer(strategy, Path(folder), callbacks=[probe], limit_train_batches=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(seeded(_Poisoned), make_loader())
    first, second = (r for r in probe.records if r.moment == "before_step")
    assert first.nan == first.inf == []
    assert "head.bias" in second.nan
    assert "inlet.weight" in second.inf
    assert len(second.nan) == len(second.inf) == 1
    told = [str(w.message) for w in caught if "not finite" in str(w.message)]
    assert len(told) == (1 if rank == 0 else 0)
    for text in told:
        assert "optimizer step 1 are not finite: NaN in ['head.bias'], infinity in [" in text


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nan_and_infinity_on_one_rank_are_named_on_all(tmp_path, strategy):
    on_trainer_ranks(_poisoned, 2, strategy, str(tmp_path))


class _Thaws(Regressor):
    """Its head is trained from the second step on."""

    def __init__(self):
        super().__init__()
        self.head.requires_grad_(False)
        self.arrived = []

    def on_train_start(self):
        def note(name, gradient, micro_batch):
            self.arrived.append((name, gradient.norm().item()))

        gradients_of(self.trainer, self).on_local(note, edits=False)

    def on_train_batch_start(self, batch, batch_idx):
        self.arrived.clear()
        self.head.requires_grad_(batch_idx > 0)


def _thaws(rank, world_size, strategy, folder):
    probe, model = GradientAccessProbe(steps=1), seeded(_Thaws)
    loader = DataLoader(Subset(make_data(), range(rank, 32, world_size)), batch_size=4)
    options = {"devices": world_size, "limit_train_batches": 2, "use_distributed_sampler": False}
    make_trainer(strategy, Path(folder), callbacks=[probe], **options).fit(model, loader)
    seen = [record for record in probe.records if record.moment == "before_step"]
    return [record.states for record in seen], [record.norms for record in seen], model.arrived


def _plainly():
    """Norms in the second step, of one process."""
    model = seeded(_Thaws)
    optimizer = model.configure_optimizers()
    for index, batch in zip(range(2), DataLoader(make_data(), batch_size=4), strict=False):
        model.on_train_batch_start(batch, index)
        optimizer.zero_grad()
        model.loss(batch).backward()
        norms = {n: p.grad.norm().item() for n, p in model.named_parameters() if p.requires_grad}
        optimizer.step()
    return norms


def test_what_is_thawed_while_it_trains_is_seen_on_a_single_device(tmp_path):
    ((states, norms, arrived),) = on_trainer_ranks(_thaws, 1, "auto", str(tmp_path))
    expected = _plainly()
    assert {"head.weight", "head.bias"} == states[1].keys() - states[0].keys()
    assert set(states[1].values()) == {"reduced"}
    assert norms[1] == pytest.approx(expected)
    assert dict(arrived) == pytest.approx(expected)


def test_ddp_does_not_reduce_what_is_thawed_after_it_was_made(tmp_path):
    for states, _, arrived in on_trainer_ranks(_thaws, 2, "ddp", str(tmp_path)):
        assert {n for n, state in states[1].items() if state == "local"} == {
            "head.weight",
            "head.bias",
        }
        assert len(arrived) == len(states[1])


def test_manual_optimization_is_refused(tmp_path):
    module = seeded(Regressor)
    module.automatic_optimization = False
    trainer = make_trainer("auto", tmp_path, devices=1)
    with pytest.raises(NotImplementedError, match="GradientAccessProbe: expected automatic"):
        GradientAccessProbe().on_train_start(trainer, module)
