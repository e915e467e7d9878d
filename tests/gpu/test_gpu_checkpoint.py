"""Checkpoints of a model on the device are read on the CPU, and the other way round."""

import torch

from lightning_fsdp import ZERO3, full_state_dict, load_full_state_dict, shard_model
from tests.support import ranks
from tests.support.models import tied_lm
from tests.support.ranks import run_on_ranks


def _save(rank, world_size, path):
    state = full_state_dict(shard_model(tied_lm(seed=3), ZERO3))
    if rank == 0:
        torch.save(state, path)


def _load(rank, world_size, path):
    model = shard_model(tied_lm(seed=4), ZERO3)
    load_full_state_dict(model, torch.load(path))
    assert {p.device.type for p in model.parameters()} == {ranks.active_device}
    return {name: p.full_tensor().cpu() for name, p in model.named_parameters()}


def test_a_full_state_of_the_device_is_read_on_the_cpu(tmp_path):
    run_on_ranks(_save, 2, tmp_path / "full.pt")
    loaded = torch.load(tmp_path / "full.pt", map_location="cpu")
    assert {value.device.type for value in loaded.values()} == {"cpu"}
    for name, value in tied_lm(seed=3).state_dict().items():
        assert torch.equal(loaded[name], value.cpu()), name


def test_a_full_state_of_the_cpu_is_read_on_the_device(tmp_path):
    expected = {name: value.cpu() for name, value in tied_lm(seed=5).state_dict().items()}
    torch.save(expected, tmp_path / "full.pt")
    for values in run_on_ranks(_load, 2, tmp_path / "full.pt"):
        for name, value in values.items():
            assert torch.equal(value, expected[name]), name
