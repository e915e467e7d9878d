"""Checkpoints that are not what was saved are named on every rank, and not read."""

import pytest
import torch
import torch.distributed as dist

from lightning_fsdp import checkpoint
from tests.support.checkpoints import assert_is, make_state, whole_state
from tests.support.ranks import assert_errors, errors_on_ranks
from tests.support.saved_state import load_on_rank, saved_by_two_ranks


@pytest.fixture
def saved(tmp_path):
    return saved_by_two_ranks(tmp_path)


def _read_after(rank, world_size, path, change):
    opened = checkpoint.OpenCheckpoint(path)
    state = make_state("dtensor", 5)
    opened.read(state)
    assert_is(state, 1)
    if change == "saved again":
        checkpoint.save(path, make_state("dtensor", 2), {})
    elif rank == 0:
        file = path / "version-1" / "__0_0.distcp"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    dist.barrier()
    state = make_state("dtensor", 5)
    try:
        opened.read(state)
    finally:
        assert_is(state, 5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("written to", "__0_0.distcp: expected this file as it was when it was verified"),
        ("saved again", "expected this file, got none"),
    ],
)
def test_what_has_changed_since_it_was_verified_is_not_read(saved, change, words):
    errors = errors_on_ranks(_read_after, 2, saved[0], change)
    assert_errors(errors, "DamagedCheckpoint", words)


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
    assert_errors(errors_on_ranks(load_on_rank, 2, path), "DamagedCheckpoint", *words)
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
