"""Elementwise optimizers, built before sharding or after it, with groups and state."""

import pytest
import torch

from lightning_fsdp import shard_model
from tests.support.models import (
    mlp,
    mlp_loss,
)
from tests.support.one_exchange import train_on_rank
from tests.support.parity import (
    assert_ranks_agree,
    assert_traces_match,
    batches_for,
    train_reference,
)
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

ELEMENTWISE = {
    "adamw plain": lambda p: torch.optim.AdamW(
        p, lr=1e-3, weight_decay=0.1, eps=1e-6, foreach=False
    ),
    "adamw foreach": lambda p: torch.optim.AdamW(
        p, lr=1e-3, weight_decay=0.1, eps=1e-6, foreach=True
    ),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, eps=1e-6, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-6, amsgrad=True),
    "sgd nesterov foreach": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, foreach=True
    ),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-4, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3, eps=1e-6),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3, eps=1e-6),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3, eps=1e-6),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-6),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adagrad foreach": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-6, foreach=True),
    "rprop foreach": lambda p: torch.optim.Rprop(p, lr=1e-3, foreach=True),
    "rmsprop foreach": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-4, foreach=True),
    "nadam foreach": lambda p: torch.optim.NAdam(p, lr=1e-3, eps=1e-6, foreach=True),
    "radam foreach": lambda p: torch.optim.RAdam(p, lr=1e-3, eps=1e-6, foreach=True),
    "adamax foreach": lambda p: torch.optim.Adamax(p, lr=1e-3, eps=1e-6, foreach=True),
    "amsgrad foreach": lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-6, amsgrad=True, foreach=True),
    "amsgrad fused": lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-6, amsgrad=True, fused=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-6, fused=True),
    "asgd foreach": lambda p: torch.optim.ASGD(p, lr=1e-2, foreach=True),
    "adadelta foreach": lambda p: torch.optim.Adadelta(p, lr=0.1, foreach=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}
# Sharding does not look at what kind of optimizer there is, but at the state that it has: of these,
# Adagrad has some at once.
BUILT = {
    name: ("before", "after") if "adagrad" in name else ("before", "after")[i % 2 :][:1]
    for i, name in enumerate(ELEMENTWISE)
}


def _train_with_every_optimizer(rank, world_size):
    traces, batches = {}, batches_for("mlp", world_size, num_micro_batches=1)
    for name, make_optimizer in ELEMENTWISE.items():
        for built in BUILT[name]:
            model = mlp()
            if built == "before":
                optimizer = make_optimizer(model.parameters())
                shard_model(model)
            else:
                shard_model(model)
                optimizer = make_optimizer(model.parameters())
            try:
                traces[name, built] = train_on_rank(model, batches, mlp_loss, optimizer, rank)
            except RuntimeError as error:
                traces[name, built] = f"{name}, built {built}: {error}"
    return traces


def test_every_elementwise_optimizer_built_before_or_after_sharding():
    by_rank = run_on_ranks(_train_with_every_optimizer, 3)
    batches = batches_for("mlp", 3, num_micro_batches=1)
    errors = [result for result in by_rank[0].values() if isinstance(result, str)]
    assert not errors, "\n".join(errors)
    for name, make_optimizer in ELEMENTWISE.items():
        expected = train_reference(mlp(), batches, mlp_loss, make_optimizer)
        for built in BUILT[name]:
            traces = [traces[name, built] for traces in by_rank]
            assert_ranks_agree(traces, name)
            assert_traces_match(traces[0], expected, atol=1e-6, what=f"{name}, built {built}")


def _optimizer_with_groups_and_state(rank, world_size):
    """Two groups and an optimizer that has stepped before sharding: its state goes on."""
    batches = batches_for("mlp", world_size, num_steps=2, num_micro_batches=1)
    traces = []
    for is_sharded in (True, False):
        model = mlp()
        decayed = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "lr": 1e-2}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        if is_sharded:
            shard_model(model)
            assert [p.ndim for p in decayed] == [p.ndim for p in model.parameters() if p.ndim >= 2]
            traces.append(train_on_rank(model, batches, mlp_loss, optimizer, rank))
        else:
            traces.append(train_reference(model, batches, mlp_loss, lambda _: optimizer))  # noqa: B023
    assert_traces_match(*traces, atol=1e-7)


def test_param_groups_survive_sharding():
    run_on_ranks(_optimizer_with_groups_and_state, 2)
