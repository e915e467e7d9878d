"""Checkpoints of a model on the device are read on the CPU, and the other way round."""

import pytest
import torch

from lightning_fsdp import (
    ZERO3,
    checkpoint,
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    shard_model,
)
from tests.support import ranks
from tests.support.models import lm_loss, tied_lm, token_batch
from tests.support.parity import adamw, assert_same_tensors
from tests.support.ranks import run_on_ranks


def _step(model, optimizer, rank, step):
    lm_loss(model, token_batch(step, 0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _values(model):
    return {name: p.full_tensor().detach().cpu() for name, p in model.named_parameters()}


def _save(rank, world_size, folder):
    """Train, save in both forms, and go on."""
    model = shard_model(tied_lm(seed=3), ZERO3)
    optimizer = adamw(model.parameters())
    for step in range(2):
        _step(model, optimizer, rank, step)
    states = {"model": full_state_dict(model), "optimizer": full_optimizer_state_dict(optimizer)}
    if rank == 0:
        torch.save(states, folder / "full.pt")
    checkpoint.save(folder / "sharded", dict(model.named_parameters()), {})
    saved = _values(model)
    _step(model, optimizer, rank, 2)
    return saved, _values(model)


def _load(rank, world_size, folder):
    """What the sharded form has; and where training goes on to from the full one."""
    sharded = shard_model(tied_lm(seed=4), ZERO3)
    checkpoint.load(folder / "sharded", dict(sharded.named_parameters()))
    model = shard_model(tied_lm(seed=5), ZERO3)
    optimizer = adamw(model.parameters())
    states = torch.load(folder / "full.pt", map_location=ranks.active_device)
    load_full_state_dict(model, states["model"])
    load_full_optimizer_state_dict(optimizer, states["optimizer"])
    assert {p.device.type for p in model.parameters()} == {ranks.active_device}
    _step(model, optimizer, rank, 2)
    return _values(sharded), _values(model)


@pytest.mark.parametrize("saves_on_the_device", [True, False])
def test_training_goes_on_elsewhere(saves_on_the_device, tmp_path, monkeypatch):
    def run(function, is_on_the_device):
        with monkeypatch.context() as patched:
            if not is_on_the_device:
                patched.setattr(ranks, "active_device", "cpu")
            return run_on_ranks(function, 2, tmp_path)[0]

    saved, expected = run(_save, saves_on_the_device)
    sharded, went_on = run(_load, not saves_on_the_device)
    assert_same_tensors(sharded, saved, atol=0)
    assert_same_tensors(went_on, expected, atol=1e-5)
