"""What the allocator of the device held at most, against the formula: two units at a time."""

import pytest
import torch
from torch import nn

from lightning_fsdp import shard_model
from tests.support.parity import PLANS
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.gpu

WIDTH, NUM_BLOCKS = 2048, 8
UNIT = 4 * WIDTH * WIDTH  # bytes, whole, fp32
SLACK = UNIT // 8  # activations of a few rows, and what the allocator rounds up


def _blocks():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_BLOCKS)))


def _measure(rank, world_size, plan):
    """Bytes beside the shards: in a forward without gradients, and in a step's backward."""
    model = shard_model(_blocks(), PLANS[plan], units=["Linear"])
    inputs = torch.randn(4, WIDTH)
    peaks = {}
    for _ in range(2):  # the first pass learns the order
        torch.cuda.synchronize()
        resting = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            model(inputs)
        peaks["forward"] = torch.cuda.max_memory_allocated() - resting
        peaks["after forward"] = torch.cuda.memory_allocated() - resting
        torch.cuda.reset_peak_memory_stats()
        model(inputs).sum().backward()
        peaks["step"] = torch.cuda.max_memory_allocated() - resting
        peaks["gradients"] = torch.cuda.memory_allocated() - resting
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        model.zero_grad()
        peaks["rest"] = torch.cuda.memory_allocated() - resting
    return peaks


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_at_most_two_units_are_whole(world_size, plan):
    share = UNIT // world_size
    for peaks in run_on_ranks(_measure, world_size, plan):
        # Under ZeRO-2 whole copies stay for the next forward, until an optimizer has stepped.
        kept = NUM_BLOCKS * UNIT if plan == "zero2" else 0
        assert kept <= peaks["after forward"] <= kept + SLACK
        assert peaks["rest"] <= SLACK
        assert peaks["gradients"] <= NUM_BLOCKS * share + kept + SLACK
        if plan == "zero3":
            assert 2 * UNIT <= peaks["forward"] <= 2 * UNIT + SLACK
            # Towards the end of the backward: two units whole; the local gradients of one that
            # travels and of one that is computed, the shard that the first becomes (on one rank it
            # is the region itself), and the reduced gradients of those before.
            arriving = share if world_size > 1 else 0
            reduced = (NUM_BLOCKS - 3) * share
            assert peaks["step"] <= 2 * UNIT + 2 * UNIT + arriving + reduced + SLACK
