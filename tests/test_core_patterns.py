"""Ways to train beside one forward and one backward: no more is gathered and reduced than under
torch's FSDP2, and the weights are the same.
"""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

from lightning_fsdp import fully_shard
from tests.support.counting import CollectiveCounter
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

WIDTH = 8


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class _Model(nn.Module):
    """Blocks between an inlet and two heads, of which a step uses one or both."""

    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.recomputes_by = None

    def forward(self, x, heads=1):
        x = self.inlet(x)
        for block in self.blocks:
            how = self.recomputes_by
            x = block(x) if how is None else checkpoint(block, x, use_reentrant=how == "reentrant")
        return sum(head(x) for head in self.heads[:heads])


def _plain(model, x, y):
    model(x).sum().backward()


def _two_passes(model, x, y):
    (model(x) - model(y)).square().sum().backward()


def _two_backwards(model, x, y):
    model(x).sum().backward()
    model(y).square().sum().backward()


def _both_heads(model, x, y):
    model(x, heads=2).square().sum().backward()


def _evaluated(model, x, y):
    """Before the forward: after a backward, torch's ZeRO-2 would step with what is whole then."""
    with torch.no_grad():
        targets = [model(y), model(2 * y), model(3 * y)]
    (model(x) - sum(targets)).square().sum().backward()


def _accumulated(model, x, y):
    model.set_requires_gradient_sync(False)
    model(x).square().sum().backward()
    model.set_requires_gradient_sync(True)
    model(y).sum().backward()


def _twice_through_a_graph(model, x, y):
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def _recomputed(model, x, y):
    model.recomputes_by = "saved tensors"
    model(x).square().sum().backward()


def _recomputed_in_a_backward(model, x, y):
    model.recomputes_by = "reentrant"
    model(x.requires_grad_()).square().sum().backward()


def _blocks_alone(model, x, y):
    for block in model.blocks:
        block(x).sum().backward()


def _first_ones_frozen(model, x, y):
    for part in (model.inlet, *model.blocks[:2]):
        part.requires_grad_(False)
    model(x).square().sum().backward()


PATTERNS = [
    *(_plain, _two_passes, _two_backwards, _both_heads, _evaluated, _accumulated),
    *(_twice_through_a_graph, _recomputed, _recomputed_in_a_backward, _blocks_alone),
    _first_ones_frozen,
]


def _run(rank, world_size, shard, pattern, zero_stage):
    """Gathers and reductions of a steady step, and the weights after it."""
    torch.manual_seed(0)
    model = _Model()
    for unit in (model.inlet, *model.blocks, *model.heads, model):
        shard(unit, reshard_after_forward=zero_stage == 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        x, y = torch.randn(2, 2, WIDTH, generator=torch.Generator().manual_seed(rank))
        with CollectiveCounter() as counter:
            pattern(model, x, y)
        optimizer.step()
        optimizer.zero_grad()
    counts = counter.num_gathers(world_size), counter.num_reductions(world_size)
    # Under ZeRO-2 of torch, modules may hold whole parameters now.
    return counts, [p.full_tensor() for p in optimizer.param_groups[0]["params"]]


def _compare(rank, world_size, zero_stage):
    more = {}
    for pattern in PATTERNS:
        ours, weights = _run(rank, world_size, fully_shard, pattern, zero_stage)
        theirs, expected = _run(rank, world_size, torch_fully_shard, pattern, zero_stage)
        for one, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(one, other, msg=lambda m, p=pattern: f"{p.__name__}: {m}")
        if ours[0] > theirs[0] or ours[1] > theirs[1]:
            more[pattern.__name__] = (ours, theirs)
    return more


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_no_more_is_gathered_and_reduced_than_under_fsdp2(zero_stage):
    for more in run_on_ranks(_compare, 2, zero_stage):
        assert not more, "gathers and reductions: ours, FSDP2's"
