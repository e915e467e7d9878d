"""Modules that FSDP1Engine has sharded, saved from pieces and read into pieces."""

import pytest
import torch

from lightning_fsdp import load_pretrained, save_pretrained
from lightning_fsdp.config import MixedPrecisionPolicy
from lightning_fsdp.engines.fsdp1 import FSDP1Engine
from tests.support.ranks import run_on_ranks


class _SharedScale(torch.nn.Module):
    """Two layers with one buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.first.register_buffer("scale", torch.full((4,), 2.0))
        self.second.register_buffer("scale", self.first.scale)


class _WithExtraState(torch.nn.Linear):
    def get_extra_state(self):
        return {"a": 1}


def _shard(module):
    engine = FSDP1Engine(zero_stage=3, units=None, cpu_offload=False)
    engine.shard(module, device=torch.device("cpu"), precision=MixedPrecisionPolicy())
    return engine


def _with_shared_buffer(rank, world_size, folder):
    module = _SharedScale()
    engine = _shard(module)
    save_pretrained(module, folder)
    module.first.scale.zero_()
    load_pretrained(module, folder)
    engine.make_whole(module)
    assert torch.equal(module.second.scale, torch.full((4,), 2.0))


def test_a_buffer_with_two_names_is_one(tmp_path):
    run_on_ranks(_with_shared_buffer, 2, str(tmp_path / "model"))


def _with_extra_state(rank, world_size, folder):
    module = _WithExtraState(2, 2)
    _shard(module)
    with pytest.raises(ValueError, match=r"'_extra_state': expected a tensor, got dict"):
        save_pretrained(module, folder)


def test_values_that_are_no_tensors_are_refused(tmp_path):
    run_on_ranks(_with_extra_state, 2, str(tmp_path / "model"))
