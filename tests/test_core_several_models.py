"""Ranks that call several models of equal names in another order: named, and nothing mixes."""

import copy
import itertools
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp import fully_shard
from tests.support.counting import CollectiveCounter
from tests.support.ranks import PLAIN, run_on_ranks

TIMEOUT_S = 5  # of a group; ranks of a busy machine may be seconds apart
STEPS = 3


def two_models(mesh, are_copies):
    """Two with equal names and other weights, and what each computes."""
    plain = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)) for _ in range(2)]
    for value, model in zip((1.0, 3.0), plain, strict=True):
        for parameter in model.parameters():
            nn.init.constant_(parameter, value)
    outputs = [model(torch.ones(1, 4)).item() for model in plain]
    sharded = [copy.deepcopy(plain[0]), copy.deepcopy(plain[1])]
    fully_shard(sharded[0], mesh=mesh)
    if are_copies:
        sharded[1] = copy.deepcopy(sharded[0])
        with torch.no_grad():
            for parameter in sharded[1].parameters():
                parameter.fill_(3.0)
    else:
        fully_shard(sharded[1], mesh=mesh)
    return sharded, outputs


# Over which backend, whether the second model is a copy of the first, and after how many steps.
SWAPS = [("gloo", False, 0), (PLAIN, True, 0), (PLAIN, False, STEPS), ("gloo", True, STEPS)]


def call_in_another_order(rank, world_size):
    """Of each two ranks, the second swaps the models; what each rank computed, or its error."""
    pairs, timeout = torch.arange(world_size).view(-1, 2).tolist(), timedelta(seconds=TIMEOUT_S)
    groups = [
        torch.distributed.new_group(pair, backend=backend, timeout=timeout)
        for pair, (backend, *_) in zip(pairs, SWAPS, strict=True)
    ]
    group, (_, are_copies, num_steps) = groups[rank // 2], SWAPS[rank // 2]
    models, outputs = two_models(DeviceMesh.from_group(group, "cpu"), are_copies)
    for _ in range(num_steps):
        for model in models:
            model(torch.ones(1, 4)).sum().backward()
    torch.distributed.barrier()
    try:
        for index in (1, 0) if rank % 2 else (0, 1):
            found = models[index](torch.ones(1, 4)).item()
            assert found == outputs[index], f"model {index}: {found} in place of {outputs[index]}"
    except RuntimeError as error:
        return str(error)
    return None


def test_models_called_in_another_order_are_named_and_nothing_mixes():
    """Those that wait for the timeout do so at the same time."""
    found = run_on_ranks(call_in_another_order, 2 * len(SWAPS), backend=PLAIN)
    for pair, how in enumerate(SWAPS):
        messages, (_, are_copies, num_steps) = found[2 * pair : 2 * pair + 2], how
        assert all(message is not None for message in messages), (how, messages)
        if num_steps > 0:
            assert any("order of units" in message for message in messages), (how, messages)
            continue
        other = "sharded module 1, copy 1" if are_copies else "sharded module 2"
        for message, (rank, name) in itertools.product(
            messages, enumerate(["sharded module 1", other])
        ):
            expected = f"rank {rank}: order of units: gather unit 'Sequential' ({name})"
            assert expected in message, how


def count_questions(rank, world_size, turns):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world_size,))
    models, _ = two_models(mesh, are_copies=False)
    asked = []
    for _ in range(3):
        with CollectiveCounter(mesh.get_group()) as counter:
            for index in turns:
                models[index](torch.ones(1, 4)).sum().backward()
        asked.append(sum(call.kind == "all_gather" for call in counter.control()))
    return asked


@pytest.mark.parametrize(("turns", "steady"), [((0, 1), 0), ((0, 0, 1), 0), ((0, 0, 0, 1), 2)])
def test_models_that_take_turns_ask_where_one_may_follow_itself_after_itself(turns, steady):
    for asked in run_on_ranks(count_questions, 2, turns):
        assert asked[0] > steady
        assert asked[-1] == steady, asked
