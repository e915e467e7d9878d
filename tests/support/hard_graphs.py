"""Models whose graphs are hard for a sharding engine, with their batches and losses."""

import dataclasses
from typing import NamedTuple

import torch
from torch import nn

from lightning_fsdp import ZERO2, fully_shard, shard_model
from tests.support.models import mlp_batch
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


class Writer(nn.Module):
    """A unit that returns nothing: it writes to what it was passed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(7, 7)

    def forward(self, state, *, seen):
        hidden = state["now"].hidden
        seen.append(torch.tanh(self.layer(hidden)))
        state["before"] = hidden
        state["now"].hidden = hidden + seen[-1]


class Written(nn.Module):
    """Units hand on a dictionary, a dataclass in it, and a list that starts empty."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Writer() for _ in range(3))
        self.end = nn.Linear(7, 3)

    def forward(self, inputs, step=0):
        state, seen = {"now": Result(inputs, inputs)}, []
        for block in self.blocks:
            block(state, seen=seen)
        state["now"].hidden.mul_(0.5)
        return self.end(state["now"].hidden + state["before"] + seen[step])


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
BUILDERS |= {"unused outputs": UnusedOutputs, "no inputs": Prompted, "written": Written}
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


UNITS = (Pair, Outputs, Writer, Forked, Prompt)


def shard(model, plan):
    """Each child, and each entry of a list, is a unit."""
    if plan == "zero2":
        return shard_model(model, ZERO2, units=lambda m: isinstance(m, UNITS) or m is model)
    for child in model.children():
        for module in child if isinstance(child, nn.ModuleList) else [child]:
            fully_shard(module)
    return fully_shard(model)
