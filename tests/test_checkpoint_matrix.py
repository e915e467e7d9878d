"""A run that any engine saved at any number of ranks is continued by any other at any other: the
same bits after the move, and the same training.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_fsdp import load_sharded, save_sharded
from lightning_fsdp.checkpoint.state import at_places_here
from tests.support.cases import each_on_ranks
from tests.support.engine_runs import ENGINES, NUM_STEPS, Run, assert_equal, copied
from tests.support.models import causal_lm, lm_loss, token_batch
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")
WORLD_SIZES = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, kept_ranks):
    """A folder per engine and number of ranks: the checkpoint, and what the run was then and
    later."""
    root = tmp_path_factory.mktemp("matrix")
    for world_size in WORLD_SIZES:
        run_on_ranks(_write, world_size, root, timeout_s=40)
    return root


def _write(rank, world_size, root):
    for kind in ENGINES:
        folder = root / f"{kind}-{world_size}"
        run = Run(kind, seed=1)
        run.train(range(NUM_STEPS))
        save_sharded(folder, run.module, run.optimizers, {"steps": NUM_STEPS})
        then = copied(run.whole())
        run.train(range(NUM_STEPS, 2 * NUM_STEPS))
        later = run.whole()
        if rank == 0:
            torch.save({"then": then, "later": later}, folder / "expected.pt")
        dist.barrier()


def _moves(kind, world_size):
    """Whose checkpoints this one reads: over all readers each three of the four values of a move
    (who wrote, on how many, who reads, on how many) meet once. And its own.
    """
    kinds, numbers = list(ENGINES), len(WORLD_SIZES)
    to = kinds.index(kind) + WORLD_SIZES.index(world_size)
    for i, j in itertools.product(range(len(kinds)), range(numbers)):
        move = kinds[i], WORLD_SIZES[j]
        if (i + j + to) % numbers == 0 or move == (kind, world_size):
            yield move


def _read(rank, world_size, kind, root):
    for writer, writers in _moves(kind, world_size):
        what = f"{writer} on {writers} -> {kind} on {world_size}"
        folder = root / f"{writer}-{writers}"
        expected = torch.load(folder / "expected.pt")
        run = Run(kind, seed=2)
        extra = load_sharded(folder, run.wrapped, run.optimizers)
        assert extra == {"steps": NUM_STEPS}, what
        assert run.module.mark.tolist() == [10, 10], what  # that of rank 0
        assert_equal(run.whole(), expected["then"], what)
        run.train(range(NUM_STEPS, 2 * NUM_STEPS))
        is_same = (writer, writers) == (kind, world_size)
        tolerance = 0 if is_same else 5e-7
        found = run.whole()
        for name, theirs in expected["later"]["model"].items():
            torch.testing.assert_close(
                found["model"][name],
                theirs,
                atol=tolerance,
                rtol=0,
                msg=lambda text, w=what, n=name: f"{w}, {n}: {text}",
            )
        if is_same:
            assert_equal(found, expected["later"], what)


@pytest.mark.quick
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_any_engine_continues_what_any_other_saved(saved, world_size):
    each_on_ranks(_read, world_size, ENGINES, saved, timeout_s=280)


# -- with other modules checkpointed ---------------------------------------------------------------


def _stepped(seed, *, is_wrapped):
    model = causal_lm(seed=seed)
    if is_wrapped:
        model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    optimizer = torch.optim.AdamW(model.parameters())
    lm_loss(model, token_batch(0, 0, seed)).backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_state_is_read_where_other_modules_are_checkpointed(tmp_path, is_wrapped):
    """torch's wrapper adds to the names of parameters, but not to those of the state dict."""
    model, optimizer = _stepped(1, is_wrapped=is_wrapped)
    other, others = _stepped(2, is_wrapped=not is_wrapped)
    save_sharded(tmp_path, model, [optimizer])
    load_sharded(tmp_path, other, [others])
    assert_equal(other.state_dict(), model.state_dict(), "model")
    assert_equal(others.state_dict(), optimizer.state_dict(), "optimizer")
    names = [[[name for name, _ in each.named_parameters()]] for each in (other, model)]
    assert names[0] != names[1]
    assert_equal(at_places_here(0, *names, optimizer.state_dict()), others.state_dict(), "file")
