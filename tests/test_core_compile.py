"""Compiled units: gradients of plain torch, one compilation, no graph break. Compiled steps.

``test_strategy_unit_calls.py`` compiles to machine code.
"""

import operator

import pytest
import torch
from torch import nn

from lightning_fsdp import shard_model
from lightning_fsdp.core.engine.torch_internals import not_compiled
from tests.support.models import causal_lm, lm_loss, mlp, mlp_batch, mlp_loss, token_batch
from tests.support.parity import PLANS
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

# Compiled before or after sharding, in which way: every two of a plan, an order and a way.
CASES = {
    "zero3": [("before", "module"), ("after", "function"), ("before", "wrapper")],
    "zero2": [("after", "module"), ("before", "function"), ("after", "wrapper")],
}


def _compile_blocks(model: nn.Module, way: str, backend) -> None:
    for index, block in enumerate(model.blocks):
        if way == "module":
            block.compile(backend=backend)
        elif way == "wrapper":
            model.blocks[index] = torch.compile(block, backend=backend, fullgraph=True)
        else:
            block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)


def _train_compiled(rank, world_size, plan, order, way, backend):
    """How often a graph was compiled, and where graphs broke."""
    import torch._dynamo.testing
    import torch._dynamo.utils

    reference = causal_lm()
    torch._dynamo.utils.counters.clear()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    model = causal_lm()
    if order == "before":
        _compile_blocks(model, way, counter)
    shard_model(model, PLANS[plan])
    if order == "after":
        _compile_blocks(model, way, counter)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for step in range(3):
        lm_loss(model, token_batch(step, 0, rank)).backward()
        for r in range(world_size):
            (lm_loss(reference, token_batch(step, 0, r)) / world_size).backward()
        ours = {n.replace("_orig_mod.", ""): p.grad for n, p in model.named_parameters()}
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(ours[name].full_tensor(), parameter.grad, rtol=0, atol=5e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return counter.frame_count, dict(torch._dynamo.utils.counters["graph_break"])


class _Normalised(torch.optim.Optimizer):
    """Steps whole tensors: it takes their norms."""

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=0.1)


def _graphs_end_at_what_is_not_compiled():
    """Also at what is called in it; nothing of either is in a graph."""
    torch._dynamo.reset()
    operations = []

    def note(graph, _inputs):
        operations.extend(n.target for n in graph.graph.nodes if n.op.startswith("call"))
        return graph

    compiled = torch.compile(lambda values: _sines(values * 2) + 1, backend=note)
    torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 2.0).sin() + 1)
    assert operations == [operator.mul, operator.add]


@not_compiled
def _sines(values):
    return _sine(values)


def _sine(values):
    return values.sin()


def _step_compiled():
    """Of an optimizer over whole tensors: as in plain torch."""
    torch._dynamo.reset()
    model, reference = shard_model(mlp()), mlp()
    for each in (model, reference):
        optimizer = _Normalised(each.parameters(), {})
        step = optimizer.step
        if each is model:
            step = torch.compile(step, backend="eager")
        for i in range(2):
            optimizer.zero_grad()
            mlp_loss(each, mlp_batch(i, 0, 0)).backward()
            step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.detach())


def _whole_step_compiled(rank, world_size, plan):
    """Forward, backward, clipping and the optimizer's step in one compiled function."""
    torch._dynamo.reset()
    model, reference = shard_model(mlp(), PLANS[plan]), mlp()
    counter = torch._dynamo.testing.CompileCounter()

    def step(model, optimizer, batches):
        optimizer.zero_grad()
        for batch in batches:
            (mlp_loss(model, batch) / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    compiled = torch.compile(step, backend=counter)
    for i in range(2):
        compiled(model, optimizers[0], [mlp_batch(i, 0, rank)])
        step(reference, optimizers[1], [mlp_batch(i, 0, each) for each in range(world_size)])
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.detach())
    return counter.frame_count


def _train_each(rank, world_size, plan):
    results = {}
    for order, way in CASES[plan]:
        torch._dynamo.reset()
        results[order, way] = _train_compiled(rank, world_size, plan, order, way, "aot_eager")
    if plan == "zero3":  # here, since a rank that imports the compiler takes seconds to
        _step_compiled()
        _graphs_end_at_what_is_not_compiled()
    num_graphs = _whole_step_compiled(rank, world_size, plan)
    assert num_graphs <= 8, f"{num_graphs} graphs: the core's own functions are not compiled"
    return results


@pytest.mark.parametrize("plan", CASES)
def test_compiled_blocks_share_a_graph_without_breaks_and_train_exactly(plan):
    for results in run_on_ranks(_train_each, 2, plan):
        for how, (compilations, breaks) in results.items():
            assert compilations == 1, f"{how}: equal blocks share a compilation"
            assert breaks == {}, how
