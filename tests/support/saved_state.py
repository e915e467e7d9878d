"""A state of two ranks, saved and loaded."""

from lightning_fsdp import checkpoint
from tests.support.checkpoints import assert_is, make_state
from tests.support.ranks import run_on_ranks


def save_on_rank(rank, world_size, path, seed):
    checkpoint.save(path, make_state("dtensor", seed), {"seed": seed})


def load_on_rank(rank, world_size, path):
    state = make_state("dtensor", 5)
    try:
        checkpoint.load(path, state)
    finally:
        assert_is(state, 5)  # nothing was filled


def saved_by_two_ranks(folder):
    """A checkpoint that two ranks wrote, and the folder with its files."""
    path = folder / "a.ckpt"
    run_on_ranks(save_on_rank, 2, path, 1)
    return path, path / "version-1"
