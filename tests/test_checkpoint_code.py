"""A checkpoint runs no code: what is planted in one is refused."""

import enum
import io
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from lightning_fsdp import checkpoint
from tests.support.checkpoints import assert_is, sign_again, whole_state
from tests.support.ranks import assert_errors, errors_on_ranks
from tests.support.saved_state import load_on_rank, saved_by_two_ranks


@pytest.fixture
def saved(tmp_path):
    return saved_by_two_ranks(tmp_path)


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
    stored = file.read_bytes()[info.offset : info.offset + info.length]
    torch.save(torch.load(io.BytesIO(stored)), original)  # with torch's sums, for zipfile
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
        assert_errors(errors_on_ranks(load_on_rank, 2, path), "DamagedCheckpoint", *words)

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
