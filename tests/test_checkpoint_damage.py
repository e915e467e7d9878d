"""Checkpoints that are not what was saved, and saves that cannot be: named, on every rank, with the
last good checkpoint as it was.
"""

import enum
import errno
import io
import os
import pickle
import resource
import shutil
import signal
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from lightning_fsdp import checkpoint
from lightning_fsdp.checkpoint import place, ranks
from tests.support.checkpoints import assert_is, make_state, sign_again, whole_state
from tests.support.ranks import errors_on_ranks, run_on_ranks


def _save(rank, world_size, path, seed):
    checkpoint.save(path, make_state("dtensor", seed), {"seed": seed})


def _load(rank, world_size, path):
    state = make_state("dtensor", 5)
    try:
        checkpoint.load(path, state)
    finally:
        assert_is(state, 5)  # nothing was filled


@pytest.fixture
def saved(tmp_path):
    """A checkpoint that two ranks wrote, and the folder with its files."""
    path = tmp_path / "a.ckpt"
    run_on_ranks(_save, 2, path, 1)
    return path, path / "version-1"


def _assert_on_every_rank(errors, type_name, *words):
    for error in errors:
        assert error is not None
        assert error.type_name == type_name
        for word in words:
            assert word in error.message


FILES = ["__0_0.distcp", "__1_0.distcp", ".metadata", "extra.pt", "complete.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "longer"])
def test_a_damaged_file_is_named_on_every_rank(saved, name, damage):
    path, folder = saved
    file = folder / name
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    if damage == "flipped":
        data[middle] ^= 0x40
    changed = {"truncated": data[:middle], "flipped": data, "longer": data + b"x"}
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(changed[damage])
    found = name
    if name == "complete.json" and damage == "flipped":  # may say something else of another file
        found = ""
    words = [str(folder), found]
    if damage in ("truncated", "longer") and name != "complete.json":
        words.append("bytes, got")
    _assert_on_every_rank(errors_on_ranks(_load, 2, path), "DamagedCheckpoint", *words)
    if name in ("extra.pt", "complete.json"):
        with pytest.raises(checkpoint.DamagedCheckpoint):
            checkpoint.read_extra(path)
    if name in (".metadata", "complete.json"):
        with pytest.raises(checkpoint.DamagedCheckpoint):
            checkpoint.read_shapes(path)


def test_every_byte_of_the_marker_counts(tmp_path):
    """However one byte of it changes, what it says is refused or still true."""
    path = tmp_path / "a"
    checkpoint.save(path, {"t": torch.arange(3.0)}, {})
    marker = path / "version-1" / "complete.json"
    good = marker.read_bytes()
    for position in range(len(good)):
        marker.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        state = {"t": torch.zeros(3)}
        try:
            checkpoint.load(path, state)
        except checkpoint.DamagedCheckpoint:
            continue
        assert torch.equal(state["t"], torch.arange(3.0))


@pytest.mark.parametrize("what", ["nothing", "file", "folder", "no link", "dangling", "other link"])
def test_what_is_no_checkpoint_is_refused(tmp_path, what):
    path = tmp_path / "a"
    kind, words = checkpoint.DamagedCheckpoint, "without a link 'current'"
    if what == "nothing":
        kind, words = FileNotFoundError, "got nothing there"
    elif what == "file":
        path.write_text("x")
        kind, words = NotADirectoryError, "got a file"
    elif what == "folder":
        path.mkdir()
    else:
        checkpoint.save(path, whole_state(1), {})
        (path / "current").unlink()
        if what == "dangling":
            (path / "current").symlink_to("version-9")
        if what == "other link":
            (path / "current").symlink_to(tmp_path)
            words = "without 'complete.json'"
    assert not checkpoint.is_checkpoint(path)
    for attempt in (
        lambda: checkpoint.load(path, whole_state(1)),
        lambda: checkpoint.read_extra(path),
        lambda: checkpoint.read_shapes(path),
    ):
        with pytest.raises(kind, match=words):
            attempt()


def test_a_checkpoint_of_another_format_is_refused(tmp_path):
    checkpoint.save(tmp_path / "a", whole_state(1), {})
    marker = tmp_path / "a" / "version-1" / "complete.json"
    marker.write_text(marker.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(checkpoint.DamagedCheckpoint, match=r"expected format 1 .* got format 2"):
        checkpoint.load(tmp_path / "a", whole_state(2))


# ------------------------------------------------------------------------------ code in checkpoints


class _Touch:
    """Unpickling it without care makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def _assert_it_works(evil, touched):
    pickle.loads(evil)
    assert Path(touched).is_dir(), "the planted pickle does nothing even where it is read"
    Path(touched).rmdir()


def _plant_in_bytes_entry(folder, evil):
    """As torch would save a value that is no tensor; torch's planner unpickles it when loading."""
    file = folder / "__0_0.distcp"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    info = next(iter(metadata.storage_data.values()))
    size = file.stat().st_size
    with file.open("ab") as stream:
        stream.write(evil)
    metadata.state_dict_metadata["model.inlet.bias"] = BytesStorageMetadata()
    entry = type(info)("__0_0.distcp", size, len(evil))
    metadata.storage_data[MetadataIndex("model.inlet.bias")] = entry
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _plant_in_tensor(folder, evil):
    """In the place of the pickle of one stored tensor."""
    file = folder / "__0_0.distcp"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index, info = next(iter(metadata.storage_data.items()))
    size = file.stat().st_size
    original = folder / "one.zip"
    original.write_bytes(file.read_bytes()[info.offset : info.offset + info.length])
    with zipfile.ZipFile(original) as old, zipfile.ZipFile(folder / "two.zip", "w") as new:
        for record in old.infolist():
            is_pickle = record.filename.endswith("data.pkl")
            new.writestr(record.filename, evil if is_pickle else old.read(record))
    with file.open("ab") as stream:
        stream.write((folder / "two.zip").read_bytes())
    metadata.storage_data[index] = type(info)("__0_0.distcp", size, file.stat().st_size - size)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


class _Python3112(pickle.Pickler):
    """Pickles members of an Enum as Python 3.11.2 does: getattr, the class, the name."""

    def reducer_override(self, value):
        if isinstance(value, enum.Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


def _as_python_3112_pickles(value):
    buffer = io.BytesIO()
    _Python3112(buffer).dump(value)
    return buffer.getvalue()


def test_metadata_of_any_python_is_read(saved):
    path, folder = saved
    pickled = _as_python_3112_pickles(pickle.loads((folder / ".metadata").read_bytes()))
    assert b"getattr" in pickled
    (folder / ".metadata").write_bytes(pickled)
    sign_again(folder)
    state = whole_state(5)
    checkpoint.load(path, state)
    assert_is(state, 1)


class _Getattr:
    def __reduce__(self):
        return getattr, (torch.Size, "count")


def test_getattr_gives_nothing_but_members_of_an_enum(saved):
    path, folder = saved
    (folder / ".metadata").write_bytes(pickle.dumps(_Getattr()))
    sign_again(folder)
    with pytest.raises(checkpoint.DamagedCheckpoint, match=r"asks for 'count' of .*could run code"):
        checkpoint.load(path, whole_state(5))


def test_a_planted_pickle_does_not_run(saved, tmp_path):
    path, folder = saved
    touched = str(tmp_path / "touched")
    evil = pickle.dumps(_Touch(touched))
    _assert_it_works(evil, touched)
    good = tmp_path / "good"
    shutil.copytree(folder, good)

    def plant(change):
        shutil.rmtree(folder)
        shutil.copytree(good, folder)
        change()
        sign_again(folder)

    def assert_refused(*words):
        _assert_on_every_rank(errors_on_ranks(_load, 2, path), "DamagedCheckpoint", *words)

    plant(lambda: (folder / ".metadata").write_bytes(evil))
    assert_refused(".metadata", "mkdir", "could run code")
    with pytest.raises(checkpoint.DamagedCheckpoint, match="could run code"):
        checkpoint.read_shapes(path)

    plant(lambda: _plant_in_bytes_entry(folder, evil))
    assert_refused("'model.inlet.bias'", "BytesStorageMetadata", "not read")

    plant(lambda: (folder / "extra.pt").write_bytes(evil))
    with pytest.raises(checkpoint.DamagedCheckpoint, match=r"extra\.pt: expected plain data"):
        checkpoint.read_extra(path)

    plant(lambda: torch.save({"x": _Touch(touched)}, folder / "extra.pt"))
    with pytest.raises(checkpoint.DamagedCheckpoint, match="mkdir"):
        checkpoint.read_extra(path)

    plant(lambda: _plant_in_tensor(folder, evil))
    state = whole_state(5)
    checkpoint.load(path, state)  # its elements are there; its pickle is not looked at
    assert_is(state, 1)
    assert not Path(touched).exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: {"no": "metadata"}, "expected Metadata, got dict"),
        (lambda m: m.state_dict_metadata["t"].chunks.clear() or m, "expected all of 't'"),
        (lambda m: m.storage_data.clear() or m, "got something else"),
        (lambda m: _lead_outside(m), "in a file of this checkpoint"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(tmp_path, change, words):
    checkpoint.save(tmp_path / "a", {"t": torch.zeros(3)}, {})
    folder = tmp_path / "a" / "version-1"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(change(metadata)))
    sign_again(folder)
    with pytest.raises(checkpoint.DamagedCheckpoint, match=rf"\.metadata: .*{words}"):
        checkpoint.load(tmp_path / "a", {"t": torch.zeros(3)})


def _lead_outside(metadata):
    for info in metadata.storage_data.values():
        info.relative_path = "../../../secret"
    return metadata


# ---------------------------------------------------------------------------- saves that cannot be


def _limit_file_size():
    """Writes beyond 2000 bytes fail as on a full disk; the process is not killed for it."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))


def _save_on_full_disk(rank, world_size, path, bad, where):
    state = make_state("dtensor", 2)
    if rank == bad and where == "slices":
        _limit_file_size()
    if rank == bad and where == "sync":
        os.fsync = _no_space
    extra = {"blob": torch.zeros(4000)} if where == "extra" else {}
    if where == "extra" and rank == 0:
        state = {"t": torch.zeros(1)}
        _limit_file_size()
    elif where == "extra":
        state = {"t": torch.zeros(1)}
    checkpoint.save(path, state, extra)


def _no_space(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("bad", "where", "name"),
    [
        (0, "slices", "'__0_0.distcp'"),
        (1, "slices", "'__1_0.distcp'"),
        (1, "sync", "'__1_0.distcp': No space left on device"),
        (0, "extra", "'extra.pt': File too large"),
    ],
)
def test_a_full_disk_is_an_error_on_every_rank(saved, bad, where, name):
    path, _ = saved
    errors = errors_on_ranks(_save_on_full_disk, 2, path, bad, where)
    _assert_on_every_rank(errors, "OSError", f"(rank {bad} of 2)", f"could not write {name}")
    _assert_as_saved_before(path)


def _assert_as_saved_before(path, seed=1):
    assert [each.name for each in path.parent.iterdir()] == [path.name], "nothing left behind"
    state = whole_state(5)
    checkpoint.load(path, state)
    assert_is(state, seed)


def _save_read_only(rank, world_size, path):
    if rank == 0:  # the tests may run as root, who may write anywhere

        def mkdir(folder, *args, **kwargs):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(folder))

        os.mkdir = mkdir
    _save(rank, world_size, path, 2)


def test_a_read_only_folder_is_an_error_on_every_rank(saved):
    path, _ = saved
    errors = errors_on_ranks(_save_read_only, 2, path)
    _assert_on_every_rank(errors, "OSError", "(rank 0 of 2)", "Read-only file system", path.name)
    _assert_as_saved_before(path)


@pytest.mark.parametrize(
    ("what", "type_name", "words"),
    [
        ("file", "NotADirectoryError", "a folder or nothing"),
        ("parent is a file", "FileExistsError", "a.ckpt"),
        ("link", "FileExistsError", "got a link to"),
        ("other folder", "FileExistsError", "other things in it (notes.txt)"),
    ],
)
def test_a_path_that_is_something_else_is_left_alone(saved, what, type_name, words):
    good, _ = saved
    path = good.parent / "b.ckpt"
    if what == "file":
        path.write_text("x")
    elif what == "parent is a file":
        good = good.rename(good.parent / "c.ckpt")
        good.with_name("a.ckpt").write_text("x")
        path = good.with_name("a.ckpt") / "deeper"
    elif what == "link":
        path.symlink_to(good)
    else:
        path.mkdir()
        (path / "notes.txt").write_text("x")
    before = sorted(each.name for each in good.parent.rglob("*"))
    _assert_on_every_rank(errors_on_ranks(_save, 2, path, 2), type_name, "(rank 0 of 2)", words)
    assert sorted(each.name for each in good.parent.rglob("*")) == before
    state = whole_state(5)
    checkpoint.load(good, state)
    assert_is(state, 1)


def _save_to_own_disk(rank, world_size, path):
    # As if the folder were not shared: rank 1 writes to a place of its own.
    if rank == 1:
        here, there = str(path.parent), str(path.parent.parent / "own")
        io_open = place.Path.open
        place.Path.open = lambda self, *args, **kwargs: io_open(
            _made(place.Path(str(self).replace(here, there))), *args, **kwargs
        )
    _save(rank, world_size, path, 2)


def _made(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_a_folder_that_is_not_shared_is_an_error_on_every_rank(tmp_path):
    path = tmp_path / "shared" / "a"
    run_on_ranks(_save, 2, path, 1)
    errors = errors_on_ranks(_save_to_own_disk, 2, path)
    words = ("'__1_0.distcp'", "got no such file on rank 0", "all ranks share")
    _assert_on_every_rank(errors, "RuntimeError", *words)
    _assert_as_saved_before(path)


def _load_another(rank, world_size, folder):
    checkpoint.load(folder / f"rank {rank}", make_state("dtensor", 5))


def test_ranks_that_see_different_files_are_an_error_on_every_rank(tmp_path):
    for rank in (0, 1):
        checkpoint.save(tmp_path / f"rank {rank}", whole_state(rank), {})
    errors = errors_on_ranks(_load_another, 2, tmp_path)
    _assert_on_every_rank(errors, "RuntimeError", "the same files on every rank")


def test_what_an_interrupted_save_left_is_named_and_removed(tmp_path):
    path = tmp_path / "new"
    left = place.Place(path)
    folder = left.begin()
    (folder / "__0_0.distcp").write_text("half")
    left.release()  # as the system does when a process ends
    for each in (path, folder):
        with pytest.raises(checkpoint.DamagedCheckpoint, match=r"\.new\.saving.*was interrupted"):
            checkpoint.load(each, whole_state(1))
    checkpoint.save(tmp_path / "other", whole_state(1), {})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["other"]


def _save_while_another_process_does(rank, world_size, path):
    """Two processes that know nothing of each other."""
    ranks.Ranks = _Alone
    if rank == 0:
        saving = place.Place(path)
        saving.begin()
        torch.distributed.barrier()
        torch.distributed.barrier()
        assert saving.version.exists()
        saving.abandon()
        return None
    torch.distributed.barrier()
    try:
        place.Place(path).begin()
        return None
    except RuntimeError as error:
        place.Place(path.with_name("b")).begin()
        return str(error)
    finally:
        torch.distributed.barrier()


class _Alone:
    rank, world_size = 0, 1


def test_a_save_of_another_process_is_not_touched(tmp_path):
    _, message = run_on_ranks(_save_while_another_process_does, 2, tmp_path / "a")
    assert "another process is saving to it" in message


def test_files_of_others_that_look_alike_are_not_removed(tmp_path):
    (tmp_path / ".my.saving").mkdir()
    (tmp_path / ".my.saving" / "thesis.tex").write_text("x")
    (tmp_path / ".b.saving").write_text("x")
    checkpoint.save(tmp_path / "a", whole_state(1), {})
    assert sorted(each.name for each in tmp_path.iterdir()) == [".b.saving", ".my.saving", "a"]
