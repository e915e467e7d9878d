"""A full checkpoint is read slice by slice, and its pages go back."""

import re
from pathlib import Path

import pytest
import torch

from lightning_fsdp.checkpoint import mapped
from lightning_fsdp.checkpoint.damage import DamagedCheckpoint
from lightning_fsdp.strategies.checkpoint_io import FullCheckpointIO
from tests.support.memory import StorageTracker, bytes_of, optimizer_tensors
from tests.support.own_memory import MIB, NOISE, Wide, needs_proc, own_bytes
from tests.support.trainer import (
    SHARDED,
    Regressor,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
    weights_of,
)


class _Loads(Wide):
    """Watches what the loading of a checkpoint adds to the memory of its rank."""

    path = None
    added = None

    def on_train_start(self):
        engine, (optimizer,) = self.trainer.strategy.engine, self.trainer.optimizers
        before = own_bytes()
        file = FullCheckpointIO().load_checkpoint(self.path)
        self.mapped = own_bytes() - before
        (state,) = file["optimizer_states"]
        tracker = StorageTracker()
        self.added = []
        for load in (
            lambda: engine.load_full_state_dict(file["state_dict"]),
            lambda: engine.load_full_optimizer_state_dict(optimizer, state),
        ):
            peaks = []
            before = own_bytes()
            tracker.at_each_operation = lambda p=peaks: p.append(own_bytes())
            with tracker:
                load()
            self.added.append(max(peaks) - before)
        self.held = bytes_of(v for v in optimizer_tensors(optimizer) if v.dim())


def _write(rank, world_size, path):
    trainer = make_trainer("ddp", path.parent)
    trainer.fit(seeded(Wide), make_loader(8))
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
    results = on_trainer_ranks(_load, 2, str(tmp_path), strategy)
    for (model, optimizer), held, held_by_file in results:
        assert held_by_file <= NOISE
        assert model <= NOISE  # written from the file into its place
        assert 0.9 * total <= held <= 1.1 * total  # two states of a half
        assert optimizer <= held + tensor + NOISE


def _resident_bytes():
    """Memory of this process, that of mapped files as well."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", text)[1])


@needs_proc
@pytest.mark.parametrize("changes", [False, True])
def test_pages_of_a_file_go_back_as_they_are_read_and_none_that_was_changed(
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
    assert max(added) <= 20 * MIB + NOISE
    assert _resident_bytes() - before <= NOISE
    assert kept.sum() == MIB
    for n, values in state.items():
        assert values["exp_avg"].sum() == MIB * n + 4 * (changes and n == 3)


def test_where_nothing_tells_of_pages_none_goes_back(monkeypatch):
    def not_there(*args, **kwargs):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "open", not_there)
    tensor = torch.ones(MIB)
    mapped.give_back([tensor])
    assert tensor.sum() == MIB


def _resume_mapped(rank, world_size, folder, path, strategy):
    files = []

    class Looks(Wide):
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


@pytest.mark.parametrize("kept", [0, 5, 0.5, 0.99])
def test_a_file_that_was_cut_off_is_named(tmp_path, kept):
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": {"weight": torch.arange(999.0)}}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    with pytest.raises(DamagedCheckpoint, match=r"last\.ckpt: expected a file that torch\.load"):
        FullCheckpointIO().load_checkpoint(path, weights_only=True)
    path.write_text("hello")
    with pytest.raises(DamagedCheckpoint, match="Load another checkpoint"):
        FullCheckpointIO().load_checkpoint(path, weights_only=True)
