"""Random states of every rank are saved with the state of a run, and taken up."""

import random

import numpy as np
import pytest
import torch

from lightning_fsdp import ResumableLoader
from lightning_fsdp.strategies import random_states
from tests.support.ranks import run_on_ranks
from tests.support.resumed import Dropping, NoisySamples, run_dropping
from tests.support.trainer import SHARDED, make_trainer, on_trainer_ranks, seeded

CPU = torch.device("cpu")


def _draw():
    return torch.rand(()).item(), np.random.random(), random.random(), random.gauss(0, 1)


def _gathered(rank, world_size, is_same):
    seed = 0 if is_same else rank
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    random.gauss(0, 1)  # one more is kept for the next call
    states = random_states.collect(CPU)
    assert (states is None) == (rank > 0)
    return states, _draw()


def _taken_up(rank, world_size, states):
    random_states.restore(states, CPU)
    return _draw()


@pytest.mark.parametrize("is_same", [True, False])
def test_a_rank_goes_on_as_the_rank_of_its_number_modulo_those_that_saved(tmp_path, is_same):
    saved = run_on_ranks(_gathered, 2, is_same)
    torch.save(saved[0][0], tmp_path / "states")
    states = torch.load(tmp_path / "states", weights_only=True)
    drawn = [numbers for _, numbers in saved]
    assert (drawn[0] == drawn[1]) == is_same
    assert run_on_ranks(_taken_up, 2, states) == drawn
    assert run_on_ranks(_taken_up, 1, states) == drawn[:1]
    assert run_on_ranks(_taken_up, 3, states) == [*drawn, drawn[0]]


class _SavesItsOwn(Dropping):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["rng_states"] = "its own"

    def on_load_checkpoint(self, checkpoint):
        assert checkpoint["rng_states"] == "its own"


def _who_saves(rank, world_size, folder):
    trainer = make_trainer(SHARDED[0], folder)
    trainer.fit(seeded(_SavesItsOwn), ResumableLoader(NoisySamples(16), 4))
    trainer.save_checkpoint(folder / "all.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    file = torch.load(folder / "all.ckpt", weights_only=True)
    assert len(file["lightning_fsdp_rng_states"]) == 2
    assert "lightning_fsdp_rng_states" not in torch.load(folder / "weights.ckpt", weights_only=True)
    # A file of another strategy has none.
    ddp = make_trainer("ddp", folder)
    ddp.fit(seeded(_SavesItsOwn), ResumableLoader(NoisySamples(16), 4))
    ddp.save_checkpoint(folder / "ddp.ckpt")
    for strategy, name in ((SHARDED[0], "ddp"), ("ddp", "all"), (SHARDED[0], "all")):
        path = folder / f"{name}.ckpt"
        run_dropping(strategy, folder, model=_SavesItsOwn, ckpt_path=path, max_epochs=2)


def test_random_states_are_saved_with_the_state_of_a_run_and_not_with_weights_alone(tmp_path):
    on_trainer_ranks(_who_saves, 2, tmp_path)
