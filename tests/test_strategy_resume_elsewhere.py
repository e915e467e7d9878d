"""A run that goes on on more or fewer ranks, or with other batches."""

import functools
import warnings
from contextlib import nullcontext
from itertools import chain

import pytest
import torch

from lightning_fsdp import ResumableLoader
from tests.support.resumed import Dropping, NoisySamples, keep_checkpoints, run_dropping
from tests.support.trainer import SHARDED, on_trainer_ranks, weights_of

pytestmark = pytest.mark.usefixtures("kept_ranks")

LENGTH = 51  # 6 global micro-batches of 8; 3 samples are left out in each epoch


def _leg(rank, world_size, strategy, folder, batch_size, accumulation, until_step, path=None):
    """A part of the run: what it read by optimizer step, and its weights."""
    warnings.filterwarnings("ignore", "The dirpath has changed")
    model = run_dropping(
        strategy,
        folder,
        seed=5 + rank if path else 0,
        model=_steady,
        loader=ResumableLoader(NoisySamples(LENGTH, is_noisy=False), batch_size, seed=7),
        callbacks=[keep_checkpoints(folder, 2)],
        enable_checkpointing=True,
        max_epochs=-1,
        max_steps=until_step,
        accumulate_grad_batches=accumulation,
        ckpt_path=path,
    )
    steps = [
        _joined(model.numbers[first : first + accumulation])
        for first in range(0, len(model.numbers), accumulation)
    ]
    return steps, {name: value.double() for name, value in weights_of(model).items()}


def _joined(lists):
    return list(chain.from_iterable(lists))


def _steady():
    return Dropping(0.0)


def _steps_of_all(results):
    """The sorted numbers of each step, over all ranks."""
    return [
        sorted(_joined(shares)) for shares in zip(*(steps for steps, _ in results), strict=True)
    ]


@pytest.fixture(scope="module")
def on_four(tmp_path_factory):
    """A run on four ranks, and where its checkpoints are."""

    @functools.cache
    def run(strategy):
        folder = tmp_path_factory.mktemp(strategy)
        return on_trainer_ranks(_leg, 4, strategy, folder, 2, 2, 5), folder / "kept"

    return run


@pytest.mark.parametrize(
    ("strategy", "batch_size", "accumulation"),
    [
        *((strategy, 4, 2) for strategy in (SHARDED[0], "fsdp1_zero2", "fsdp2_zero3")),
        (SHARDED[0], 2, 4),
    ],
)
def test_fewer_ranks_and_more_again_read_the_same_samples_and_train_alike(
    tmp_path, on_four, strategy, batch_size, accumulation
):
    """From the second step on two ranks to the fourth, and then on four as at the begin."""
    whole, kept = on_four(strategy)
    whole_at_4 = torch.load(kept / "step=4.ckpt", weights_only=True)
    at_2, at_4 = kept / "step=2.ckpt", tmp_path / "kept" / "step=4.ckpt"
    parts = [
        on_trainer_ranks(_leg, 2, strategy, tmp_path, batch_size, accumulation, 4, at_2),
        on_trainer_ranks(_leg, 4, strategy, tmp_path, 2, 2, 5, at_4),
    ]
    expected = _steps_of_all(whole)
    assert len(expected) == 5
    epoch = _joined(expected[:3])
    assert len(epoch) == len(set(epoch)) == LENGTH - 3
    assert _joined(_steps_of_all(part) for part in parts) == expected[2:]
    weights_at_4 = {name: value.double() for name, value in whole_at_4["state_dict"].items()}
    torch.testing.assert_close(parts[0][0][1], weights_at_4, atol=5e-7, rtol=0)
    torch.testing.assert_close(parts[1][0][1], whole[0][1], atol=1e-6, rtol=0)


def _misaligned(rank, world_size, folder):
    path = folder / "kept" / "step=3.ckpt"
    run_dropping(
        SHARDED[0],
        folder,
        callbacks=[keep_checkpoints(folder)],
        enable_checkpointing=True,
        max_steps=3,
    )
    message = r"24 samples of the epoch were read, and a step takes 2 x 4 on each of 2 ranks.*"
    with pytest.warns(UserWarning, match=message) if rank == 0 else nullcontext():
        model = run_dropping(SHARDED[0], folder, ckpt_path=path, accumulate_grad_batches=4)
    assert len(model.losses) == 2
    with pytest.raises(ValueError, match=r"global batch that divides the 24 samples read, got 32"):
        run_dropping(
            SHARDED[0], folder, ckpt_path=path, loader=ResumableLoader(NoisySamples(32), 16, seed=7)
        )
    model = run_dropping(SHARDED[0], folder, ckpt_path=path, accumulate_grad_batches=1)
    assert len(model.losses) == 2


def test_a_position_inside_of_a_step_or_a_batch_is_told_with_the_numbers(tmp_path):
    on_trainer_ranks(_misaligned, 2, tmp_path)


def _ends_epochs(rank, world_size, folder):
    """10 samples: 2 batches of 4 on all ranks, or 5 of 2; at 8 samples only the former end."""

    def run(batch_size, name, **options):
        loader = ResumableLoader(NoisySamples(10, is_noisy=False), batch_size, seed=7)
        options = {"accumulate_grad_batches": 1, "max_epochs": 2, **options}
        return run_dropping(SHARDED[0], folder / name, loader=loader, **options).numbers

    def keep(name):
        return {"callbacks": [keep_checkpoints(folder / name)], "enable_checkpointing": True}

    small, large = run(1, "small", **keep("small")), run(2, "large", **keep("large"))
    at_8 = {"small": folder / "small/kept/step=4.ckpt", "large": folder / "large/kept/step=2.ckpt"}
    for limits in ({"max_epochs": 2}, {"max_epochs": -1, "max_steps": 7}):
        assert run(1, "", ckpt_path=at_8["large"], **limits)[:5] == small[5:]
        assert run(2, "", ckpt_path=at_8["small"], **limits)[:2] == large[2:]


def test_an_epoch_that_was_over_stays_over_with_another_batch(tmp_path):
    on_trainer_ranks(_ends_epochs, 2, tmp_path)
