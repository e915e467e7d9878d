"""Any function as a module's forward, under every engine, against one process."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_fsdp import (
    MixedPrecisionPolicy,
    call_with,
    fully_shard,
    linear_cross_entropy,
)
from lightning_fsdp.core.sharded_module import units_in
from lightning_fsdp.strategies import unit_calls
from tests.support.engine_runs import ENGINES
from tests.support.models import CausalLM, LMShape, token_batch
from tests.support.parity import assert_same_tensors, whole
from tests.support.ranks import run_on_ranks


def hidden_of(model: CausalLM, tokens: Tensor) -> Tensor:
    hidden = model.embedding(tokens) + model.positions(torch.arange(tokens.shape[1]))
    for block in model.blocks:
        hidden = block(hidden)
    return model.norm(hidden)


# Few positions at a time, so that there are several chunks.
chunked_loss = functools.partial(linear_cross_entropy, chunk_size=3)


def cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten())


# --- ways to use it ---
#
# Each gets a model, a function of (hidden, weight, labels) that gives a loss, and a batch.


def plainly(model, loss, tokens, labels):
    return call_with(
        model.head,
        lambda hidden, labels: loss(hidden, model.head.weight, labels),
        hidden_of(model, tokens),
        labels=labels,
    )


def beside_a_forward(model, loss, tokens, labels):
    """The head is called, and its weight is read by a function; so is that of its tied one."""
    hidden = hidden_of(model, tokens)
    logits = model.head(hidden)
    also = call_with(model.embedding, lambda: model.embedding.weight.square().mean())
    chunked = call_with(model.head, lambda h: loss(h, model.head.weight, labels), hidden)
    return chunked + F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + also


def computed_again(model, loss, tokens, labels, *, reentrant):
    def last(hidden):
        return call_with(model.head, lambda h: loss(h, model.head.weight, labels), hidden)

    return checkpoint(last, hidden_of(model, tokens), use_reentrant=reentrant)


def compiled(model, loss, tokens, labels):
    @functools.partial(torch.compile, backend="eager")
    def score(hidden, weight, labels):
        return cross_entropy(hidden, weight, labels)

    def last(hidden):
        return score(hidden, model.head.weight, labels)

    return call_with(model.head, last, hidden_of(model, tokens))


def nested(model, loss, tokens, labels):
    """The backward of what is outside goes on when that of what is inside has ended."""
    hidden = hidden_of(model, tokens)

    def last():
        outside = cross_entropy(hidden, model.head.weight, labels)
        return outside + call_with(
            model.head, lambda h: loss(h, model.head.weight, labels), 2 * hidden
        )

    return call_with(model.head, last)


def around_a_forward(model, loss, tokens, labels):
    """The function calls the module, and reads its weights then."""
    block = model.blocks[0]

    def around(hidden):
        return block(hidden).square().mean() + block.up.weight.square().sum()

    of_block = call_with(block, around, hidden_of(model, tokens))
    return of_block + plainly(model, loss, tokens, labels)


def of_a_part(model, loss, tokens, labels):
    """A module without a unit of its own, inside of the forward of the unit it belongs to."""
    block = getattr(model.blocks[0], "module", model.blocks[0])  # FSDP1 wraps it
    forward = type(block).forward

    def around(hidden):
        up = call_with(block.up, lambda: block.up.weight.square().sum())
        return forward(block, hidden) + up

    block.forward = around
    try:
        return plainly(model, loss, tokens, labels)
    finally:
        del block.forward


WAYS: dict[str, Callable[..., Tensor]] = {
    "plainly": plainly,
    "beside a forward": beside_a_forward,
    "computed again": functools.partial(computed_again, reentrant=False),
    "computed again, reentrant": functools.partial(computed_again, reentrant=True),
    "compiled": compiled,
    "nested": nested,
    "around a forward": around_a_forward,
    "of a part": of_a_part,
}
# Reentrant checkpointing runs a forward without a graph, which these take of no module.
LEFT_OUT = {("ddp", "computed again, reentrant"), ("fsdp2", "computed again, reentrant")}


def _model(kind: str) -> CausalLM:
    torch.manual_seed(1)
    model = CausalLM(LMShape(num_blocks=2, tied=kind != "untied"))
    if kind == "frozen":
        model.head.weight = nn.Parameter(model.head.weight.detach().clone(), requires_grad=False)
    return model


def _batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    tokens = token_batch(step, micro, rank)["tokens"]
    return tokens[:, :-1], tokens[:, 1:]


@functools.cache
def _expected(kind: str, way: str, world_size: int) -> dict[str, Tensor]:
    model = _model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    results = {}
    for step in range(2):
        for micro in range(2):
            for rank in range(world_size):
                tokens, labels = _batch(step, micro, rank)
                loss = WAYS[way](model, cross_entropy, tokens, labels) / world_size
                loss.backward()
        results |= {f"{step} {n}": p.grad.clone() for n, p in _trained(model)}
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        tokens, labels = _batch(9, 0, 0)
        results["evaluated"] = plainly(model, cross_entropy, tokens, labels)
    return results


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def _found(
    engine_name: str, kind: str, way: str, zero_stage: int, rank: int, *, compiles: bool = False
) -> dict[str, Tensor]:
    model, engine = _model(kind), None
    unit_calls.apply(model, None, checkpointing=None, compiles=compiles)
    before = list(model.parameters())
    module: nn.Module = model
    if engine_name == "ddp":
        module = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        engine = ENGINES[engine_name](zero_stage=zero_stage, units=None, cpu_offload=False)
        engine.shard(model, device=torch.device("cpu"), precision=MixedPrecisionPolicy())
    parameters = model.parameters() if engine and engine.shows_whole_shapes else before
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    if engine:
        engine.watch_optimizer(optimizer)

    def run(function, *args):
        return engine.run(function, *args) if engine else call_with(module, function, *args)

    results = {}
    for step in range(2):
        for micro in range(2):
            tokens, labels = _batch(step, micro, rank)
            is_local = micro == 0 and zero_stage == 3 and engine is not None
            with engine.no_sync() if is_local else torch.enable_grad():
                step_of = functools.partial(WAYS[way], model, chunked_loss)
                loss = run(step_of, tokens, labels)
                if engine:
                    engine.before_backward()
                loss.backward()
                if engine:
                    engine.after_backward()
        if engine:
            results |= {f"{step} {name}": full for name, full in engine.gradients.full()}
        else:
            results |= {f"{step} {n}": p.grad.clone() for n, p in _trained(model)}
        optimizer.step()
        optimizer.zero_grad()
    if compiles and kind != "frozen":
        return results  # graphs of an evaluation take seconds: once for each engine
    model.eval()
    with torch.no_grad():
        tokens, labels = _batch(9, 0, 0)
        results["evaluated"] = run(
            lambda tokens: plainly(model, linear_cross_entropy, tokens, labels), tokens
        )
    return results


def _compare(rank, world_size, engine, stages):
    ways = [way for way in WAYS if (engine, way) not in LEFT_OUT]
    if engine != "scratch" or world_size == 1:
        ways.remove("compiled")  # it takes seconds
    if world_size == 1:  # where all is whole at any time: who is called in whom still counts
        ways = [way for way in ways if way not in ("beside a forward", "of a part")]
    for stage in stages:
        cases = [("tied", way) for way in ways if (way, stage) != ("compiled", 2)]
        for kind, way in [*cases, ("untied", "plainly"), ("frozen", "plainly")]:
            torch.testing.assert_close(
                _found(engine, kind, way, stage, rank),
                _expected(kind, way, world_size),
                atol=1e-6,
                rtol=1e-5,
                msg=lambda text, case=(stage, kind, way): f"{case}: {text}",
            )


@pytest.mark.parametrize(
    ("engine", "stages", "world_size"),
    [
        *(("scratch", (2, 3), 2), ("fsdp1", (3,), 2), ("fsdp2", (3, 2), 2), ("ddp", (0,), 2)),
        *(("scratch", (3,), 1), ("fsdp1", (3,), 1), ("fsdp2", (3,), 1)),
    ],
)
def test_a_function_reads_whole_parameters_and_trains_them(engine, stages, world_size):
    run_on_ranks(_compare, world_size, engine, stages)


def _with_compiled_units(rank, world_size, engine):
    with pytest.MonkeyPatch.context() as patch:
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return aot_eager(graph, inputs)

        patch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
        for stage, kind, way in COMPILED if engine == "scratch" else OF_TORCH:
            found = _found(engine, kind, way, stage, rank, compiles=True)
            expected = _expected(kind, way, world_size)
            assert len(expected) - len(found) == (kind != "frozen")
            torch.testing.assert_close(
                found,
                {name: expected[name] for name in found},
                atol=1e-6,
                rtol=1e-5,
                msg=lambda text, case=(stage, kind, way): f"{case}: {text}",
            )
        assert graphs


COMPILED = [
    *((3, "tied", "beside a forward"), (2, "tied", "computed again")),
    *((3, "untied", "plainly"), (2, "frozen", "plainly")),
]
OF_TORCH = [COMPILED[0], COMPILED[-1]]


@pytest.mark.parametrize("engine", ["scratch", "fsdp1", "fsdp2"])
def test_a_function_reads_parameters_of_compiled_units(engine):
    run_on_ranks(_with_compiled_units, 2, engine, timeout_s=200)


# --- outside of every forward ---


def _outside(rank, world_size):
    plain, model = _model("tied"), _model("tied")
    for module in (model.embedding, model.positions, *model.blocks, model.norm, model.head, model):
        fully_shard(module)
    block, hidden = model.blocks[0], torch.ones(2, 3, 20)

    def loss_of(model, block):
        of_block = call_with(block.up, lambda: block.up.weight.square().sum())
        of_none = call_with(model.blocks, lambda x: x.sum(), hidden)
        of_head = call_with(
            model.head, lambda h: F.linear(model.norm(h), model.head.weight).square().mean(), hidden
        )
        return of_block + of_none + of_head

    loss_of(plain, plain.blocks[0]).backward()
    traffic = model.head.weight.spec.communicator.traffic
    before = traffic["all_gather"].calls
    loss = loss_of(model, block)
    assert traffic["all_gather"].calls - before == 3  # block, head, norm
    loss.backward()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    found = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    found = {name: found[name] for name in expected}
    assert_same_tensors(found, expected, atol=1e-5)
    nested(model, linear_cross_entropy, *_batch(0, 0, rank)).backward()
    assert not any(unit.is_held for unit in units_in(model))
    with pytest.raises(ZeroDivisionError):
        call_with(model.head, lambda: 1 / 0)
    assert not any(unit.is_held for unit in units_in(model))


def test_the_core_gathers_for_a_function_outside_of_every_forward():
    run_on_ranks(_outside, 2)


def _refused(rank, world_size):
    model = _model("untied")
    for module in (*model.blocks, model.head, model):
        fsdp.fully_shard(module, reshard_after_forward=False)
    model(_batch(0, 0, rank)[0])  # from now on all is whole
    cut = _model("untied")
    wrapped = fsdp.FullyShardedDataParallel(
        cut, use_orig_params=True, device_id=torch.device("cpu")
    )
    for module in (model.blocks[0].up, cut.head):
        with pytest.raises(RuntimeError, match="call_with: expected Linear to be sharded itself"):
            call_with(module, lambda: None)
    assert call_with(wrapped, lambda: call_with(cut.head, lambda: cut.head.weight.shape)) == (
        61,
        20,
    )
    assert call_with(nn.Linear(2, 2), max, 1, 2) == 2


def test_a_part_of_what_torch_has_sharded_is_refused_outside_of_its_forward():
    run_on_ranks(_refused, 2)
