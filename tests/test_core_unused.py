"""Parameters and modules that some ranks leave out, against plain torch."""

import pytest
import torch
from torch import nn

from lightning_fsdp import shard_model
from tests.support.models import (
    mlp,
    mlp_batch,
)
from tests.support.one_exchange import train_on_rank
from tests.support.parity import (
    COMBINATIONS,
    OPTIMIZERS,
    PLANS,
    assert_ranks_agree,
    assert_traces_match,
    make_batches,
    optional_batch,
    optional_loss,
    sgd,
    train_reference,
)
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

# Used by one rank, by the other, by none, by all, and by none again, where momentum and moments
# exist.
USERS = [{0}, {1}, set(), {0, 1, 2}, set()]
CLIP = (0.3, 2.0)


def _train_with_optional_parameter(rank, world_size):
    traces = {}
    batches = make_batches(
        optional_batch(USERS), num_steps=5, num_micro_batches=1, world_size=world_size
    )
    for plan, optimizer in COMBINATIONS:
        model = shard_model(mlp(), PLANS[plan])
        traces[plan, optimizer] = train_on_rank(
            model, batches, optional_loss, OPTIMIZERS[optimizer](model.parameters()), rank
        )
    return traces


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_parameter_may_be_unused_by_some_ranks_or_by_all(world_size):
    """Unused by some: zeros in the mean. Unused by all: no gradient, so weight decay leaves the
    parameter alone.
    """
    by_rank = run_on_ranks(_train_with_optional_parameter, world_size)
    batches = make_batches(
        optional_batch(USERS), num_steps=5, num_micro_batches=1, world_size=world_size
    )
    for combination in COMBINATIONS:
        expected = train_reference(
            mlp(), batches, optional_loss, OPTIMIZERS[combination[1]], joined=False
        )
        assert expected.gradients[2]["bonus"] is None
        traces = [traces[combination] for traces in by_rank]
        assert_ranks_agree(traces)
        assert_traces_match(traces[0], expected, atol=1e-7, what=str(combination))


class Adaptive(nn.Module):
    """Targets choose which of its parts are called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inlet = nn.Linear(4, 8)
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(8, 9, [2, 5], div_value=2.0)

    def forward(self, batch):
        return self.softmax(self.inlet(batch["inputs"]), batch["targets"]).loss


def _targets_of_one_cluster(step, micro_batch, rank):
    targets = torch.tensor([[0, 1], [2, 4], [5, 8]][(step + rank) % 3])
    return {"inputs": torch.ones(2, 4) + step, "targets": targets}


def _train_with_clusters(rank, world_size, batches):
    model = shard_model(Adaptive())
    return train_on_rank(model, batches, Adaptive.__call__, sgd(model.parameters()), rank)


def test_of_an_adaptive_softmax_each_rank_uses_what_its_targets_need():
    batches = make_batches(_targets_of_one_cluster, num_steps=3, num_micro_batches=1, world_size=2)
    expected = train_reference(Adaptive(), batches, Adaptive.__call__, sgd, joined=False)
    for trace in run_on_ranks(_train_with_clusters, 2, batches):
        assert_traces_match(trace, expected, atol=1e-6)


def _train_with_a_default_device(rank, world_size, plan):
    model, batches = (
        mlp(),
        make_batches(
            optional_batch(USERS), num_steps=5, num_micro_batches=1, world_size=world_size
        ),
    )
    with torch.device("meta"):
        shard_model(model, PLANS[plan])
        return train_on_rank(
            model, batches, optional_loss, sgd(model.parameters()), rank, clip=CLIP
        )


@pytest.mark.parametrize("plan", PLANS)
def test_where_the_user_makes_new_tensors_does_not_matter(plan):
    """What ranks tell each other stays on the host under any default device."""
    batches = make_batches(optional_batch(USERS), num_steps=5, num_micro_batches=1, world_size=2)
    expected = train_reference(mlp(), batches, optional_loss, sgd, clip=CLIP, joined=False)
    for trace in run_on_ranks(_train_with_a_default_device, 2, plan):
        assert_traces_match(trace, expected, atol=1e-7)


class _LeavesOut(nn.Module):
    """Blocks that pass their inputs on, and a last parameter of the root, as a rank likes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.blocks = nn.Linear(7, 7), nn.ModuleList(_Droppable() for _ in range(3))
        self.last, self.scale = nn.Linear(7, 3), nn.Parameter(torch.ones(3))

    def forward(self, inputs, dropped, is_scaled):
        hidden = self.first(inputs)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, index == dropped)
        outputs = self.last(hidden)
        return outputs * self.scale if is_scaled else outputs


class _Droppable(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(7, 9), nn.Linear(9, 7)

    def forward(self, inputs, is_dropped):
        return inputs if is_dropped else inputs + self.down(torch.tanh(self.up(inputs)))


def leave_out_batch(step, micro_batch, rank):
    choice = {"dropped": (step + 2 * rank) % 4, "is_scaled": (step + rank) % 3 == 0}
    return {**mlp_batch(step, micro_batch, rank), **choice}


def leave_out_loss(model, batch):
    outputs = model(batch["inputs"], batch["dropped"], batch["is_scaled"])
    return 0.25 * torch.nn.functional.mse_loss(outputs, batch["targets"])


def _train_leaving_out(rank, world_size, plan):
    batches = make_batches(leave_out_batch, num_steps=5, num_micro_batches=2, world_size=world_size)
    model = shard_model(_LeavesOut(), PLANS[plan])
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    return train_on_rank(model, batches, leave_out_loss, optimizer, rank, accumulation="sum")


@pytest.mark.parametrize("plan", PLANS)
def test_what_ends_a_unit_may_differ_between_ranks(plan):
    traces = run_on_ranks(_train_leaving_out, 2, plan)
    batches = make_batches(leave_out_batch, num_steps=5, num_micro_batches=2, world_size=2)
    expected = train_reference(
        _LeavesOut(), batches, leave_out_loss, OPTIMIZERS["sgd"], joined=False
    )
    assert_ranks_agree(traces)
    assert_traces_match(traces[0], expected, atol=2e-7, what=plan)
