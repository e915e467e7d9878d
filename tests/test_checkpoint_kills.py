"""A save that is killed at any moment leaves the old checkpoint or the new one, whole."""

import re
import shutil

import pytest

from lightning_fsdp import checkpoint
from tests.support.checkpoints import assert_is, make_state, whole_state
from tests.support.kills import SCOPES, watch
from tests.support.ranks import ends_on_ranks, run_on_ranks

# All that happens in a save over an existing checkpoint, in order on each rank. `current` is
# replaced once: what comes after it leaves the new checkpoint.
BEFORE = [
    "rank 0: exchange 1",
    "rank 0: make .a.ckpt.saving",
    "rank 0: make version-2",
    "rank 0: exchange 2",
    "rank 0: open __0_0.distcp",
    "rank 0: write __0_0.distcp",
    "rank 0: sync __0_0.distcp",
    "rank 0: exchange 3",
    "rank 0: open .metadata",
    "rank 0: write .metadata",
    "rank 0: sync .metadata",
    "rank 0: open extra.pt",
    "rank 0: write extra.pt",
    "rank 0: sync extra.pt",
    "rank 0: open complete.json",
    "rank 0: write complete.json",
    "rank 0: sync complete.json",
    "rank 0: link current",
    "rank 0: sync version-2",
    "rank 0: sync whole",
    "rank 0: rename version-2",
    "rank 0: sync a.ckpt",
    "rank 0: replace current",
]
AFTER = [
    "rank 0: remove complete.json",
    "rank 0: remove __1_0.distcp",
    "rank 0: remove version-1",
    "rank 0: remove lock",
    "rank 0: exchange 4",
]
OTHER = [
    "rank 1: exchange 1",
    "rank 1: exchange 2",
    "rank 1: open __1_0.distcp",
    "rank 1: write __1_0.distcp",
    "rank 1: sync __1_0.distcp",
    "rank 1: exchange 3",
    "rank 1: exchange 4",
]
FIRST = [  # of a save where there was nothing
    "rank 0: make version-1",
    "rank 0: write __0_0.distcp",
    "rank 1: write __1_0.distcp",
    "rank 0: write complete.json",
    "rank 0: link current",
    "rank 0: rename whole",
]


def _save(rank, world_size, path, seed):
    checkpoint.save(path, make_state("dtensor", seed), {"seed": seed})


def _save_and_be_killed(rank, world_size, path, moment, scope):
    state = make_state("dtensor", 2)
    checkpoint.save(path.parent.parent / "warm" / "up", state, {})  # opens the group
    moments = watch(rank, moment, scope)
    checkpoint.save(path, state, {"seed": 2})
    return list(moments)


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    path = tmp_path_factory.mktemp("old") / "a.ckpt"
    run_on_ranks(_save, 2, path, 1)
    return path


def _copy(old, tmp_path):
    path = tmp_path / "runs" / "a.ckpt"
    path.parent.mkdir()
    shutil.copytree(old, path, symlinks=True)
    return path


def test_these_are_the_moments_of_a_save(old, tmp_path):
    path = _copy(old, tmp_path)
    moments = run_on_ranks(_save_and_be_killed, 2, path, None, "one rank")
    positions = [moments[0].index(moment) for moment in BEFORE + AFTER]
    assert positions == sorted(positions)
    assert moments[1] == OTHER
    unnamed = [m for m in moments[0] if m not in BEFORE + AFTER]
    removals = [m for m in unnamed if m.startswith("rank 0: remove ")]
    assert [m for m in unnamed if m not in removals] == ["rank 0: make runs", "rank 0: make whole"]


# Whoever else is killed is nothing to what a rank has written until then: at each moment one of
# both scopes, and both around the one at which the checkpoint is replaced.
KILLS = [
    *((moment, SCOPES[index % 2]) for index, moment in enumerate(BEFORE + OTHER + AFTER)),
    *((moment, scope) for moment in (BEFORE[-1], AFTER[0]) for scope in SCOPES),
]


@pytest.mark.parametrize(("moment", "scope"), sorted(set(KILLS), key=KILLS.index))
def test_a_killed_save_leaves_the_old_or_the_new_checkpoint(old, tmp_path, moment, scope):
    path = _copy(old, tmp_path)
    ends = ends_on_ranks(_save_and_be_killed, 2, path, moment, scope)
    killed = int(moment[len("rank ")])
    assert ends[killed] == "died"
    # The other one heard of it, unless it had nothing left to hear.
    assert ends[1 - killed] == ("died" if scope == "all ranks" else "LostRankError")

    seed = 2 if moment in AFTER else 1
    if moment == "rank 1: exchange 4":  # rank 0 is about to commit, or has
        seed = checkpoint.read_extra(path)["seed"]
    _assert_holds(path, seed)
    _assert_half_written_is_refused(path)
    _assert_next_save_cleans_up(path)


@pytest.mark.parametrize("moment", FIRST)
def test_a_killed_first_save_leaves_nothing_that_looks_whole(tmp_path, moment):
    path = tmp_path / "runs" / "a.ckpt"
    path.parent.mkdir()
    ends = ends_on_ranks(_save_and_be_killed, 2, path, moment, "one rank")
    assert "died" in ends
    assert not path.exists()
    with pytest.raises(checkpoint.DamagedCheckpoint, match=r"\.a\.ckpt\.saving: its save"):
        checkpoint.load(path, whole_state(5))
    checkpoint.save(path.with_name("b.ckpt"), whole_state(3), {})  # of another name
    assert [each.name for each in path.parent.iterdir()] == ["b.ckpt"]


def _assert_holds(path, seed):
    state = whole_state(5)
    checkpoint.load(path, state)
    assert_is(state, seed)
    assert checkpoint.read_extra(path) == {"seed": seed}


def _assert_half_written_is_refused(path):
    """Every folder that could be taken for a checkpoint is whole, or refused by its name."""
    for folder in path.parent.rglob("version-*"):
        state = whole_state(5)
        if checkpoint.is_checkpoint(folder):
            checkpoint.load(folder, state)
            assert_is(state, int(folder.name.removeprefix("version-")))
        else:
            with pytest.raises(checkpoint.DamagedCheckpoint, match=re.escape(str(folder))):
                checkpoint.load(folder, state)


def _assert_next_save_cleans_up(path):
    checkpoint.save(path, whole_state(3), {"seed": 3})
    _assert_holds(path, 3)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert len(list(path.iterdir())) == 2
