"""When a snapshot of CUDA's memory is recorded; the recording itself is torch's."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_fsdp.bench import snapshot
from lightning_fsdp.bench.measure import Measure
from lightning_fsdp.bench.snapshot import Snapshot

CUDA = torch.device("cuda", 0)


@pytest.fixture
def told(monkeypatch):
    """What torch was told: on, off, write."""
    told = []
    monkeypatch.setattr(
        snapshot, "record_memory_history", lambda is_on: told.append("on" if is_on else "off")
    )
    monkeypatch.setattr(snapshot, "dump_memory_snapshot", lambda path: told.append(path))
    return told


def train(recorder, *, num_steps, fails_in=None, grad_accum=2):
    for step in range(num_steps):
        for _ in range(grad_accum):
            recorder.begin(step)
            if step == fails_in:
                recorder.end(has_failed=True)
                return
        recorder.end()


def test_the_step_that_is_asked_for_is_written_and_the_first_are_dropped(told):
    train(Snapshot("memory.pickle", step=4), num_steps=8)
    assert told == ["on", "off"] * 2 + ["on", "memory.pickle", "off"]


@pytest.mark.parametrize("step", [0, 1])
def test_one_of_the_first_may_be_asked_for(told, step):
    train(Snapshot("memory.pickle", step=step), num_steps=3)
    expected = ["on", "off", "on", "off"]
    expected.insert(2 * step + 1, "memory.pickle")
    assert told == expected


@pytest.mark.parametrize(("fails_in", "dropped"), [(0, 0), (1, 1), (4, 2)])
def test_a_step_that_does_not_fit_is_written(told, fails_in, dropped):
    train(Snapshot("memory.pickle", step=4), num_steps=8, fails_in=fails_in)
    assert told == ["on", "off"] * dropped + ["on", "memory.pickle", "off"]


def test_a_later_failure_leaves_nothing(told):
    train(Snapshot("memory.pickle", step=4), num_steps=8, fails_in=3)
    assert told == ["on", "off"] * 2


# -- in a run ----------------------------------------------------------------------------------


def measured(tmp_path, monkeypatch, *, rank=0):
    """A callback that is asked for a snapshot, and a trainer that goes by a device's name only."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    strategy = SimpleNamespace(root_device=CUDA)
    trainer = SimpleNamespace(
        strategy=strategy, global_rank=rank, is_global_zero=rank == 0, world_size=1,
        accumulate_grad_batches=2, max_steps=9,
    )  # fmt: skip
    callback = Measure(tmp_path, 3, 2, 0, writes_snapshots=True)
    callback.on_train_start(trainer, nn.Linear(2, 2))
    return callback, trainer


def a_step(callback, trainer):
    batch = {"input_ids": torch.ones(1, 4)}
    for micro_batch in range(trainer.accumulate_grad_batches):
        callback.on_train_batch_start(trainer, None, batch, 0)
        callback._is_step = micro_batch == trainer.accumulate_grad_batches - 1
        callback.on_train_batch_end(trainer, None, torch.ones(()), batch, 0)


def test_a_run_records_its_last_warm_up_step_before_anything_is_timed(told, tmp_path, monkeypatch):
    callback, trainer = measured(tmp_path, monkeypatch)
    monkeypatch.setattr(callback, "_begin_stretch", lambda trainer: None)
    for _ in range(3):
        assert callback.measured.step_s == []
        a_step(callback, trainer)
    written = str(tmp_path / "memory_rank0.pickle")
    assert told == ["on", "off"] * 2 + ["on", written, "off"]
    a_step(callback, trainer)
    assert (len(callback.measured.step_s), len(told)) == (1, 7)


def test_a_run_that_a_step_ends_writes_it(told, tmp_path, monkeypatch):
    callback, trainer = measured(tmp_path, monkeypatch)
    callback.on_train_batch_start(trainer, None, {"input_ids": torch.ones(1, 4)}, 0)
    callback.on_exception(trainer, None, MemoryError())
    assert told == ["on", str(tmp_path / "memory_rank0.pickle"), "off"]


def test_other_ranks_record_nothing(told, tmp_path, monkeypatch):
    callback, trainer = measured(tmp_path, monkeypatch, rank=1)
    a_step(callback, trainer)
    callback.on_exception(trainer, None, MemoryError())
    assert told == []
