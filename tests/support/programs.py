"""Random training programs, run sharded and in plain torch: what a user may write, from a seed.

A program is data: a tree of modules, how each calls its children, and what happens in each step. So
it can be printed, run again, and made smaller while it still fails:

    parts    linear, norm, a 0-d and an empty parameter, another dtype, tied to an earlier, frozen
    calls    each child 0 to 3 times in any order; recomputed, under no_grad, detached, changed in
             place, or one after the other on the same input
    outputs  a tensor, a tuple, a dict, or None
    steps    micro-batches with and without communication, one or two backwards each, forwards for
             evaluation, both ways to clear gradients, freezing, state dicts, copies

The oracle is plain torch in one process, which adds up what the ranks' losses give.
"""

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fsdp import fully_shard
from tests.support.parity import assert_same_tensors, whole

WIDTH = 5
ATOL = 2e-5
PARTS = ("linear", "linear", "norm", "scale", "empty", "double", "tied", "frozen")
HOWS = ("plain", "plain", "recomputed", "no_grad", "detached", "in place")
OUTPUTS = ("tensor", "tensor", "tuple", "dict", "none")


@dataclass(frozen=True)
class Call:
    """One call of a child: its number, and how."""

    child: int
    how: str


@dataclass(frozen=True)
class Part:
    """A module; one with children is a group that calls them."""

    kind: str
    is_unit: bool
    output: str = "tensor"
    children: tuple["Part", ...] = ()
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class MicroBatch:
    """Forward and backward; ``num_backwards`` of two halves of the loss."""

    syncs: bool
    num_backwards: int
    evaluates: bool


@dataclass(frozen=True)
class Step:
    """Micro-batches, of which the last one communicates in any case, and an optimizer step."""

    micro_batches: tuple[MicroBatch, ...]
    sets_to_none: bool
    event: str  # nothing | state dict | copy | freeze


@dataclass(frozen=True)
class Program:
    root: Part
    steps: tuple[Step, ...]
    optimizer: str
    reshards: bool


def draw_program(seed: int) -> Program:
    """The same program for the same seed, on every machine."""
    draw = random.Random(seed)
    return Program(
        root=_draw_group(draw, depth=0),
        steps=tuple(_draw_step(draw) for _ in range(draw.randint(1, 3))),
        optimizer=draw.choice(("sgd", "adamw")),
        reshards=draw.random() < 0.6,
    )


def _draw_group(draw: random.Random, depth: int) -> Part:
    children = tuple(
        _draw_group(draw, depth + 1)
        if depth < 2 and draw.random() < 0.4
        else Part(draw.choice(PARTS), is_unit=draw.random() < 0.4)
        for _ in range(draw.randint(1, 4))
    )
    numbers = [
        child for child in range(len(children)) for _ in range(draw.choice((0, 1, 1, 1, 2, 3)))
    ]
    draw.shuffle(numbers)
    calls = tuple(Call(number, draw.choice(HOWS)) for number in numbers)
    output = "tensor" if depth == 0 else draw.choice(OUTPUTS)
    return Part("group", depth == 0 or draw.random() < 0.5, output, children, calls)


def _draw_step(draw: random.Random) -> Step:
    num_before = draw.choice((0, 0, 1, 2))
    return Step(
        micro_batches=tuple(
            MicroBatch(syncs, draw.choice((1, 1, 2)), draw.random() < 0.2)
            for syncs in [draw.random() < 0.3 for _ in range(num_before)] + [True]
        ),
        sets_to_none=draw.random() < 0.7,
        event=draw.choice(("nothing", "nothing", "state dict", "copy", "freeze")),
    )


# --- as modules ---


class _Leaf(nn.Module):
    def __init__(self, kind: str, linears: list[nn.Linear]) -> None:
        super().__init__()
        self.kind = kind
        if kind == "scale":
            self.scale = nn.Parameter(torch.tensor(0.7))
        elif kind == "empty":
            self.nothing, self.shift = (
                nn.Parameter(torch.empty(0)),
                nn.Parameter(torch.zeros(WIDTH)),
            )
        elif kind == "norm":
            self.inner: nn.Module = nn.LayerNorm(WIDTH)
        else:
            self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.float64 if kind == "double" else None)
            if kind == "frozen":
                self.inner.weight.requires_grad_(False)
            if kind == "tied" and linears:
                self.inner.weight = linears[0].weight
            if kind == "linear":
                linears.append(self.inner)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.kind == "scale":
            return hidden * self.scale
        if self.kind == "empty":
            return hidden + self.shift + self.nothing.sum()
        if self.kind == "double":
            return self.inner(hidden.double()).float()
        return self.inner(hidden)


class _Group(nn.Module):
    def __init__(self, part: Part, linears: list[nn.Linear]) -> None:
        super().__init__()
        self.part = part
        self.children_ = nn.ModuleList(_build(child, linears) for child in part.children)

    def forward(self, hidden: Tensor) -> Any:
        for call in self.part.calls:
            output = _tensor_of(_run(self.children_[call.child], call.how, hidden))
            if output is not None:
                hidden = hidden + torch.tanh(output)
        output = hidden * 0.9
        by_kind = {"tensor": output, "tuple": (None, output), "dict": {"hidden": output}}
        return by_kind.get(self.part.output)


def _run(module: nn.Module, how: str, hidden: Tensor) -> Any:
    if how == "recomputed":
        return checkpoint(module, hidden, use_reentrant=False)
    if how == "no_grad":
        with torch.no_grad():
            return module(hidden)
    output = module(hidden)
    if how == "detached":
        inside = _tensor_of(output)
        return None if inside is None else inside.detach()
    if how == "in place" and (inside := _tensor_of(output)) is not None:
        inside.mul_(0.5)
    return output


def _tensor_of(output: Any) -> Tensor | None:
    if isinstance(output, tuple):
        return output[1]
    return output["hidden"] if isinstance(output, dict) else output


def _build(part: Part, linears: list[nn.Linear]) -> nn.Module:
    return _Group(part, linears) if part.kind == "group" else _Leaf(part.kind, linears)


def _shard(module: nn.Module, part: Part, *, reshards: bool, is_root: bool = True) -> None:
    """Bottom-up, as users of FSDP2 do."""
    for child, its_part in zip(getattr(module, "children_", ()), part.children, strict=True):
        _shard(child, its_part, reshards=reshards, is_root=False)
    if part.is_unit or is_root:
        fully_shard(module, reshard_after_forward=reshards)


def _model_of(program: Program) -> nn.Module:
    torch.manual_seed(0)
    return _build(program.root, [])


# --- as training ---


def run_program(rank: int, world_size: int, program: Program) -> None:
    """Train sharded and plain; gradients and parameters must be the same after each step.

    Raises:
        AssertionError: They are not.
    """
    model, reference = _model_of(program), _model_of(program)
    _shard(model, program.root, reshards=program.reshards)
    ours, theirs = (_optimizer_of(program, each) for each in (model, reference))
    for number, step in enumerate(program.steps):
        for micro, micro_batch in enumerate(step.micro_batches):
            scale = 1 / len(step.micro_batches)
            syncs = micro_batch.syncs or micro == len(step.micro_batches) - 1
            context = contextlib.nullcontext() if syncs else model.no_sync()
            with context:
                _backward(model, micro_batch, scale, (number, micro, rank))
            for r in range(world_size):
                _backward(reference, micro_batch, scale / world_size, (number, micro, r))
        _compare(model, reference, lambda p: p.grad, f"gradients of step {number}")
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad(set_to_none=step.sets_to_none)
        _compare(model, reference, lambda p: p, f"parameters after step {number}")
        if step.event == "freeze":
            for each in (model, reference):
                first = next(each.parameters())
                first.requires_grad_(not first.requires_grad)
        elif step.event == "state dict":
            model.load_state_dict(model.state_dict())
        elif step.event == "copy":
            _compare(copy.deepcopy(model), reference, lambda p: p, f"a copy after step {number}")


def _optimizer_of(program: Program, model: nn.Module) -> torch.optim.Optimizer:
    if program.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def _backward(
    model: nn.Module, micro_batch: MicroBatch, scale: float, key: tuple[int, int, int]
) -> None:
    step, micro, rank = key
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    hidden = torch.randn(3, WIDTH, generator=generator)
    if micro_batch.evaluates:
        with torch.no_grad():
            model(hidden)
    losses = torch.tanh(model(hidden)).square().mean(0) * scale
    if not losses.requires_grad:
        return
    if micro_batch.num_backwards == 2:
        losses[:2].sum().backward(retain_graph=True)
        losses[2:].sum().backward()
    else:
        losses.sum().backward()


def _compare(
    model: nn.Module, reference: nn.Module, of: Callable[[Tensor], Tensor | None], what: str
) -> None:
    ours = {name: whole(of(parameter)) for name, parameter in model.named_parameters()}
    theirs = {name: whole(of(parameter)) for name, parameter in reference.named_parameters()}
    assert_same_tensors(ours, theirs, atol=ATOL, what=what)


# --- smaller ---


def smaller(value: Any) -> Iterator[Any]:
    """Values with one part less, or one part simpler: what a failure may still need."""
    if not is_dataclass(value):
        return
    for each in fields(value):
        inner = getattr(value, each.name)
        if isinstance(inner, tuple):
            for index, item in enumerate(inner):
                rest = inner[:index], inner[index + 1 :]
                if each.name != "children" and not (each.name != "calls" and len(inner) == 1):
                    yield replace(value, **{each.name: (*rest[0], *rest[1])})
                for less in smaller(item):
                    yield replace(value, **{each.name: (*rest[0], less, *rest[1])})
        elif is_dataclass(inner):
            for less in smaller(inner):
                yield replace(value, **{each.name: less})
        else:
            simplest = {"how": "plain", "event": "nothing", "output": "tensor", "is_unit": False}
            simplest |= {"num_backwards": 1, "evaluates": False, "optimizer": "sgd"}
            simplest |= {"syncs": True, "sets_to_none": True}
            if each.name in simplest and inner != simplest[each.name]:
                yield replace(value, **{each.name: simplest[each.name]})


def shrink(program: Program, fails: Callable[[Program], bool], *, max_tries: int = 200) -> Program:
    """A program as small as steps of :func:`smaller` lead to that fails as well."""
    found_one = True
    while found_one and max_tries > 0:
        found_one = False
        for less in smaller(program):
            max_tries -= 1
            if fails(less):
                program, found_one = less, True
                break
            if max_tries <= 0:
                break
    return program
