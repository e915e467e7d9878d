"""Tensors that are stepped in blocks.

The reference holds each block as a tensor of its own, in one process, and gets the gradients that
the ranks had.
"""

import pytest
import torch

from lightning_fsdp import (
    full_optimizer_state_dict,
    load_full_optimizer_state_dict,
    load_sharded,
    save_sharded,
    shard_model,
)
from lightning_fsdp.core.optimizers.blocks import blocks_in
from tests.support.cases import each_on_ranks
from tests.support.models import causal_lm, lm_loss, mlp, mlp_batch, mlp_loss, token_batch
from tests.support.one_exchange import train_on_rank
from tests.support.optimizers import Normed, assert_same_state
from tests.support.parity import make_batches
from tests.support.ranks import assert_errors, errors_on_ranks, run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

FUSED = [(20, 20)] * 3  # query_key_value: (60, 20)
COLUMNS = [(20, 30), (20, 31)]  # down: (20, 61)
STEPS = 3


def _groups(model):
    named = dict(model.named_parameters())
    fused = [p for name, p in named.items() if name.endswith("query_key_value.weight")]
    down = [p for name, p in named.items() if name.endswith("down.weight")]
    ids = set(map(id, [*fused, *down]))
    others = [p for p in model.blocks.parameters() if p.ndim == 2 and id(p) not in ids]
    return fused, down, others


def _optimizer(cls, model):
    fused, down, others = _groups(model)
    by_name = {"*.down.weight": COLUMNS}
    return cls(
        [{"params": fused, "blocks": FUSED}, {"params": [*down, *others], "blocks": by_name}],
        lr=0.02,
    )


def _batches(world_size, num_steps=STEPS):
    return make_batches(
        token_batch, num_steps=num_steps, num_micro_batches=1, world_size=world_size
    )


class _Reference:
    """Each block a tensor of its own."""

    def __init__(self, cls):
        self.model = causal_lm()
        fused, down, others = _groups(self.model)
        self.blocks = {p: p.detach().split(20, dim=0) for p in fused}
        self.blocks |= {p: p.detach().split([30, 31], dim=1) for p in down}
        self.apart = {
            p: [torch.nn.Parameter(b.clone(memory_format=torch.contiguous_format)) for b in blocks]
            for p, blocks in self.blocks.items()
        }
        parts = [part for parts in self.apart.values() for part in parts]
        self.optimizer = cls([{"params": [*parts, *others]}], lr=0.02)

    def step(self, gradients):
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradients[name].clone()
        for parameter, parts in self.apart.items():
            dim, sizes = (0, [20] * 3) if len(parts) == 3 else (1, [30, 31])
            for part, gradient in zip(parts, parameter.grad.split(sizes, dim), strict=True):
                part.grad = gradient.contiguous()
        self.optimizer.step()
        with torch.no_grad():
            for parameter, parts in self.apart.items():
                for block, part in zip(self.blocks[parameter], parts, strict=True):
                    block.copy_(part)


def _train(rank, world_size, cls):
    model = shard_model(causal_lm())
    optimizer = _optimizer(cls, model)
    trace = train_on_rank(model, _batches(world_size), lm_loss, optimizer, rank)
    return trace, full_optimizer_state_dict(optimizer)


# A norm and a product may add up in another order where a block's elements do not lie in a row.
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_blocks_are_stepped_as_tensors_of_their_own(world_size):
    for cls, found in each_on_ranks(_train, world_size, [torch.optim.Muon, Normed]).items():
        for trace, state in found:
            reference, plain = _Reference(cls), _Plain(cls)
            for step in range(STEPS):
                reference.step(trace.gradients[step])
                plain.step(trace.gradients[step])
                for name, parameter in reference.model.named_parameters():
                    torch.testing.assert_close(
                        trace.parameters[step][name], parameter, atol=1e-6, rtol=0
                    )
            assert plain.is_far_from(trace.parameters[-1]), "blocks make no difference"
            _assert_state(state, reference, cls)


class _Plain:
    """Without blocks: what would be the result if they were not seen."""

    def __init__(self, cls):
        self.model = causal_lm()
        self.optimizer = cls([p for group in _groups(self.model) for p in group], lr=0.02)

    def step(self, gradients):
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradients[name].clone()
        self.optimizer.step()

    def is_far_from(self, weights):
        name = "blocks.0.query_key_value.weight"
        return (self.model.get_parameter(name) - weights[name]).abs().max() > 1e-4


def _assert_state(state, reference, cls):
    fused, down, _ = _groups(reference.model)
    moment = "momentum_buffer" if cls is torch.optim.Muon else "moment"
    for place, parameter in enumerate([*fused, *down]):
        dim = 0 if len(reference.apart[parameter]) == 3 else 1
        theirs = [reference.optimizer.state[part] for part in reference.apart[parameter]]
        whole = torch.cat([values[moment] for values in theirs], dim)
        torch.testing.assert_close(state["state"][place][moment], whole, atol=1e-6, rtol=0)
        if cls is Normed:
            for ours, values in zip(state["state"][place]["blocks"], theirs, strict=True):
                torch.testing.assert_close(ours["rows"], values["rows"], atol=1e-6, rtol=1e-6)
                assert ours["pair"][1] == STEPS
        else:
            assert list(state["state"][place]) == [moment], "as without blocks"


def _save(rank, world_size, folder, cls):
    model = shard_model(causal_lm())
    optimizer = _optimizer(cls, model)
    train_on_rank(model, _batches(world_size), lm_loss, optimizer, rank)
    save_sharded(folder, model, [optimizer])
    return full_optimizer_state_dict(optimizer)


def _restore(rank, world_size, folder, cls, state):
    for is_sharded in (True, False):
        model = shard_model(causal_lm(seed=5))
        optimizer = _optimizer(cls, model)
        if is_sharded:
            load_sharded(folder, model, [optimizer])
        else:
            load_full_optimizer_state_dict(optimizer, state)
        restored = full_optimizer_state_dict(optimizer)
        assert list(restored["state"]) == list(state["state"])
        for place, values in state["state"].items():
            assert_same_state(restored["state"][place], values)
        train_on_rank(model, _batches(world_size, 1), lm_loss, optimizer, rank)


@pytest.mark.parametrize("cls", [torch.optim.Muon, Normed])
def test_their_state_moves_to_other_numbers_of_ranks(cls, tmp_path):
    state = run_on_ranks(_save, 2, tmp_path, cls)[0]
    assert ("blocks" in state["state"][0]) == (cls is Normed)
    run_on_ranks(_restore, 3, tmp_path, cls, state)


WRONG = {
    "size": [(7, 7), (7, 7)],
    "dimensions": [(105,)],
    "both": [(8, 7), (7, 6)],
    "none": [],
}


@pytest.mark.parametrize("shapes", WRONG.values(), ids=WRONG)
def test_shapes_that_do_not_fit_are_refused_by_name(shapes):
    with pytest.raises(ValueError, match=r"blocks of 'first.weight': expected shapes .*\(15, 7\)"):
        blocks_in({"blocks": shapes}, "first.weight", (15, 7))


def test_names_choose():
    by_name = {"*.weight": [(8, 7), (7, 7)], "*": [(15,)]}
    assert blocks_in({"blocks": by_name}, "first.weight", (15, 7)) == ([(8, 7), (7, 7)], 0)
    assert blocks_in({"blocks": {"second*": [(3,)]}}, "first.weight", (15, 7)) is None
    assert blocks_in({}, "first.weight", (15, 7)) is None


def _wrong(rank, world_size, blocks):
    model = shard_model(mlp())
    optimizer = Normed([{"params": [model.first.weight], "blocks": blocks}])
    mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        ([(7, 7)], "blocks of 'first.weight'"),
        ({"first.*": [(8, 7), (7, 7)], "*.qkv": []}, "blocks of '*.qkv': expected the name"),
    ],
)
def test_every_rank_is_told(blocks, says):
    assert_errors(errors_on_ranks(_wrong, 2, blocks), "ValueError", says)
