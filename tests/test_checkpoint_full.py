"""A full checkpoint is written on its way, without a copy in memory, whole or not at all."""

import errno
import io
import os
import re
import resource
import threading
from pathlib import Path

import pytest
import torch

from lightning_fsdp.checkpoint import files
from lightning_fsdp.strategies.checkpoint_io import FullCheckpointIO
from tests.support.cases import each_on_trainer_ranks
from tests.support.memory import StorageTracker, bytes_of, optimizer_tensors
from tests.support.own_memory import MIB, NOISE, Wide, needs_proc, own_bytes
from tests.support.ranks import errors_on_ranks, run_on_ranks
from tests.support.trainer import (
    SHARDED,
    Block,
    Regressor,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no such advice")
def test_a_file_is_on_its_way_to_the_disk_while_it_is_written(tmp_path, monkeypatch):
    sent = []

    def note(descriptor, begin, num_bytes, advice):
        sent.append((begin, num_bytes, os.fstat(descriptor).st_size))

    monkeypatch.setattr(files, "_BLOCK_BYTES", 100)
    monkeypatch.setattr(os, "posix_fadvise", note)
    data = bytes(range(250)) * 2
    with files.DiskFile(tmp_path / "file", "wb") as file:
        for begin in range(0, 480, 60):
            file.write(data[begin : begin + 60])
        file.write(data[480:])
        file.write(b"")
        assert sent[:4] == [(n, 100, n + 100) for n in range(0, 400, 100)]
    assert (tmp_path / "file").read_bytes() == data


def test_what_cannot_be_written_raises_once_and_leaves_no_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_BLOCK_BYTES", 100)
    before = threading.active_count()
    file = files.DiskFile(tmp_path / "file", "wb")
    monkeypatch.setattr(files.DiskFile, "_write_out", _no_space)
    file.write(bytes(100))
    with pytest.raises(OSError, match="No space"):
        file.write(bytes(100))
    with pytest.raises(OSError, match="No space"):
        file.close()
    file.close()
    assert threading.active_count() == before


def _no_space(file, block):
    raise OSError(errno.ENOSPC, "No space left on device")


class _Interrupting:
    """While it is written, another run saves to the same path."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        files.write_for_torch(self.path, {"x": torch.full((3,), 2.0)})
        assert torch.load(self.path)["x"].tolist() == [2.0] * 3
        return torch.Size, ([7],)


def test_two_runs_may_save_to_one_path_and_the_last_one_wins(tmp_path):
    path, killed = tmp_path / "last[1].ckpt", tmp_path / ".last[1].ckpt.0123abcd.partial"
    killed.write_bytes(b"half")
    files.write_for_torch(path, {"other": _Interrupting(path), "x": torch.ones(4)})
    assert torch.load(path)["x"].tolist() == [1.0] * 4
    assert [each.name for each in tmp_path.iterdir()] == [path.name]  # nor what was left


class _Gathers(Regressor):
    """Watches what the gathering of a checkpoint adds to the memory of its rank."""

    path = None

    def __init__(self):
        super().__init__(width=64, num_blocks=3)
        self.watched = {}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.001)

    def on_train_end(self):
        strategy, optimizer = self.trainer.strategy, self.trainer.optimizers[0]
        for what, gather in (
            ("model", strategy.lightning_module_state_dict),
            ("optimizer", lambda: strategy.optimizer_state(optimizer)),
            ("file", lambda: self.trainer.save_checkpoint(self.path) or {}),
        ):
            peaks = [0]
            tracker = StorageTracker(self)
            tracker.track(optimizer_tensors(optimizer))
            at_rest = tracker.settled_bytes()
            judged = _sizes()[1] if what == "file" else _most_added(self.global_rank)[what]

            def look(peaks=peaks, tracker=tracker, judged=at_rest + judged):
                live = tracker.live_bytes()
                if live >= judged and live > peaks[0]:  # gloo's threads let go a little later
                    live = tracker.settled_bytes()
                peaks.append(max(live, peaks.pop()))

            tracker.at_each_operation = look
            with tracker:
                result = gather()
            values = list(result.get("state", {}).values()) or [result]
            kept = [v for each in values for v in each.values() if isinstance(v, torch.Tensor)]
            kept = bytes_of(v for v in kept if not v.is_meta)
            self.watched[what] = (max(peaks) - at_rest, kept)


def _most_added(rank):
    """Bytes beside what rests: the state and one unit on the rank that gets it, less than two on
    others; of a file the tensor that is written, the next one, and what torch's engines gather it
    from.
    """
    total, largest, unit = _sizes()
    of_model, of_optimizer = (total + unit, 2 * total + unit) if rank == 0 else (2 * unit, 2 * unit)
    return {"model": of_model, "optimizer": of_optimizer, "file": 3 * largest + 4096}


def _sizes():
    """Bytes of the model, its largest tensor, and a block."""
    parameters = list(_Gathers().parameters())
    largest = max(bytes_of([parameter]) for parameter in parameters)
    return bytes_of(parameters), largest, bytes_of(Block(64).parameters())


def _gather(rank, world_size, strategy, folder):
    model = seeded(_Gathers)
    model.path = folder / strategy
    make_trainer(strategy, folder, limit_train_batches=1).fit(model, make_loader())
    return model.watched


def test_the_writer_holds_the_state_and_one_unit_and_others_less_than_two(tmp_path):
    total, largest, unit = _sizes()
    # Torch's engines are asked in one way for either stage.
    strategies = (*SHARDED[:2], "fsdp1_zero3", "fsdp2_zero2")
    by_strategy = each_on_trainer_ranks(_gather, 2, strategies, tmp_path)
    for strategy, (first, second) in by_strategy.items():
        for what, whole in (("model", total), ("optimizer", 2 * total)):
            peak, kept = first[what]
            assert whole <= kept <= 1.01 * whole, (strategy, what)
            assert peak <= kept + unit, (strategy, what)
            peak, kept = second[what]
            assert kept <= 4096, (strategy, what)  # counts of steps
            assert peak < _most_added(1)[what], (strategy, what)
        for peak, kept in (first["file"], second["file"]):
            assert kept == 0, strategy
            assert peak <= _most_added(0)["file"], strategy
        assert first["file"][0] >= largest, strategy
        if strategy.startswith("scratch"):
            assert second["file"][0] < largest, strategy  # it sends what it owns
        assert (tmp_path / strategy).stat().st_size >= 3 * total, strategy


def _added_by_writing(rank, world_size, path):
    state = {str(n): torch.ones(MIB) for n in range(32)}  # 128 MiB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    FullCheckpointIO().save_checkpoint({"state_dict": state}, path)
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


@needs_proc
def test_a_file_is_written_without_a_copy_in_memory(tmp_path):
    (added,) = run_on_ranks(_added_by_writing, 1, tmp_path / "a.ckpt", backend=None)
    assert added <= 16 * MIB
    assert (tmp_path / "a.ckpt").stat().st_size >= 128 * MIB


def _full_disk(rank, world_size, folder):
    path = Path(folder) / "kept.ckpt"
    trainer = make_trainer(SHARDED[0], Path(folder))
    trainer.fit(seeded(Regressor), make_loader())
    trainer.save_checkpoint(path)
    before = path.read_bytes()

    save = torch.save

    def fail(what, stream, *args, **kwargs):
        if isinstance(stream, io.BytesIO):  # a message between ranks
            return save(what, stream, *args, **kwargs)
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    torch.save = fail
    try:
        trainer.save_checkpoint(path)
    finally:
        assert path.read_bytes() == before
        assert rank or [p.name for p in path.parent.iterdir()] == ["kept.ckpt"]


def _with_trainer(rank, world_size, fn, *args):
    from tests.support.trainer import as_torchrun

    as_torchrun(rank, world_size)
    return fn(rank, world_size, *args)


def test_a_full_disk_is_an_error_on_every_rank_and_the_last_file_stays(tmp_path):
    for error in errors_on_ranks(_with_trainer, 2, _full_disk, str(tmp_path)):
        assert error is not None
        assert re.search(r"kept\.ckpt.*rank 0 of 2.*No space left", error.message), error


class _Saves(Wide):
    """Watches what a save leaves in the memory of its rank."""

    path = None

    def on_train_end(self):
        before = own_bytes()
        self.trainer.save_checkpoint(self.path)
        self.kept = own_bytes() - before


def _save(rank, world_size, path):
    model = seeded(_Saves)
    model.path = path
    make_trainer("scratch_fsdp_zero3", path.parent, limit_train_batches=1).fit(model, make_loader())
    return model.kept


@needs_proc
def test_a_save_leaves_nothing_in_memory(tmp_path):
    for kept in on_trainer_ranks(_save, 2, tmp_path / "file"):
        assert kept <= NOISE
