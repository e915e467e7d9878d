"""A node of the graph may run a backward of its own, here or in another thread: it belongs to the
one around it, and gradients are those of one plain process.
"""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_fsdp import gradients, shard_model
from tests.support.models import TASKS
from tests.support.one_exchange import train_on_rank
from tests.support.parity import PLANS, adamw, assert_traces_match, make_batches, train_reference
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

TASK = TASKS["lm"]


class _Apart(torch.autograd.Function):
    """A module's graph in a node: its backward runs a backward."""

    @staticmethod
    def forward(ctx, run, module, x):
        ctx.run = run
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = module(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, gradient):
        ctx.run(lambda: torch.autograd.backward(ctx.y, gradient))
        return None, None, ctx.x.grad


def _in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


CALLS = {
    "reentrant checkpoint": lambda module, x: checkpoint(module, x, use_reentrant=True),
    "backward in a node": lambda module, x: _Apart.apply(lambda function: function(), module, x),
    "backward in a thread": lambda module, x: _Apart.apply(_in_a_thread, module, x),
}


class _Calling(nn.Module):
    def __init__(self, inner, how):
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, x):
        return CALLS[self.how](self.inner, x)


def _model(how):
    """All blocks but the last are called so."""
    model = TASK.build()
    for index in range(len(model.blocks) - 1):
        model.blocks[index] = _Calling(model.blocks[index], how)
    return model


def _batches(world_size):
    return make_batches(TASK.make_batch, num_steps=2, num_micro_batches=2, world_size=world_size)


# Every two of a plan, a way to accumulate and what is a unit.
CASES_OF = {
    "Block": [("zero2", "local"), ("zero3", "sum")],
    "_Calling": [("zero2", "sum"), ("zero3", "local")],
}


def _train(rank, world_size, how, units):
    traces, micro_batches = {}, {}
    for plan, accumulation in CASES_OF[units]:
        model = shard_model(_model(how), PLANS[plan], units=[units])
        seen = micro_batches[plan, accumulation] = set()
        gradients(model).on_reduced(lambda name, shard, index, seen=seen: seen.add(index))
        traces[plan, accumulation] = train_on_rank(
            model,
            _batches(world_size),
            TASK.loss,
            adamw(model.parameters()),
            rank,
            accumulation=accumulation,
            clip=(0.3, 2.0),
        )
    return traces, micro_batches


@pytest.mark.parametrize("units", CASES_OF, ids=["around", "inside"])
@pytest.mark.parametrize("how", CALLS)
def test_a_backward_inside_of_a_backward_belongs_to_it(how, units):
    for traces, micro_batches in run_on_ranks(_train, 2, how, units, timeout_s=280):
        reference = train_reference(
            TASK.build(), _batches(2), TASK.loss, adamw, clip=(0.3, 2.0), joined=False
        )
        for case, trace in traces.items():
            # Names say through which modules; the order is the same.
            for ours, theirs in (
                (trace.gradients, reference.gradients),
                (trace.parameters, reference.parameters),
            ):
                for step, expected in zip(ours, theirs, strict=True):
                    for name in list(step):
                        step[name.replace(".inner", "")] = step.pop(name)
                    assert list(step) == list(expected)
            assert_traces_match(trace, reference, atol=TASK.atol, what=str(case))
        assert micro_batches == {
            (plan, accumulation): {1} if accumulation == "local" else {0, 1}
            for plan, accumulation in CASES_OF[units]
        }
