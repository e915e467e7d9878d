"""Full checkpoints: how much of them anybody holds at a time, when written and when read."""

import errno
import io
import os
import re
import resource
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_fsdp.checkpoint import files, mapped
from lightning_fsdp.strategies.checkpoint_io import FullCheckpointIO
from tests.support.memory import StorageTracker, bytes_of, optimizer_tensors
from tests.support.ranks import errors_on_ranks, run_on_ranks
from tests.support.trainer import (
    SHARDED,
    Block,
    Regressor,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
    weights_of,
)

MIB = 2**20
NOISE = 6 * MIB  # what a process takes for itself beside tensors of 8 MiB
needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells")


def _own_bytes():
    """Memory of this process that no file stands behind."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", text)[1])


class _Wide(Regressor):
    """Eight blocks of 8 MiB in fp32 each; Adam."""

    def __init__(self, num_blocks=8, width=1024):
        super().__init__(width=8)
        self.blocks = nn.ModuleList(
            nn.Linear(width, 2 * width, bias=False) for _ in range(num_blocks)
        )
        self.widths = (width, 2 * width)

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = x + block(x.repeat(1, self.widths[0] // 8))[:, :8]
        return self.head(x)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.001)


# -- written ---------------------------------------------------------------------------------------


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
        assert file.tell() == 500
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

            def look(peaks=peaks, tracker=tracker):
                if tracker.live_bytes() > max(peaks):  # gloo's threads let go a little later
                    peaks.append(tracker.settled_bytes())

            tracker.at_each_operation = look
            with tracker:
                result = gather()
            values = list(result.get("state", {}).values()) or [result]
            kept = [v for each in values for v in each.values() if isinstance(v, torch.Tensor)]
            kept = bytes_of(v for v in kept if not v.is_meta)
            self.watched[what] = (max(peaks) - at_rest, kept)


def _gather(rank, world_size, folder, strategy):
    model = seeded(_Gathers)
    model.path = Path(folder) / "file"
    make_trainer(strategy, Path(folder), limit_train_batches=1).fit(model, make_loader())
    return model.watched


@pytest.mark.parametrize("strategy", SHARDED)
def test_the_writer_holds_the_state_and_one_unit_and_others_less_than_two(tmp_path, strategy):
    first, second = on_trainer_ranks(_gather, 2, str(tmp_path), strategy)
    plain = _Gathers()
    total = bytes_of(plain.parameters())
    unit = bytes_of(Block(64).parameters())
    for what, whole in (("model", total), ("optimizer", 2 * total)):
        peak, kept = first[what]
        assert whole <= kept <= 1.01 * whole, what
        assert peak <= kept + unit, what
        peak, kept = second[what]
        assert kept <= 4096, what  # counts of steps
        assert peak < 2 * unit, what
    largest = max(bytes_of([parameter]) for parameter in plain.parameters())
    for peak, kept in (first["file"], second["file"]):
        assert kept == 0
        # The one that is written, the next one, and what torch's engines gather it from.
        assert peak <= 3 * largest + 4096
    assert first["file"][0] >= largest
    if strategy.startswith("scratch"):
        assert second["file"][0] < largest  # it sends what it owns
    assert (tmp_path / "file").stat().st_size >= 3 * total


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


class _Saves(_Wide):
    """Watches what a save leaves in the memory of its rank."""

    path = None

    def on_train_end(self):
        before = _own_bytes()
        self.trainer.save_checkpoint(self.path)
        self.kept = _own_bytes() - before


def _save(rank, world_size, path):
    model = seeded(_Saves)
    model.path = path
    make_trainer("scratch_fsdp_zero3", path.parent, limit_train_batches=1).fit(model, make_loader())
    return model.kept


@needs_proc
def test_a_save_leaves_nothing_in_memory(tmp_path):
    for kept in on_trainer_ranks(_save, 2, tmp_path / "file"):
        assert kept <= NOISE


# -- read ------------------------------------------------------------------------------------------


class _Loads(_Wide):
    """Watches what the loading of a checkpoint adds to the memory of its rank."""

    path = None
    added = None

    def on_train_start(self):
        engine, (optimizer,) = self.trainer.strategy.engine, self.trainer.optimizers
        before = _own_bytes()
        file = FullCheckpointIO().load_checkpoint(self.path)
        self.mapped = _own_bytes() - before
        (state,) = file["optimizer_states"]
        tracker = StorageTracker()
        self.added = []
        for load in (
            lambda: engine.load_full_state_dict(file["state_dict"]),
            lambda: engine.load_full_optimizer_state_dict(optimizer, state),
        ):
            peaks = []
            before = _own_bytes()
            tracker.at_each_operation = lambda p=peaks: p.append(_own_bytes())
            with tracker:
                load()
            self.added.append(max(peaks) - before)
        self.held = bytes_of(v for v in optimizer_tensors(optimizer) if v.dim())


def _write(rank, world_size, path):
    trainer = make_trainer("ddp", path.parent)
    trainer.fit(seeded(_Wide), make_loader(8))
    trainer.save_checkpoint(path)


def _load(rank, world_size, folder, strategy):
    path = Path(folder) / "full.ckpt"
    _write(rank, world_size, path)  # here: memory that a first run takes is not the loading's
    loaded = seeded(_Loads, seed=1)
    loaded.path = path
    make_trainer(strategy, Path(folder), limit_train_batches=1).fit(loaded, make_loader(8))
    return loaded.added, loaded.held, loaded.mapped


@needs_proc
@pytest.mark.parametrize("strategy", SHARDED[::2])
def test_a_reader_holds_its_slices_and_one_tensor(tmp_path, strategy):
    total, tensor = 64 * MIB, 8 * MIB
    # Two were seen once under FSDP1, on a busy machine, for a reason that is not known.
    of_model = 2 * tensor if strategy == "fsdp1_zero3" else tensor
    results = on_trainer_ranks(_load, 2, str(tmp_path), strategy)
    for (model, optimizer), held, held_by_file in results:
        assert held_by_file <= NOISE
        assert model <= of_model + NOISE
        assert 0.9 * total <= held <= 1.1 * total  # two states of a half
        assert optimizer <= held + tensor + NOISE


def _resident_bytes():
    """Memory of this process, that of mapped files as well."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", text)[1])


@needs_proc
@pytest.mark.parametrize("changes", [False, True])
def test_pages_of_a_file_go_back_as_they_are_read_unless_they_were_changed(
    tmp_path, monkeypatch, changes
):
    monkeypatch.setattr(mapped, "STEP_BYTES", 16 * MIB)
    state = {n: {"exp_avg": torch.full((MIB,), float(n)), "step": n} for n in range(16)}  # 64 MiB
    torch.save({"state_dict": {}, "optimizer_states": [{"state": state}]}, tmp_path / "a.ckpt")
    file = FullCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")
    state = file["optimizer_states"][0]["state"]
    kept = torch.ones(MIB)
    if changes:
        state[3]["exp_avg"][5] = 7.0
    before = _resident_bytes()
    added = []
    for n, values in mapped.ReadOnce({**state, "own": {"exp_avg": kept}}).items():
        assert values["exp_avg"].sum() == (MIB * n if n != "own" else MIB) + 4 * (
            changes and n == 3
        )
        added.append(_resident_bytes() - before)
    if changes:
        assert max(added) >= 60 * MIB
    else:
        assert max(added) <= 20 * MIB + NOISE
        assert _resident_bytes() - before <= NOISE
    assert kept.sum() == MIB
    for n, values in state.items():
        assert values["exp_avg"].sum() == MIB * n + 4 * (changes and n == 3)


def _resume_mapped(rank, world_size, folder, path, strategy):
    files = []

    class Looks(_Wide):
        def on_train_start(self):
            text = Path("/proc/self/smaps").read_text()
            sizes = re.findall(r" \S+full\.ckpt\nSize.*\n.*\n.*\nRss: +(\d+) kB", text)
            files.append([1024 * int(size) for size in sizes])

    trainer = make_trainer(strategy, Path(folder), max_epochs=2)
    trainer.fit(seeded(Looks, seed=1), make_loader(8), ckpt_path=path)
    return files


@pytest.fixture(scope="module")
def of_ddp(tmp_path_factory):
    """A file of ``_Wide``."""
    path = tmp_path_factory.mktemp("ddp") / "full.ckpt"
    on_trainer_ranks(_write, 2, path)
    return path


@needs_proc
@pytest.mark.parametrize("strategy", SHARDED[::2])
def test_a_resumed_run_keeps_no_pages_of_the_file(tmp_path, of_ddp, strategy):
    for (sizes,) in on_trainer_ranks(_resume_mapped, 2, str(tmp_path), of_ddp, strategy):
        # The Trainer holds it until the end, if an optimizer refers to counts in it.
        assert sizes or strategy.startswith("scratch")
        assert sum(sizes) <= 2 * MIB


class _Meta(Regressor):
    """Has no memory before it is sharded."""

    def __init__(self):
        super().__init__()
        self.inlet = self.blocks = self.head = None

    def configure_model(self):
        if self.head is None:
            with torch.device("meta"):
                built = Regressor()
            self.inlet, self.blocks, self.head = built.inlet, built.blocks, built.head


def _resume(rank, world_size, folder):
    path = Path(folder) / "full.ckpt"
    expected = seeded(Regressor)
    trainer = make_trainer("ddp", Path(folder))
    trainer.fit(expected, make_loader())
    trainer.save_checkpoint(path)
    for strategy in SHARDED:
        model = seeded(_Meta, seed=7)
        trainer = make_trainer(strategy, Path(folder))
        trainer.validate(model, make_loader(), ckpt_path=path, verbose=False, weights_only=False)
        torch.testing.assert_close(weights_of(model), weights_of(expected), atol=0, rtol=0)


def test_a_model_without_memory_is_loaded_once_it_is_sharded(tmp_path):
    on_trainer_ranks(_resume, 2, str(tmp_path))
