"""A disk that is full in the middle of a save: every writer says which file, and why.

``torch.save`` raises an error about positions in a file when a write under it fails at some places.
"""

import errno
import re
import resource
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_fsdp import async_save_sharded, save_pretrained, save_sharded, shard_model
from lightning_fsdp.checkpoint.convert import convert
from lightning_fsdp.checkpoint.files import naming
from lightning_fsdp.checkpoint.ranks import Ranks
from lightning_fsdp.strategies.checkpoint_io import FullCheckpointIO
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")


def _model():
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(30, 30) for _ in range(10)), nn.Linear(100, 100))


def _full(model, path):
    state = {"state_dict": {n: p.full_tensor() for n, p in model.named_parameters()}}
    Ranks().on_first(
        f"checkpoint {path!r}", lambda: FullCheckpointIO().save_checkpoint(state, path)
    )


def _sharded(model, path):
    save_sharded(path, model)


def _async(model, path):
    async_save_sharded(path, model).wait()


def _pretrained(model, path):
    save_pretrained(model, path, max_shard_size="30KB")


WRITERS = {
    _full: r"/saved",
    _sharded: r"__0_0\.distcp|\.metadata|extra\.pt|complete\.json",
    _async: r"__0_0\.distcp|\.metadata|extra\.pt|complete\.json",
    _pretrained: r"model-0000.-of-0000.\.safetensors",
}


def _outcome(write, model, path):
    """What a save raised; an empty text where it did not."""
    try:
        write(model, str(path))
    except OSError as error:
        return f"{errno.errorcode[error.errno]}: {error}"
    return ""


def _save_with_limits(rank, world_size, folder, write, limits):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    model, found = shard_model(_model()), []
    Ranks()  # makes its group, through a file
    for limit in limits:
        path = Path(folder) / str(limit) / "saved"
        path.parent.mkdir(exist_ok=True)
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            found.append(_outcome(write, model, path))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    return found


@pytest.mark.parametrize("write", WRITERS)
def test_wherever_a_write_fails_the_error_names_the_file(tmp_path, write):
    """Files cannot grow beyond a limit: any place in them, as on a full disk."""
    limits = [*range(10, 3000, 300), *range(3000, 60_000, 2221)]
    ours, theirs = run_on_ranks(_save_with_limits, 2, str(tmp_path), write, limits)
    assert ours == theirs
    assert ours[0], "nothing is written into 10 bytes"
    for limit, text in zip(limits, ours, strict=True):
        left = [path.name for path in (tmp_path / str(limit)).iterdir()]
        if not text:
            assert left == ["saved"]
            continue
        assert left == []
        words = (
            rf"EFBIG: .*/saved' \(rank 0 of 2\): .*could not write '.*({WRITERS[write]})': File too"
        )
        assert re.match(words, text), text


def _save_to(rank, world_size, path, write):
    return _outcome(write, shard_model(_model()), path)


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 48 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("write", WRITERS)
def test_a_full_disk_is_called_so_on_every_rank(small_disk, write):
    for text in run_on_ranks(_save_to, 2, str(small_disk / "saved"), write):
        assert text.startswith("ENOSPC: ")
        assert text.endswith("': No space left on device")
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize("form", ["full", "sharded", "safetensors"])
def test_a_conversion_says_which_file_did_not_fit(tmp_path, small_disk, form):
    if form == "sharded":
        torch.save({"state_dict": _model().state_dict()}, tmp_path / "a.ckpt")
    else:
        save_sharded(tmp_path / "a.ckpt", _model())
    with pytest.raises(OSError, match=r"could not write '.*': No space left on device") as caught:
        convert(tmp_path / "a.ckpt", small_disk / "b", to=form)
    assert caught.value.errno == errno.ENOSPC
    assert list(small_disk.iterdir()) == []


def test_an_error_that_the_caller_is_handling_is_not_the_cause():
    try:
        Path("/nowhere/at/all").stat()
    except OSError:
        with pytest.raises(RuntimeError, match="of its own"), naming("file"):
            raise RuntimeError("of its own")  # noqa: B904 (its context is what matters)
