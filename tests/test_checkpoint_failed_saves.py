"""Saves that cannot be are named on every rank, with the last good checkpoint as it was."""

import errno
import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

from lightning_fsdp import (
    checkpoint,
    full_state_dict,
    fully_shard,
    save_pretrained,
    save_sharded,
)
from lightning_fsdp.checkpoint import place, ranks
from tests.support.checkpoints import assert_is, make_state, whole_state
from tests.support.ranks import assert_errors, errors_on_ranks, run_on_ranks
from tests.support.saved_state import save_on_rank, saved_by_two_ranks


@pytest.fixture
def saved(tmp_path):
    return saved_by_two_ranks(tmp_path)


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
    assert_errors(errors, "OSError", f"(rank {bad} of 2)", f"could not write {name}")
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
    save_on_rank(rank, world_size, path, 2)


def test_a_read_only_folder_is_an_error_on_every_rank(saved):
    path, _ = saved
    errors = errors_on_ranks(_save_read_only, 2, path)
    assert_errors(errors, "OSError", "(rank 0 of 2)", "Read-only file system", path.name)
    _assert_as_saved_before(path)


@pytest.mark.parametrize(
    ("what", "type_name", "words"),
    [
        ("file", "NotADirectoryError", "a folder or nothing"),
        ("parent is a file", "FileExistsError", "a.ckpt"),
        ("link", "FileExistsError", "got a link to"),
        ("link out of the folder", "FileExistsError", "got a link to ../"),
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
    elif what == "link out of the folder":
        path.symlink_to(Path("..", good.parent.name, good.name))
    else:
        path.mkdir()
        (path / "notes.txt").write_text("x")
    before = sorted(each.name for each in good.parent.rglob("*"))
    assert_errors(errors_on_ranks(save_on_rank, 2, path, 2), type_name, "(rank 0 of 2)", words)
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
    save_on_rank(rank, world_size, path, 2)


def _made(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_a_folder_that_is_not_shared_is_an_error_on_every_rank(tmp_path):
    path = tmp_path / "shared" / "a"
    run_on_ranks(save_on_rank, 2, path, 1)
    errors = errors_on_ranks(_save_to_own_disk, 2, path)
    words = ("'__1_0.distcp'", "got no such file on rank 0", "all ranks share")
    assert_errors(errors, "RuntimeError", *words)
    _assert_as_saved_before(path)


def _load_another(rank, world_size, folder):
    checkpoint.load(folder / f"rank {rank}", make_state("dtensor", 5))


def test_ranks_that_see_different_files_are_an_error_on_every_rank(tmp_path):
    for rank in (0, 1):
        checkpoint.save(tmp_path / f"rank {rank}", whole_state(rank), {})
    errors = errors_on_ranks(_load_another, 2, tmp_path)
    assert_errors(errors, "RuntimeError", "the same files on every rank")


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


def _begin_while_another_process_begins(rank, world_size, folder):
    """Rank 1 begins at the moment when rank 0 has made its folder, and has not locked it yet."""
    is_made, has_begun, lock = folder / "made", folder / "begun", place._lock

    def lock_late(staging, *, if_unsure):
        is_made.touch()
        for _ in range(10):
            if not has_begun.exists():
                time.sleep(0.1)
        return lock(staging, if_unsure=if_unsure)

    saving = place.Place(folder / f"of-{rank}")
    if rank == 0:
        place._lock = lock_late
    else:
        while not is_made.exists():
            time.sleep(0.01)
    saving.begin()
    has_begun.touch()
    torch.distributed.barrier()
    is_there = saving.version.exists()
    saving.abandon()
    return is_there


def test_saves_of_other_names_may_begin_at_the_same_time(tmp_path):
    assert run_on_ranks(_begin_while_another_process_begins, 2, tmp_path) == [True, True]


def test_where_nobody_can_tell_a_save_of_another_name_is_not_touched(tmp_path, monkeypatch):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(place.fcntl, "lockf", no_locks)
    theirs = place.Place(tmp_path / "theirs")
    theirs.begin()
    for _ in range(2):  # the second finds what the first has left
        ours = place.Place(tmp_path / "ours")
        ours.begin()
        ours.release()
    checkpoint.save(tmp_path / "ours", whole_state(1), {})
    assert theirs.version.exists()
    assert sorted(each.name for each in tmp_path.iterdir()) == [".theirs.saving", "ours"]
    theirs.abandon()


def test_what_another_user_has_left_is_no_obstacle(tmp_path, monkeypatch):
    theirs = place.Place(tmp_path / "theirs")
    theirs.begin()
    theirs.release()
    remove = place.shutil.rmtree

    def remove_own(path, **options):
        if "theirs" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        remove(path, **options)

    monkeypatch.setattr(place.shutil, "rmtree", remove_own)
    checkpoint.save(tmp_path / "ours", whole_state(1), {})
    assert sorted(each.name for each in tmp_path.iterdir()) == [".theirs.saving", "ours"]


def test_files_of_others_that_look_alike_are_not_removed(tmp_path):
    (tmp_path / ".my.saving").mkdir()
    (tmp_path / ".my.saving" / "thesis.tex").write_text("x")
    (tmp_path / ".b.saving").write_text("x")
    checkpoint.save(tmp_path / "a", whole_state(1), {})
    assert sorted(each.name for each in tmp_path.iterdir()) == [".b.saving", ".my.saving", "a"]


def _save_one_of_two_models(rank, world_size, folder):
    """Each half of the ranks has a model of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shard"))["shard"]
    model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
    native = torch_fsdp.fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
    number = rank // 2
    with torch.no_grad():
        model.weight.fill_(number)
    for names in ("01", "ss"):  # a folder each, or the same one
        first, second = (f"save.* '.*{name}'" for name in names)
        halves = rf"{first}.* \(ranks 0, 1\); {second}.* \(ranks 2, 3\).*full_state_dict"
        for of_ranks in (model, native):
            with pytest.raises(ValueError, match=halves):
                save_sharded(folder / names[number], of_ranks)
            with pytest.raises(ValueError, match=halves):
                save_pretrained(of_ranks, folder / names[number])
    state = full_state_dict(model)  # what the message says
    if rank % 2 == 0:
        assert state["weight"].eq(number).all()


def test_models_of_parts_of_the_ranks_are_not_mixed(tmp_path):
    run_on_ranks(_save_one_of_two_models, 4, tmp_path)
    assert not list(tmp_path.iterdir())
