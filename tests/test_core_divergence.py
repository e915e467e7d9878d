"""Ranks that do different things: a named error on every rank, never a hang or mixed-up tensors."""

import itertools
import os
import signal
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch import nn

from lightning_fsdp import ZERO2, ZERO3, full_state_dict, fully_shard, shard_model
from tests.support.events import wake
from tests.support.ranks import PLAIN, run_on_ranks

TIMEOUT_S = 5  # of a group; ranks of a busy machine may be seconds apart
AT_ONCE_S = 30  # not after the timeout of the default group, which is four times as long


class Skipping(nn.Module):
    """Three units; the second can be left out, or run after the third."""

    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x, order=(0, 1, 2)):
        for index in order:
            x = torch.tanh(self.units[index](x))
        return x.sum()


def group_of_two(rank, world_size, backends=None):
    """Of each two ranks, with a short timeout, as a mesh would carry it: pairs wait at once."""
    pairs, timeout = torch.arange(world_size).view(-1, 2).tolist(), timedelta(seconds=TIMEOUT_S)
    groups = [
        torch.distributed.new_group(pair, backend=backend, timeout=timeout)
        for pair, backend in zip(pairs, backends or ["gloo"] * len(pairs), strict=True)
    ]
    return groups[rank // 2]


def shard_over(group, plan):
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(0)
    return shard_model(Skipping(), plan, mesh=mesh)


def error_of(function):
    start = time.monotonic()
    try:
        function()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return None, time.monotonic() - start


ORDERS = {"skips": (0, 2), "swaps": (0, 2, 1)}


def leave_the_order(rank, world_size, plan, step):
    """Of each two ranks, the second, in the way of the pair."""
    model = shard_over(group_of_two(rank, world_size), plan)
    order = list(ORDERS.values())[rank // 2]
    for _ in range(step):
        model(torch.ones(2, 6)).backward()
        model.zero_grad()
        model.reshard()
        for unit in model.units:
            unit.reshard()
    torch.distributed.barrier()
    return error_of(lambda: model(torch.ones(2, 6), order if rank % 2 else (0, 1, 2)).backward())


@pytest.mark.parametrize("plan", [ZERO2, ZERO3], ids=["zero2", "zero3"])
def test_in_the_first_step_every_rank_names_both_sides_at_once(plan):
    outcomes = run_on_ranks(leave_the_order, 2 * len(ORDERS), plan, 0)
    for rank, (message, seconds) in enumerate(outcomes):
        how = list(ORDERS)[rank // 2]
        assert "ranks disagree" in message, how
        assert "rank 0: order of units: gather unit 'units.1'" in message, how
        assert "rank 1: order of units: gather unit 'units.2'" in message, how
        assert "(experts) is to be one unit, by units=" in message, how
        assert seconds < TIMEOUT_S, how


def test_later_the_rank_that_leaves_the_order_is_named_within_the_timeout():
    outcomes = run_on_ranks(leave_the_order, 2 * len(ORDERS), ZERO3, 2)
    for rank, (message, seconds) in enumerate(outcomes):
        how = list(ORDERS)[rank // 2]
        assert f"(rank {rank % 2} of 2)" in message, how
        if rank % 2:
            assert "order of units (rank 1 of 2), about to: " in message, how
            assert "expected every rank to take part" in message, how
        assert seconds < 4 * TIMEOUT_S, how


def shard_different_models(rank, world_size):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + rank))
    kinds = {name: type(p) for name, p in model.named_parameters()}
    outcome = error_of(lambda: fully_shard(model))
    assert {name: type(p) for name, p in model.named_parameters()} == kinds, "half sharded"
    return outcome


def test_different_models_are_refused_on_every_rank_and_left_alone():
    for message, seconds in run_on_ranks(shard_different_models, 2):
        assert "ranks disagree" in message
        assert "1.weight (4, 4)" in message
        assert "1.weight (5, 4)" in message
        assert seconds < AT_ONCE_S


def one_rank_passes_a_wrong_argument(rank, world_size):
    model = nn.Sequential(nn.Linear(4, 4))
    policy = "bf16" if rank == 1 else None
    return error_of(lambda: fully_shard(model, mp_policy=policy))


def test_an_argument_that_one_rank_refuses_is_refused_on_every_rank():
    for message, seconds in run_on_ranks(one_rank_passes_a_wrong_argument, 2):
        assert "expected a MixedPrecisionPolicy for mp_policy, got 'bf16'" in message
        assert seconds < AT_ONCE_S


def one_rank_shards_more_often(rank, world_size):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def run():
        if rank == 1:
            fully_shard(model[0])
        fully_shard(model)
        model(torch.ones(1, 4))

    return error_of(run)


def test_ranks_that_shard_differently_often_are_named():
    for message, _ in run_on_ranks(one_rank_shards_more_often, 2):
        assert "ranks disagree" in message
        assert "sharding Linear" in message
        assert "sharding Sequential" in message


class Forking(nn.Module):
    """Three equal units, of which each call runs one."""

    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))
        self.inlet = nn.Linear(6, 6)

    def forward(self, x, which):
        return self.units[which](self.inlet(x))


WAYS = [(0, 1), (0, 2)]  # after 1, which 2 and 0 have followed
FORKS = list(itertools.product(("gloo", PLAIN), WAYS))  # all of them wait for the timeout at once


def fork_on_known_ways(rank, world_size):
    """Each two ranks in the ways of the pair, over the backend of the pair."""
    torch.manual_seed(0)
    _, ways = FORKS[rank // 2]
    group = group_of_two(rank, world_size, [backend for backend, _ in FORKS])
    way = ways[rank % 2]
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu")
    plain = Forking()
    model = Forking()
    model.load_state_dict(plain.state_dict())
    shard_model(model, mesh=mesh)
    inputs, found = torch.ones(1, 6), []
    with torch.no_grad():
        for which in (0, 1, 2, 0, 2, 1) * 2:
            model(inputs, which)
        torch.distributed.barrier()
        message, _ = error_of(lambda: found.append(model(inputs, way)))
        is_right = [torch.allclose(output, plain(inputs, way)) for output in found]
    return message, is_right


def test_ranks_that_take_different_known_ways_are_named_and_nothing_mixes():
    outcomes = run_on_ranks(fork_on_known_ways, 2 * len(FORKS), backend=PLAIN)
    for pair, how in enumerate(FORKS):
        of_pair = outcomes[2 * pair : 2 * pair + 2]
        assert any("order of units" in (message or "") for message, _ in of_pair), how
        for message, is_right in of_pair:
            assert message is not None or is_right == [True], f"{how}: computed with mixed weights"


BACKENDS = ["gloo", PLAIN]


def leave_out_a_backward(rank, world_size):
    """Of each two ranks, the second; all that both do is known."""
    group = group_of_two(rank, world_size, BACKENDS)
    model, found, plain = shard_over(group, ZERO3), [], Skipping()
    plain.load_state_dict(full_state_dict(model))
    inputs = torch.ones(2, 6)

    def evaluate():
        with torch.no_grad():
            found.append(model(inputs))

    for _ in range(3):
        evaluate()
        model(inputs).backward()
    torch.distributed.barrier()
    found.clear()
    messages = [error_of(evaluate if rank % 2 else model(inputs).backward)[0]]
    messages.append(error_of(evaluate)[0])
    return next(filter(None, messages)), [torch.allclose(each, plain(inputs)) for each in found]


def test_a_rank_that_leaves_out_a_backward_is_named_and_nothing_mixes():
    outcomes = run_on_ranks(leave_out_a_backward, 2 * len(BACKENDS), backend=PLAIN)
    for pair, backend in enumerate(BACKENDS):
        of_pair = outcomes[2 * pair : 2 * pair + 2]
        # One rank asks before it moves any data; the other waits for it.
        assert any(message.startswith("order of units") for message, _ in of_pair), of_pair
        for _, is_right in of_pair:
            assert all(is_right), f"{backend}: computed with mixed weights"


DOINGS = {
    "step": "gather of unit 'units.0'",
    "full_tensor": "full_tensor of 'units.0.weight'",
    "full_tensor on rank 0": "full_tensor of 'units.0.bias'",
    "norm": "norm of gradients",
    "agreement": "order of units",
}


def sleep_and_go_on(rank, world_size, backend):
    """Of each two ranks, the second is stopped until the first has given up, and goes on."""
    group = group_of_two(rank, world_size, [backend] * len(DOINGS))
    model = shard_over(group, ZERO3)
    for _ in range(3):  # from then on nothing is asked
        model(torch.ones(2, 6)).backward()
    parameter = model.units[0].weight
    doings = {
        "step": lambda: model(torch.ones(2, 6)).backward(),
        "full_tensor": parameter.full_tensor,
        "full_tensor on rank 0": partial(model.units[0].bias.full_tensor, rank0_only=True),
        "norm": lambda: model.clip_grad_norm_(1.0),
        "agreement": lambda: model(torch.ones(2, 6), (2, 1, 0)).backward(),
    }
    pids = [0] * world_size
    torch.distributed.all_gather_object(pids, os.getpid())
    if rank % 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    message, _ = error_of(doings[list(DOINGS)[rank // 2]])
    if rank % 2 == 0:
        wake(pids[rank + 1])
    return message


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_wakes_after_the_timeout_names_what_it_was_about_to_do(backend):
    messages = run_on_ranks(sleep_and_go_on, 2 * len(DOINGS), backend, backend=backend)
    for rank, message in enumerate(messages):
        what, names = list(DOINGS.items())[rank // 2]
        assert message is not None, what
        assert names in message, what
        assert f"rank {rank % 2} of 2" in message, what
