"""Models built on the meta device that cannot be initialised: named on every rank."""

import numpy as np
import pytest
import torch
from torch import nn

from lightning_fsdp import shard_model
from lightning_fsdp.core import materialize
from tests.support.meta_models import Layer, on_meta
from tests.support.models import (
    mlp,
    tiny_gpt2,
)
from tests.support.ranks import errors_on_ranks


class NoInitialiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.ones(3))


class NoBufferInitialiser(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.inner = nn.Module()
        self.inner.register_buffer("cache", torch.ones(3).to(dtype))


class HalfInitialised(nn.Linear):
    def reset_parameters(self):
        nn.init.zeros_(self.weight[:1])


class Raises(nn.Linear):
    def reset_parameters(self):
        if not self.weight.is_meta:
            raise KeyError("no such file")


class Reshapes(nn.Linear):
    def reset_parameters(self):
        nn.init.zeros_(self.bias)
        if not self.weight.is_meta:
            self.weight = nn.Parameter(torch.zeros(1, 1))


class DrawsElsewhere(nn.Linear):
    def reset_parameters(self):
        nn.init.zeros_(self.bias)
        self.weight.data.copy_(torch.from_numpy(np.random.default_rng().random((3, 3))))


class Late(nn.Module):
    """Fails at its last unit."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(4) for _ in range(2))
        self.last = NoInitialiser()


def _gpt2_block():
    return tiny_gpt2().transformer.h[0]


REFUSED = {
    "a parameter": (NoInitialiser, ["gain", "NoInitialiser.reset_parameters", "_init_weights"]),
    "a buffer": (NoBufferInitialiser, ["inner.cache", "Module.reset_parameters", 'device("cpu")']),
    "a mask": (lambda: NoBufferInitialiser(torch.bool), ["inner.cache"]),
    "positions": (lambda: NoBufferInitialiser(torch.int64), ["inner.cache"]),
    "bytes": (lambda: NoBufferInitialiser(torch.uint8), ["inner.cache"]),
    "half": (lambda: HalfInitialised(3, 3), ["weight", "all of it"]),
    "an error": (lambda: Raises(3, 3), ["Raises.reset_parameters", "no such file"]),
    "another shape": (lambda: Reshapes(3, 3), ["weight", "(3, 3)", "(1, 1)"]),
    "another generator": (lambda: DrawsElsewhere(3, 3), ["rank", "another generator than torch"]),
    "the last unit": (Late, ["last.gain"]),
    "a block alone": (_gpt2_block, ["Conv1D", "shard_model on the whole model"]),
}


def _refused(rank, world_size, what):
    with torch.device("meta"):
        model = REFUSED[what][0]()
    kinds = [type(m) for m in model.modules()]
    before = [*model.named_parameters(), *model.named_buffers()]
    state = torch.get_rng_state()
    try:
        shard_model(model)
    finally:
        after = [*model.named_parameters(), *model.named_buffers()]
        assert [n for n, _ in after] == [n for n, _ in before]
        for (name, tensor), (_, same) in zip(after, before, strict=True):
            assert tensor is same, f"half-sharded: {name} is another object"
            assert tensor.is_meta, f"half-sharded: {name} is real"
        assert [type(m) for m in model.modules()] == kinds
        if what != "another generator":
            assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("what", REFUSED)
def test_what_nothing_initialises_is_named_on_every_rank_and_nothing_is_changed(what):
    kind = "RuntimeError" if what == "another generator" else "ValueError"
    for error in errors_on_ranks(_refused, 2, what):
        assert error is not None
        assert error.type_name == kind, error
        for word in REFUSED[what][1]:
            assert word in error.message, error


def _one_rank_on_meta(rank, world_size):
    shard_model(on_meta(mlp) if rank else mlp())


def test_ranks_of_which_one_built_on_the_host_are_refused():
    for error in errors_on_ranks(_one_rank_on_meta, 2):
        assert error.type_name == "RuntimeError"
        assert "on meta" in error.message


def test_what_was_not_written_to_is_found_in_every_dtype():
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64):
        tensor = materialize.marked(torch.empty(3, 5, dtype=dtype, device="meta"))
        assert materialize.is_marked(tensor), dtype
        tensor[1:] = 1
        assert materialize.is_marked(tensor), dtype
        tensor[0] = 0
        assert not materialize.is_marked(tensor), dtype
    assert not materialize.is_marked(torch.full((3,), -torch.inf))
    assert not materialize.is_marked(torch.tensor([materialize.MARK, 0], dtype=torch.uint8))
    assert not materialize.is_marked(torch.empty(0))
