"""Saving in the background: the values of the call, whatever happens to the state afterwards."""

import contextlib
import errno
import os
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lightning_fsdp import async_save_sharded, checkpoint, load_sharded
from lightning_fsdp.checkpoint.background import Saving
from tests.support.checkpoints import (
    FORMS,
    FlatSlice,
    assert_is,
    disk_stops,
    make_state,
    whole_state,
)
from tests.support.engine_runs import ENGINES, Run, assert_equal, copied
from tests.support.processes import run_snippet
from tests.support.ranks import errors_on_ranks, run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")


def _overwrite(state):
    for value in state.values():
        local = value.local if isinstance(value, FlatSlice) else value
        (local.to_local() if isinstance(local, DTensor) else local).fill_(0)


def _save_while_training(rank, world_size, folder, form):
    state = make_state(form, 1)
    with disk_stops() if rank == world_size - 1 else contextlib.nullcontext():
        saving = checkpoint.async_save(folder / "background", state, {"seed": 1})
        time.sleep(0.2)  # the others come to wait for the last one, in their background
        for _ in range(3):  # collectives of training are not mixed up with those of the save
            _overwrite(state)
            ones = torch.ones(2)
            dist.all_reduce(ones)
            assert ones.tolist() == [world_size] * 2
        assert not saving.is_done
        assert not checkpoint.is_checkpoint(folder / "background")
        dist.barrier()
    saving.wait()
    saving.wait()
    assert saving.is_done
    checkpoint.save(folder / "at once", make_state(form, 1), {"seed": 1})
    state = make_state(form, 5)
    checkpoint.load(folder / "background", state)
    assert_is(state, 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_files_are_those_of_a_save_at_that_step(tmp_path, world_size, form):
    run_on_ranks(_save_while_training, world_size, tmp_path, form)
    files = {}
    for name in ("background", "at once"):
        folder = tmp_path / name / "current"
        files[name] = {each.name: each.read_bytes() for each in folder.iterdir()}
    assert files["background"] == files["at once"]
    assert len(files["at once"]) == world_size + 3


def _save_twice(rank, world_size, folder, second):
    plain, is_late = os.fsync, threading.Event()

    def fsync(descriptor):
        assert is_late.wait(20)
        plain(descriptor)

    with mock.patch.object(os, "fsync", fsync):
        first = checkpoint.async_save(folder / "a", make_state("dtensor", 1), {})
        timer = threading.Timer(0.3, is_late.set)  # by then this rank is in the second call
        timer.start()
        path = folder / ("a" if second == "same" else "b")
        checkpoint.async_save(path, make_state("dtensor", 2), {})
        assert first.is_done, "the second save began while the first was under way"
        checkpoint.wait_for_saving()
        timer.join()


@pytest.mark.parametrize("second", ["same", "other"])
def test_a_second_save_waits_for_the_first(tmp_path, second):
    run_on_ranks(_save_twice, 2, tmp_path, second)
    holds = {"a": 2} if second == "same" else {"a": 1, "b": 2}
    for name, seed in holds.items():
        state = whole_state(5)
        checkpoint.load(tmp_path / name, state)
        assert_is(state, seed)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(holds)


def _read_meanwhile(rank, world_size, folder):
    checkpoint.save(folder / "a", make_state("dtensor", 1), {})
    opened = checkpoint.OpenCheckpoint(folder / "a")
    state = make_state("dtensor", 5)
    with contextlib.ExitStack() as stack:
        if rank == 1:
            stop = stack.enter_context(contextlib.ExitStack())
            stop.enter_context(disk_stops())
        saving = checkpoint.async_save(folder / "b", make_state("dtensor", 2), {})
        time.sleep(0.2)  # rank 0 has come to the exchange where it waits for rank 1
        if rank == 1:
            timer = threading.Timer(0.3, stop.close)  # by then both ranks read
            timer.start()
        opened.read(state)
        assert saving.is_done
    assert_is(state, 1)
    saving.wait()


def test_reading_an_open_checkpoint_is_not_mixed_up_with_a_save(tmp_path):
    run_on_ranks(_read_meanwhile, 2, tmp_path)


_plain_fsync = os.fsync


def _fail(rank, world_size, path, then):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoint.save(path, make_state("dtensor", 1), {})
    state = make_state("dtensor", 2)
    if rank == 1:
        os.fsync = full
    saving = checkpoint.async_save(path, state, {})
    saving.join()
    os.fsync = _plain_fsync
    if then == "waited on one rank" and rank == 0:
        with pytest.raises(OSError, match="__1_0"):
            saving.wait()
    try:
        if then == "wait":
            saving.wait()
        else:
            checkpoint.save(path, state, {})
    finally:
        restored = make_state("dtensor", 5)
        checkpoint.load(path, restored)
        assert_is(restored, 1)
        checkpoint.save(path, state, {})  # the error was told once
        checkpoint.load(path, restored)
        assert_is(restored, 2)


@pytest.mark.parametrize("then", ["wait", "save", "waited on one rank"])
def test_an_error_in_the_background_comes_up_on_every_rank(tmp_path, then):
    for error in errors_on_ranks(_fail, 2, tmp_path / "a", then):
        assert error is not None
        assert error.type_name == "OSError"
        assert "(rank 1 of 2): [Errno 28] could not write '__1_0.distcp'" in error.message
        assert ("the save before this one failed" in error.message) == (then != "wait")


def _train_meanwhile(rank, world_size, kind, path):
    run = Run(kind, seed=1)
    run.train(range(2))
    expected = copied(run.whole())
    with disk_stops():
        saving = async_save_sharded(path, run.wrapped, run.optimizers, {"step": 2})
        run.train([2])
        assert not saving.is_done
    with pytest.raises(AssertionError):
        assert_equal(run.whole(), expected, kind)
    expected["model"]["mark"].fill_(10)  # buffers are those of rank 0
    fresh = Run("scratch", seed=3)
    assert load_sharded(path, fresh.wrapped, fresh.optimizers) == {"step": 2}  # waits for it
    assert saving.is_done
    assert_equal(fresh.whole(), expected, kind)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_run_goes_on_while_its_state_is_saved(tmp_path, kind):
    run_on_ranks(_train_meanwhile, 2, kind, tmp_path / "a")


def _destroy_meanwhile(rank, world_size, path):
    checkpoint.save(path, make_state("dtensor", 1), {})
    with disk_stops():
        saving = checkpoint.async_save(path, make_state("dtensor", 2), {})
        dist.destroy_process_group()
    saving.wait()


def test_destroying_the_process_group_does_not_disturb_a_save(tmp_path):
    run_on_ranks(_destroy_meanwhile, 2, tmp_path / "a")
    state = whole_state(5)
    checkpoint.load(tmp_path / "a", state)
    assert_is(state, 2)


def test_a_save_whose_start_is_interrupted_is_waited_for(tmp_path, monkeypatch):
    start = threading.Thread.start

    def start_and_be_interrupted(thread):
        start(thread)
        if thread.name == "lightning_fsdp save":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start_and_be_interrupted)
    with disk_stops(), pytest.raises(KeyboardInterrupt):
        checkpoint.async_save(tmp_path / "a", whole_state(1), {})
    checkpoint.save(tmp_path / "b", whole_state(2), {})
    for name, seed in (("a", 1), ("b", 2)):
        state = whole_state(5)
        checkpoint.load(tmp_path / name, state)
        assert_is(state, seed)


def test_a_save_that_an_interrupt_has_kept_from_beginning_is_not_waited_for(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Saving, "begin", _be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.async_save(tmp_path / "a", whole_state(1), {})
    checkpoint.save(tmp_path / "a", whole_state(2), {})
    checkpoint.load(tmp_path / "a", state := whole_state(5))
    assert_is(state, 2)


def _be_interrupted(saving):
    raise KeyboardInterrupt


def test_the_process_waits_for_its_save(tmp_path):
    ended = run_snippet(
        f"""
        import os, time, torch
        from lightning_fsdp import checkpoint

        plain = os.fsync
        def fsync(descriptor):
            time.sleep(0.2)
            plain(descriptor)

        os.fsync = fsync
        checkpoint.async_save({str(tmp_path / "a")!r}, {{"t": torch.arange(2.0**21)}}, {{}})
        """
    )  # 8 MB, which another thread writes
    assert ended.returncode == 0, ended.stderr
    state = {"t": torch.zeros(2**21)}
    checkpoint.load(tmp_path / "a", state)
    assert torch.equal(state["t"], torch.arange(2.0**21))
