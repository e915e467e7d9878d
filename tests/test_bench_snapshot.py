"""When a snapshot of CUDA's memory is recorded; the recording itself is torch's."""

from types import SimpleNamespace

import pytest

from lightning_fsdp.bench import snapshot
from lightning_fsdp.bench.snapshot import Snapshot


@pytest.fixture
def told(monkeypatch):
    """What torch was told: on, off, write."""
    told = []
    monkeypatch.setattr(
        snapshot, "record_memory_history", lambda is_on: told.append("on" if is_on else "off")
    )
    monkeypatch.setattr(snapshot, "dump_memory_snapshot", lambda path: told.append(path))
    return told


def train(callback, *, num_steps, fails_in=None, grad_accum=2, rank=0):
    trainer = SimpleNamespace(global_rank=rank, global_step=0)
    for step in range(num_steps):
        for micro_batch in range(grad_accum):
            callback.on_train_batch_start(trainer, None, None, 0)
            if step == fails_in:
                callback.on_exception(trainer, None, MemoryError())
                return
            trainer.global_step += micro_batch == grad_accum - 1
            callback.on_train_batch_end(trainer, None, None, None, 0)


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


def test_a_later_failure_and_other_ranks_leave_nothing(told):
    train(Snapshot("memory.pickle", step=4), num_steps=8, fails_in=3)
    assert told == ["on", "off"] * 2
    train(Snapshot("memory.pickle", step=4), num_steps=8, rank=1)
    assert told == ["on", "off"] * 2
