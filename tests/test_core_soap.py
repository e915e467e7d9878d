"""Optimizers of another package, unmodified: SOAP and Shampoo keep matrices per dimension.

The reference is the same optimizer in one process, with the gradients that the ranks had.
"""

import pytest
import pytorch_optimizer

from lightning_fsdp import (
    full_optimizer_state_dict,
    full_state_dict,
    load_sharded,
    save_sharded,
    shard_model,
)
from tests.support.models import causal_lm, lm_loss, token_batch
from tests.support.one_exchange import train_on_rank
from tests.support.optimizers import assert_same_state
from tests.support.parity import Trace, assert_traces_match, make_batches
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

OPTIMIZERS = {
    "soap": lambda p: pytorch_optimizer.SOAP(p, lr=0.01, precondition_frequency=2),
    "shampoo": lambda p: pytorch_optimizer.Shampoo(p, lr=0.01),
    "lamb": lambda p: pytorch_optimizer.Lamb(p, lr=0.01, max_grad_norm=0.0),
}


def _batches(world_size, num_steps):
    return make_batches(
        token_batch, num_steps=num_steps, num_micro_batches=1, world_size=world_size
    )


def _matrices(model):
    return [p for p in model.parameters() if p.ndim == 2]


def _train(rank, world_size, folder, name):
    model = shard_model(causal_lm())
    optimizer = OPTIMIZERS[name](_matrices(model))
    trace = train_on_rank(model, _batches(world_size, 3), lm_loss, optimizer, rank)
    save_sharded(folder, model, [optimizer])
    return trace, full_optimizer_state_dict(optimizer), full_state_dict(model)


def _go_on(rank, world_size, folder, name):
    model = shard_model(causal_lm(seed=5))
    optimizer = OPTIMIZERS[name](_matrices(model))
    load_sharded(folder, model, [optimizer])
    return train_on_rank(model, _batches(world_size, 3), lm_loss, optimizer, rank)


def _in_one_process(model, optimizer, trace):
    found = Trace()
    for gradients, loss in zip(trace.gradients, trace.losses, strict=True):
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].clone()
        found.record(model)
        optimizer.step()
        found.record_step(model, loss)
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_they_train_and_go_on_elsewhere_as_in_one_process(name, tmp_path):
    found = run_on_ranks(_train, 2, tmp_path, name)
    model = causal_lm()
    optimizer = OPTIMIZERS[name](_matrices(model))
    expected = _in_one_process(model, optimizer, found[0][0])
    state = optimizer.state_dict()
    for trace, ours, _ in found:
        assert_traces_match(trace, expected, atol=0, what=name)
        assert_same_state(ours["state"], state["state"])
    went_on = run_on_ranks(_go_on, 3, tmp_path, name)
    expected = _in_one_process(model, optimizer, went_on[0])
    for trace in went_on:
        assert_traces_match(trace, expected, atol=0, what=name)
