"""State of optimizers over whole tensors: saved, loaded, copied, and kept from before sharding."""

import copy

import pytest
import torch

from lightning_fsdp import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    load_sharded,
    optimizers_follow,
    save_sharded,
    shard_model,
)
from lightning_fsdp.core.optimizers.whole_tensors import whole_tensors_of
from recipes.optimizer import MuonAndAdamW, OptimizerConfig
from tests.support.cases import each_on_ranks
from tests.support.models import causal_lm, lm_loss
from tests.support.one_exchange import train_on_rank
from tests.support.optimizers import Normed, assert_same_state
from tests.support.parity import assert_traces_match
from tests.support.ranks import run_on_ranks
from tests.support.whole_tensors import (
    OPTIMIZERS,
    AsOne,
    backward,
    batches_of,
    matrices_of,
    muon,
    replay,
)

pytestmark = pytest.mark.usefixtures("kept_ranks")

# --- from one number of ranks to another, and to a copy ---


def _lm(seed=1):
    return causal_lm(num_blocks=2, seed=seed)


def _batches(world_size):
    return batches_of(world_size, num_steps=2, num_micro_batches=1)


def _save(rank, world_size, name, folder):
    model = shard_model(_lm())
    optimizers = OPTIMIZERS[name](model)
    trace = train_on_rank(model, _batches(world_size), lm_loss, AsOne(optimizers), rank)
    save_sharded(folder / name, model, optimizers)
    wholes = [full_optimizer_state_dict(o) for o in optimizers], full_state_dict(model)
    if rank == 0:
        torch.save(wholes, folder / f"{name}.pt")
    return trace


def _go_on(rank, world_size, name, folder):
    """From a folder, and from whole state; both must be the same, and go on as the same."""
    traces, wholes = [], torch.load(folder / f"{name}.pt")
    batches = _batches(world_size)
    for is_sharded in (True, False):
        model = shard_model(_lm(seed=5))
        optimizers = OPTIMIZERS[name](model)
        if is_sharded:
            load_sharded(folder / name, model, optimizers)
        else:
            load_full_state_dict(model, wholes[1])
            for optimizer, state in zip(optimizers, wholes[0], strict=True):
                load_full_optimizer_state_dict(optimizer, state)
        for optimizer, state in zip(optimizers, wholes[0], strict=True):
            assert_same_state(full_optimizer_state_dict(optimizer), state)
            first = full_optimizer_state_dict(optimizer, rank0_only=True)
            assert_same_state(first["state"], state["state"] if rank == 0 else {})
        traces.append(train_on_rank(model, batches, lm_loss, AsOne(optimizers), rank))
    assert_traces_match(traces[0], traces[1], atol=0)
    return traces[0]


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        (2, 3, [*OPTIMIZERS]),
        (3, 1, ["mixed"]),
        (1, 2, ["adafactor"]),
        (2, 2, ["muon"]),
    ],
)
def test_checkpoints_move_between_numbers_of_ranks(before, after, names, tmp_path):
    saved = each_on_ranks(_save, before, names, tmp_path)
    for name, traces in each_on_ranks(_go_on, after, names, tmp_path).items():
        for found in traces:
            model = _lm()
            optimizers = OPTIMIZERS[name](model)
            replay(model, saved[name][0], optimizers)
            expected = replay(model, found, optimizers)
            assert_traces_match(found, expected, atol=0, what=name)


def _copy(rank, world_size):
    model = shard_model(_lm())
    optimizers = muon(model)
    train_on_rank(model, batches_of(world_size), lm_loss, AsOne(optimizers), rank)
    copied, copies = copy.deepcopy((model, optimizers))
    ours = train_on_rank(model, batches_of(world_size, 2), lm_loss, AsOne(optimizers), rank)
    theirs = train_on_rank(copied, batches_of(world_size, 2), lm_loss, AsOne(copies), rank)
    assert_traces_match(ours, theirs, atol=0)
    assert copies[0] is not optimizers[0]


def test_copies_go_on_alike():
    run_on_ranks(_copy, 2)


# --- state of before sharding, and who keeps it ---


def _stepped_before_sharding(rank, world_size, make, follow):
    model = causal_lm()
    optimizer = make(model)
    backward(model, 0)
    optimizer.step()
    model.zero_grad()
    if follow:
        with optimizers_follow(model, optimizer):
            shard_model(model)
    else:
        shard_model(model)
    for step in (1, 2):
        backward(model, 0, step)  # the same on all ranks
        optimizer.step()
        optimizer.zero_grad()
    return full_state_dict(model), full_optimizer_state_dict(optimizer), len(optimizer.state)


def _in_one_process(make):
    model = causal_lm()
    optimizer = make(model)
    for step in range(3):
        backward(model, 0, step)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), optimizer.state_dict()


def _normed(model):
    return Normed(matrices_of(model))


def _muon_and_adamw(model):
    matrices = matrices_of(model)
    ids = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in ids]
    return MuonAndAdamW(matrices, [{"params": others}], OptimizerConfig(lr=0.01))


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("make", [_normed, _muon_and_adamw])
def test_state_of_before_sharding_goes_on(make, follow):
    found = run_on_ranks(_stepped_before_sharding, 2, make, follow)
    weights, state = _in_one_process(make)
    for ours, our_state, _ in found:
        for name, value in weights.items():
            torch.testing.assert_close(ours[name], value, atol=1e-6, rtol=0)
        assert set(our_state["state"]) == set(state["state"])
    if make is _normed:  # no rank keeps what another owns; the entry of no parameter is on both
        assert sum(num_entries for _, _, num_entries in found) == len(state["state"]) + 1


def _save_state_of_before(rank, world_size, folder):
    model = causal_lm()
    optimizer = _normed(model)
    backward(model, 0)
    optimizer.step()
    model.zero_grad()
    shard_model(model)
    for step in (1, 2):
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    save_sharded(folder, model, [optimizer])
    state = full_optimizer_state_dict(optimizer)["state"]
    other = shard_model(causal_lm(seed=5))
    restored = _normed(other)
    load_sharded(folder, other, [restored])
    assert_same_state(full_optimizer_state_dict(restored)["state"], state)


def test_only_owners_write_state(tmp_path):
    run_on_ranks(_save_state_of_before, 2, tmp_path)


def _save_adafactor(rank, world_size, folder):
    model = shard_model(causal_lm())
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.02)
    backward(model, rank)
    optimizer.step()
    save_sharded(folder, model, [optimizer])
    return full_optimizer_state_dict(optimizer)


def test_a_plain_model_reads_state_of_other_shapes(tmp_path):
    expected = run_on_ranks(_save_adafactor, 2, tmp_path)[0]
    model = causal_lm(seed=5)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.02)
    load_sharded(tmp_path, model, [optimizer])
    assert_same_state(optimizer.state_dict()["state"], expected["state"])


class _KeepsBases(torch.optim.Optimizer):
    """Beside each matrix ``(m, n)``, as Shampoo has them: eigenvectors, which lie in columns."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                square = state.setdefault(
                    "square", gradient.new_zeros(len(gradient), len(gradient))
                )
                square.add_(gradient @ gradient.T)
                state["bases"] = torch.linalg.eigh(square)[1]
                parameter.sub_(gradient, alpha=0.02)


def _rolled_back(rank, world_size, folder):
    model = shard_model(causal_lm())
    optimizer = _KeepsBases(matrices_of(model))
    backward(model, rank)
    optimizer.step()
    save_sharded(folder, model, [optimizer])
    before = full_optimizer_state_dict(optimizer)["state"]
    backward(model, rank, 1)
    optimizer.step()
    bases = [state["bases"] for state in optimizer.state.values() if "bases" in state]
    assert not any(each.is_contiguous() for each in bases)
    load_sharded(folder, model, [optimizer])
    assert_same_state(full_optimizer_state_dict(optimizer)["state"], before)


def test_state_that_lies_in_columns_is_read_over_that_of_a_later_step(tmp_path):
    run_on_ranks(_rolled_back, 2, tmp_path)


def _copied(rank, world_size):
    """Owners that came about in three steps are not those of a plan of all at once."""
    model = shard_model(causal_lm())
    parts = [[p for p in block.parameters() if p.ndim == 2] for block in model.blocks]
    optimizer = torch.optim.Muon(parts[0][:1], lr=0.02)
    for step, more in enumerate([[*parts[0][1:], *parts[1]], [*parts[2], model.head.weight], []]):
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        if more:
            optimizer.add_param_group({"params": more})
    copied_model, copied = copy.deepcopy((model, optimizer))
    state = full_optimizer_state_dict(optimizer)
    assert_same_state(full_optimizer_state_dict(copied)["state"], state["state"])
    owners = [
        [owned.owner for owned in whole_tensors_of(each).agree_on_owners()]
        for each in (optimizer, copied)
    ]
    assert owners[0] == owners[1]
    assert copied_model is not model


def test_a_copy_has_the_same_owners():
    run_on_ranks(_copied, 2)
