"""The probe's bytes against formulas, and against a tracker that shares no code with it."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fsdp import MemoryProbe, ScratchFSDPStrategy, ThroughputMonitor
from tests.support.memory import StorageTracker, optimizer_tensors
from tests.support.trainer import (
    STRATEGIES,
    Regressor,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
)

KIB = 1024


class _Exp(pl.LightningModule):
    """Of 64 KiB of weights; keeps its input (32 KiB) and its result (32 KiB) for the backward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(128, 128, bias=False)

    def training_step(self, batch, batch_idx):
        return self.linear(batch[0]).exp().sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6, momentum=0.9)


def _close_to(kib):
    return pytest.approx(kib * KIB, abs=64)  # a loss, a counter


def _one_device(rank, world_size, others, folder):
    """Other callbacks stand before the probe."""
    probe = MemoryProbe(steps=[0, 1])
    trainer = make_trainer("auto", Path(folder), callbacks=[*others, probe], max_steps=2)
    trainer.fit(seeded(_Exp), DataLoader(TensorDataset(torch.randn(256, 128) / 100), batch_size=64))
    first, second = (report.ranks[0] for report in probe.reports)
    for of_step, before in ((first, 0), (second, 64)):
        forward, backward, step = (of_step[phase] for phase in ("forward", "backward", "step"))
        for phase in (forward, backward, step):
            assert phase.resting["parameters"] == phase.peak["parameters"] == 64 * KIB
            assert phase.reserved == phase.allocated == 0
        assert forward.resting["activations"] == _close_to(64)
        assert forward.peak["activations"] == _close_to(96)  # also what exp is taken of
        assert forward.resting["optimizer"] == before * KIB
        assert forward.resting["gradients"] == 0
        assert backward.resting["gradients"] == 64 * KIB
        assert backward.resting["activations"] == _close_to(32)  # the batch
        assert step.resting["optimizer"] == 64 * KIB
        assert step.resting["gradients"] == 64 * KIB  # until the next step clears them


def test_one_device_has_what_the_formula_says(tmp_path):
    on_trainer_ranks(_one_device, 1, [], str(tmp_path))


def _counted_before(rank, world_size, folder):
    monitor = ThroughputMonitor(flops_per_token="count", num_tokens=lambda batch: len(batch[0]))
    _one_device(rank, world_size, [monitor], folder)
    assert monitor.flops_per_token == 2 * 2 * 128 * 128


def test_a_count_of_operations_that_ends_inside_a_step_that_is_watched_changes_nothing(tmp_path):
    on_trainer_ranks(_counted_before, 1, str(tmp_path))


def _over_hosts(rank, world_size, folder):
    probe = MemoryProbe(steps=[1])
    strategy = ScratchFSDPStrategy(shard_size=2, state_over="all")
    trainer = make_trainer(strategy, Path(folder), callbacks=[probe], max_steps=2)
    trainer.fit(seeded(_Exp), DataLoader(TensorDataset(torch.randn(64, 128) / 100), batch_size=8))
    for of_rank in probe.reports[0].ranks:
        resting = of_rank["step"].resting
        assert resting["parameters"] == (16 + 32) * KIB  # a shard, and what the host gathers from
        assert resting["optimizer"] == resting["gradients"] == 16 * KIB


def test_the_part_that_a_rank_keeps_of_the_weights_is_parameters(tmp_path):
    on_trainer_ranks(_over_hosts, 4, str(tmp_path))


class _Tracks(pl.Callback):
    """The most bytes alive in each phase, by the tests' own tracker; entered outside the probe."""

    def __init__(self, step):
        self.step, self.tracker, self.peaks, self.peak = step, None, {}, 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.step and self.tracker is None:
            self.tracker = StorageTracker(module, self.see)
            self.tracker.track(optimizer_tensors(trainer.optimizers[0]))
            self.tracker.__enter__()
        self.begin()

    def see(self):
        self.peak = max(self.peak, self.tracker.live_bytes())

    def begin(self):
        if self.tracker is not None:
            self.peak = self.tracker.live_bytes()

    def end(self, phase):
        if self.tracker is not None:
            self.peaks[phase] = max(self.peak, self.peaks.get(phase, 0))

    def on_before_backward(self, trainer, module, loss):
        self.end("forward")
        self.begin()

    def on_after_backward(self, trainer, module):
        self.end("backward")

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.begin()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.tracker is not None and trainer.global_step > self.step:
            self.end("step")

    def on_train_end(self, trainer, module):  # after the probe has left, which entered later
        self.tracker.__exit__(None, None, None)


def _sharded(rank, world_size, strategy, folder):
    probe, tracks = MemoryProbe(steps=[1]), _Tracks(1)
    logger = TensorBoardLogger(folder, name=None, version="run")
    module = seeded(lambda: Regressor(width=64))
    num_bytes = sum(p.nbytes for p in module.parameters())
    trainer = make_trainer(
        strategy,
        Path(folder),
        callbacks=[tracks, probe],
        logger=logger,
        accumulate_grad_batches=2,
        max_steps=2,
    )
    trainer.fit(module, make_loader())
    (report,) = probe.reports
    for phase, peak in tracks.peaks.items():
        found = sum(report.ranks[rank][phase].peak.values())
        assert found == pytest.approx(peak, rel=0.02), (strategy, phase)
    for of_rank in report.ranks:  # in the second forward those of the first micro-batch wait, whole
        waiting = of_rank["forward"].resting["gradients"]
        assert num_bytes <= waiting < 1.1 * num_bytes, (strategy, waiting, num_bytes)
    step = [of_rank["step"].resting for of_rank in report.ranks]
    for owner in ("parameters", "optimizer", "gradients"):
        held = [resting[owner] for resting in step]
        if strategy == "ddp":
            assert held == [num_bytes] * world_size, owner
        else:  # together all of it; padding is small
            assert num_bytes <= sum(held) < 1.1 * num_bytes, (owner, held, num_bytes)
            assert max(held) < 0.6 * num_bytes, (owner, held, num_bytes)
    return len(probe.reports)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank_is_told_apart_by_owner_and_peaks_are_those_of_a_tracker(tmp_path, strategy):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    on_trainer_ranks(_sharded, 2, strategy, str(tmp_path))
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    (picture,) = events.Images("memory/timeline")
    assert picture.step == 1
    assert picture.width > 500
    for rank in (0, 1):
        (peak,) = events.Scalars(f"memory/backward/peak_bytes/rank{rank}")
        (resting,) = events.Scalars(f"memory/backward/resting_bytes/rank{rank}")
        assert peak.value >= resting.value > 0


def test_a_snapshot_without_cuda_is_refused(tmp_path):
    probe = MemoryProbe(snapshot=tmp_path / "snapshots")
    trainer = make_trainer("auto", tmp_path, devices=1)
    with pytest.raises(ValueError, match="expected a CUDA device"):
        probe.on_train_start(trainer, seeded(_Exp))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_allocator_agrees_and_a_snapshot_is_written(tmp_path):
    probe = MemoryProbe(steps=[1], snapshot=tmp_path / "snapshots")
    trainer = make_trainer(
        "auto", tmp_path, devices=1, accelerator="cuda", callbacks=[probe], max_steps=2
    )
    data = TensorDataset(torch.randn(256, 128) / 100)
    trainer.fit(seeded(_Exp), DataLoader(data, batch_size=64))
    (report,) = probe.reports
    for phase in report.ranks[0].values():
        assert phase.reserved >= phase.allocated >= sum(phase.peak.values()) > 0
    assert (tmp_path / "snapshots" / "step1_rank0.pickle").stat().st_size > 0
