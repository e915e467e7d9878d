"""Graphs that are hard for a sharding engine: each trains as the unsharded model does.

Every case has a model, how it is sharded (each child a unit of its own), and a loss; three steps on
different data per rank, against one process that has all ranks' losses.
"""

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import nn

from lightning_fsdp import ZERO2, fully_shard, gradients, shard_model
from tests.support.cases import each_on_ranks
from tests.support.counting import CollectiveCounter
from tests.support.memory import StorageTracker, bytes_of, tensors_of
from tests.support.models import causal_lm, lm_loss, mlp_batch, token_batch
from tests.support.one_exchange import train_on_rank
from tests.support.parity import (
    OPTIMIZERS,
    PLANS,
    assert_ranks_agree,
    assert_traces_match,
    make_batches,
    train_reference,
)
from tests.support.ranks import run_on_ranks
from tests.support.versions import TORCH


class Pair(nn.Module):
    """Two layers, 7 -> 15 -> 7."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(7, 15), nn.Linear(15, 7)

    def forward(self, inputs):
        return self.down(torch.tanh(self.up(inputs)))


class Net(nn.Module):
    """Three pairs and an end; ``run`` says how they are put together."""

    def __init__(self, run):
        super().__init__()
        self.run = run
        self.blocks = nn.ModuleList(Pair() for _ in range(3))
        self.end = nn.Linear(7, 3)

    def forward(self, inputs, step=0):
        return self.run(self, inputs, step)


def twice(net, x, step):
    a, b, _ = net.blocks
    return net.end(a(b(a(x))))


def other_order(net, x, step):
    order = (0, 1, 2) if step % 2 == 0 else (2, 0, 1)
    for index in order:
        x = net.blocks[index](x)
    return net.end(x)


def skipped(net, x, step):
    for index in range(3):
        if index != step:
            x = net.blocks[index](x)
    return net.end(x)


def branches(net, x, step):
    a, b, c = net.blocks
    return net.end(a(x) + b(x) * torch.tanh(c(x)))


def in_place(net, x, step):
    a, b, c = net.blocks
    hidden = a(x)
    hidden += x
    hidden = b(hidden)
    hidden.mul_(0.5)
    out = c(hidden)
    out.view(-1).add_(1.0)
    return net.end(out)


def views_in_place(net, x, step):
    """An ``nn.Linear`` gives a view of a 2-D product where its inputs are 3-D, in older torches."""
    a, b, c = net.blocks
    hidden = a(x[None])
    assert hidden._is_view() or TORCH >= (2, 14)
    hidden += x
    hidden = b(hidden)
    hidden[..., ::2].mul_(0.5)
    hidden = c(hidden)
    hidden.transpose(1, 2).add_(1.0)
    return net.end(hidden[0])


def no_grad_before(net, x, step):
    a, b, _ = net.blocks
    with torch.no_grad():
        target = a(x)
    return net.end(b(a(x)) - target)


def no_grad_beside(net, x, step):
    a, b, c = net.blocks
    with torch.no_grad():
        target = c(x)
    return net.end(b(a(x)) - target)


class Outputs(nn.Module):
    """A unit whose output is a structure."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.pair = Pair()

    def forward(self, inputs):
        hidden = self.pair(inputs)
        if self.kind == "dict":
            return {"hidden": hidden, "extra": [hidden * 2]}
        if self.kind == "tuple":
            return (hidden, (hidden * 2, None))
        if self.kind == "list":
            return [hidden, hidden * 2]
        if self.kind == "dataclass":
            return Result(hidden, hidden * 2)
        if self.kind == "named tuple":
            return Named(hidden, hidden * 2)
        if self.kind == "nested":
            return {"all": ([Named(None, Result(hidden, {"extra": hidden * 2}))], "a word")}
        return Custom(hidden)


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    extra: torch.Tensor


class Named(NamedTuple):
    hidden: torch.Tensor | None
    extra: object


class Custom:
    """An object that nothing knows how to look into."""

    def __init__(self, hidden):
        self.hidden = hidden


class Structured(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.second = Outputs(kind), Outputs(kind)
        self.end = nn.Linear(7, 3)

    def forward(self, inputs, step=0):
        return self.end(self._hidden(self.second(self._hidden(self.first(inputs)))))

    def _hidden(self, out):
        if self.kind == "dict":
            return out["hidden"] + out["extra"][0]
        if self.kind == "tuple":
            return out[0] + out[1][0]
        if self.kind == "list":
            return sum(out)
        if self.kind == "nested":
            result = out["all"][0][0].extra
            return result.hidden + result.extra["extra"]
        return out.hidden + out.extra


class Forked(nn.Module):
    """A unit with two outputs, of which its caller takes one."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, inputs):
        return self.left(inputs), self.right(inputs)


class UnusedOutputs(nn.Module):
    """Ranks, micro-batches and steps use different outputs of the same units."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Forked() for _ in range(2))
        self.end = nn.Linear(7, 3)

    def forward(self, inputs, step=0):
        for column, block in enumerate(self.blocks):
            inputs = block(inputs)[int(inputs[0, column] > 0)]
        return self.end(inputs)


class Prompt(nn.Module):
    """A unit whose forward takes nothing."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.rand(1, 7) - 0.5)
        self.layer = nn.Linear(7, 7)

    def forward(self):
        return self.layer(self.table)


class Prompted(nn.Module):
    def __init__(self):
        super().__init__()
        self.prompt, self.pair, self.end = Prompt(), Pair(), nn.Linear(7, 3)

    def forward(self, inputs, step=0):
        return self.end(self.pair(inputs + self.prompt()) * self.prompt())


class SharedModule(nn.Module):
    """One module under two names."""

    def __init__(self):
        super().__init__()
        self.first = Pair()
        self.second = self.first
        self.end = nn.Linear(7, 3)

    def forward(self, inputs, step=0):
        return self.end(self.second(torch.tanh(self.first(inputs))))


class Dtypes(nn.Module):
    """Two dtypes, 0-d, empty and tiny parameters in one unit."""

    def __init__(self, inner_dtype):
        super().__init__()
        self.inner = nn.Linear(7, 7, dtype=inner_dtype)
        self.outer = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.one = nn.Parameter(torch.full((1,), 0.1))

    def forward(self, inputs, step=0):
        hidden = self.inner(inputs.to(self.inner.weight.dtype)).float()
        hidden = hidden * self.scale + self.nothing.sum()
        return self.outer(hidden) + self.one


def frozen_biases():
    """Frozen and trainable parameters in each unit, and one unit that is frozen as a whole."""
    net = Net(branches)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not (name.endswith("bias") or name.startswith("blocks.2")))
    return net


RUNS = (
    twice,
    other_order,
    skipped,
    branches,
    in_place,
    views_in_place,
    no_grad_before,
    no_grad_beside,
)
STRUCTURES = ("dict", "tuple", "list", "dataclass", "named tuple", "nested")
BUILDERS = {run.__name__: lambda run=run: Net(run) for run in RUNS}
BUILDERS |= {kind: lambda kind=kind: Structured(kind) for kind in STRUCTURES}
BUILDERS |= {"unused outputs": UnusedOutputs, "no inputs": Prompted}
BUILDERS |= {"shared module": SharedModule, "frozen biases": frozen_biases}
BUILDERS |= {
    "bf16 beside fp32": lambda: Dtypes(torch.bfloat16),
    "fp64 beside fp32": lambda: Dtypes(torch.float64),
}


def build(name):
    torch.manual_seed(3)
    return BUILDERS[name]()


def batch_of(step, micro_batch, rank):
    return {**mlp_batch(step, micro_batch, rank), "step": step}


def loss_of(model, batch):
    outputs = model(batch["inputs"], batch["step"])
    return 0.25 * nn.functional.mse_loss(outputs.float(), batch["targets"])


UNITS = (Pair, Outputs, Forked, Prompt)


def shard(model, plan):
    """Each child, and each entry of a list, is a unit."""
    if plan == "zero2":
        return shard_model(model, ZERO2, units=lambda m: isinstance(m, UNITS) or m is model)
    for child in model.children():
        for module in child if isinstance(child, nn.ModuleList) else [child]:
            fully_shard(module)
    return fully_shard(model)


def _train_all(rank, world_size, plan):
    traces = {}
    for name in BUILDERS:
        batches = make_batches(batch_of, num_steps=3, num_micro_batches=2, world_size=world_size)
        model = build(name)
        is_one = isinstance(model, Dtypes)
        model = shard_model(model, PLANS[plan], units=["Dtypes"]) if is_one else shard(model, plan)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        traces[name] = train_on_rank(model, batches, loss_of, optimizer, rank, accumulation="sum")
    return traces


@pytest.mark.parametrize(("world_size", "plan"), [(2, "zero2"), (2, "zero3"), (3, "zero3")])
def test_hard_graphs_train_as_unsharded_models_do(world_size, plan):
    by_rank = run_on_ranks(_train_all, world_size, plan)
    batches = make_batches(batch_of, num_steps=3, num_micro_batches=2, world_size=world_size)
    for name in BUILDERS:
        expected = train_reference(build(name), batches, loss_of, OPTIMIZERS["adamw"], joined=False)
        traces = [each[name] for each in by_rank]
        assert_ranks_agree(traces, name)
        # bf16 gradients of several ranks and micro-batches are rounded before they are added.
        atol = 4e-3 if name == "bf16 beside fp32" else 1e-6
        assert_traces_match(traces[0], expected, atol=atol, what=name)


class Nested(nn.Module):
    """Ends in a unit that a step may leave out, and gives that one's output on where it does."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.extra = inner, nn.Parameter(torch.rand(7))

    def forward(self, inputs, uses_extra):
        outputs = self.inner(inputs, uses_extra)
        return outputs * self.extra if uses_extra else outputs


class Innermost(nn.Linear):
    def forward(self, inputs, uses_extra):
        return super().forward(inputs)


class Around(nn.Module):
    """Three units in each other, which end in one node where no extra is used."""

    def __init__(self):
        super().__init__()
        self.first, self.nested = nn.Linear(7, 7), Nested(Nested(Innermost(7, 7)))

    def forward(self, inputs, uses_extra):
        return self.nested(torch.tanh(self.first(inputs)), uses_extra)


def around():
    torch.manual_seed(1)
    return Around()


def loss_around(model, batch):
    return model(batch["inputs"], batch["uses_extra"]).square().mean()


def train_around(rank, world_size):
    def make_batch(step, micro_batch, rank):
        return {**mlp_batch(step, micro_batch, rank), "uses_extra": rank == 0}

    batches = make_batches(make_batch, num_steps=3, num_micro_batches=1, world_size=world_size)
    expected = train_reference(around(), batches, loss_around, OPTIMIZERS["sgd"], joined=False)
    model = around()
    for module in (model.first, model.nested.inner.inner, model.nested.inner, model.nested, model):
        fully_shard(module)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    trace = train_on_rank(model, batches, loss_around, optimizer, rank)
    assert_traces_match(trace, expected, atol=1e-6)


def test_units_that_end_in_one_node_on_some_ranks_are_entered_from_outside_on_all():
    run_on_ranks(train_around, 2, group_timeout_s=10)


def _several_graphs(rank, world_size, plan, how):
    model, reference = shard(build("branches"), plan), build("branches")
    for step in range(2):
        mine = [batch_of(step, micro, rank) for micro in range(2)]
        every = [[batch_of(step, micro, r) for micro in range(2)] for r in range(world_size)]
        _backward(model, mine, how, 1.0)
        for batches in every:
            _backward(reference, batches, how, 1 / world_size)
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(
                model.get_parameter(name).grad.full_tensor(), parameter.grad, rtol=0, atol=2e-7
            )
        model.zero_grad()
        reference.zero_grad()


def _backward(model, batches, how, factor):
    losses = [loss_of(model, batch) * factor for batch in batches]
    if how == "two forwards, one backward":
        sum(losses).backward()
    elif how == "two forwards, backwards in the other order":
        for loss in reversed(losses):
            loss.backward()
    else:
        losses[0].backward(retain_graph=True)
        losses[0].backward()
        del losses


@pytest.mark.parametrize(
    "how",
    [
        "two forwards, one backward",
        "two forwards, backwards in the other order",
        "one graph, two backwards",
    ],
)
@pytest.mark.parametrize("plan", PLANS)
def test_several_graphs_may_be_alive(plan, how):
    run_on_ranks(_several_graphs, 2, plan, how)


def _custom_output(rank, world_size, plan):
    """Nothing can look into the output: right, or an error, and the next forward is right."""
    torch.manual_seed(3)
    model = shard(Structured("custom"), plan)
    model._hidden = lambda out: out.hidden
    reference = copy_plain(Structured, "custom")
    error = None
    try:
        loss_of(model, batch_of(0, 0, 0)).backward()
    except RuntimeError as caught:
        error = str(caught)
    if error is None:
        loss_of(reference, batch_of(0, 0, 0)).backward()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(
                model.get_parameter(name).grad.full_tensor(), parameter.grad, rtol=0, atol=2e-7
            )
    inputs = batch_of(1, 0, 0)["inputs"]
    with torch.no_grad():  # and whatever it was, the next forward is right
        torch.testing.assert_close(model(inputs), reference(inputs), rtol=0, atol=1e-6)
    return error


def copy_plain(cls, *args):
    torch.manual_seed(3)
    model = cls(*args)
    model._hidden = lambda out: out.hidden
    return model


@pytest.mark.parametrize("plan", PLANS)
def test_an_output_that_nothing_can_look_into_is_right_or_an_error(plan):
    errors = run_on_ranks(_custom_output, 2, plan)
    assert errors[0] == errors[1]


class Lora(nn.Module):
    """A frozen layer and two small trainable ones."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(48, 48)
        self.down, self.up = nn.Linear(48, 2, bias=False), nn.Linear(2, 48, bias=False)
        self.base.requires_grad_(False)

    def forward(self, inputs):
        return self.base(inputs) + self.up(self.down(inputs))


def _lora(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(Lora(), nn.Tanh(), Lora())


def _train_lora(rank, world_size):
    """Frozen ones are gathered, never reduced, and have no memory for gradients."""
    model, reference = shard_model(_lora(), units=["Lora"]), _lora()
    frozen = 4 * sum(p.numel() for p in reference.parameters() if not p.requires_grad)
    inputs = [torch.randn(4, 48, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    for _ in range(2):
        with CollectiveCounter() as counter:
            model(inputs[rank]).square().mean().backward()
    with StorageTracker(model) as tracker:
        tracker.track(tensors_of(model))
        held = tracker.settled_bytes() - bytes_of(tensors_of(model))
    for each in inputs:
        (2 * reference(each).square().mean() / world_size).backward()
    for name, parameter in reference.named_parameters():
        ours = model.get_parameter(name)
        if parameter.requires_grad:
            torch.testing.assert_close(ours.grad.full_tensor(), parameter.grad, rtol=0, atol=1e-7)
        else:
            assert ours.grad is None
    return counter.reduced_bytes(world_size), frozen, held


def test_frozen_parameters_cost_no_reduction_and_no_gradient_memory():
    trainable = 4 * sum(p.numel() for p in _lora().parameters() if p.requires_grad)
    for reduced, frozen, held in run_on_ranks(_train_lora, 2):
        assert trainable / 2 <= reduced <= trainable / 2 + 512 < frozen / 8
        assert held <= 256


def _reductions_by_the_first_block(rank, world_size, plan):
    """How many units are being reduced when a backward comes to the first block."""
    model = shard(frozen_biases(), plan)
    model.run = lambda net, x, step: net.end(net.blocks[1](net.blocks[0](x)))
    numbers = []
    for _ in range(2):
        with CollectiveCounter() as counter:
            handle = model.blocks[0].register_forward_hook(
                lambda module, args, output: (
                    output.register_hook(
                        lambda gradient: numbers.append(counter.num_reductions(world_size))
                    )
                    and None
                )
            )
            loss_of(model, batch_of(0, 0, rank)).backward()
            handle.remove()
        numbers.append(counter.num_reductions(world_size))
    return numbers


@pytest.mark.parametrize("plan", PLANS)
def test_units_with_frozen_parameters_are_reduced_within_the_backward(plan):
    # The head belongs to the root under ZeRO-2, whose inputs need no gradient: it comes last.
    at_first_block, at_end = {"zero2": (1, 3), "zero3": (2, 3)}[plan]
    for numbers in run_on_ranks(_reductions_by_the_first_block, 2, plan):
        assert numbers == [at_first_block, at_end] * 2


def _thaw(rank, world_size, plan):
    """Freezing and unfreezing between steps."""
    model, reference = shard_model(causal_lm(), PLANS[plan]), causal_lm()
    optimizers = [OPTIMIZERS["adamw"](m.parameters()) for m in (model, reference)]
    for step, frozen in enumerate(["", "blocks.1", "blocks.0", "", "head"]):
        for each in (model, reference):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(not (frozen and name.startswith(frozen)))
        lm_loss(model, token_batch(step, 0, rank)).backward()
        for r in range(world_size):
            (lm_loss(reference, token_batch(step, 0, r)) / world_size).backward()
        for name, parameter in reference.named_parameters():
            ours = model.get_parameter(name).grad
            assert (ours is None) == (parameter.grad is None), f"step {step}: {name}"
            if ours is not None:
                torch.testing.assert_close(ours.full_tensor(), parameter.grad, rtol=0, atol=5e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("plan", PLANS)
def test_parameters_may_be_frozen_and_unfrozen_between_steps(plan):
    run_on_ranks(_thaw, 2, plan)


class Failing:
    """Raises once, where it is put."""

    def __init__(self, kind):
        self.kind = kind
        self.is_armed = True

    def __call__(self, *args):
        if self.is_armed:
            self.is_armed = False
            raise self.kind("on purpose")


def fail_once(rank, world_size, where, plan):
    """The step after an exception is that of a model on which nothing happened."""
    model, reference = shard_model(causal_lm(), PLANS[plan]), shard_model(causal_lm(), PLANS[plan])
    # What is no ``Exception`` ends a call without torch calling its forward hooks.
    kind = KeyboardInterrupt if where == "Ctrl-C in the forward" else ZeroDivisionError
    failing = Failing(kind)
    block = model.blocks[1]
    if where in ("forward", "Ctrl-C in the forward"):
        block.up.register_forward_pre_hook(failing)
    elif where == "hook after the forward":
        block.register_forward_hook(failing)
    elif where == "backward":
        block.up.register_full_backward_hook(failing)
    elif where == "local gradient":
        gradients(block).on_local(failing)
    elif where == "reduced gradient":
        gradients(block).on_reduced(failing)
    else:
        block.register_forward_hook(lambda module, args, out: out.register_hook(failing) and None)
    with StorageTracker(model) as tracker:
        for step in range(2):
            for each in (model, reference):
                each.zero_grad()
            with pytest.raises(kind):
                lm_loss(model, token_batch(9, 0, rank)).backward()
            failing.is_armed = True
            if step == 0:
                continue
            failing.is_armed = False
            model.zero_grad()
            for each in (model, reference):
                lm_loss(each, token_batch(step, 0, rank)).backward()
            for name, parameter in reference.named_parameters():
                ours = model.get_parameter(name).grad
                assert torch.equal(ours.to_local(), parameter.grad.to_local()), name
            whole = [size for size in tracker.whole_sizes() if size]
    if plan == "zero3":
        assert not whole, "something stays whole"


PLACES = (
    *("forward", "Ctrl-C in the forward", "hook after the forward", "backward"),
    *("local gradient", "reduced gradient", "hook of a tensor"),
)


@pytest.mark.parametrize("plan", PLANS)
def test_an_exception_leaves_a_usable_engine(plan):
    each_on_ranks(fail_once, 2, PLACES, plan)
