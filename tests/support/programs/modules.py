"""A program's tree as modules, plain or sharded.

Every module is called with a hidden state of ``(3, WIDTH)`` and the moment: the numbers of step and
micro-batch, and the rank, which decide what is left out.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from lightning_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from tests.support.programs.drawing import Call, Part, Program

WIDTH = 5
Moment = tuple[int, int, int]  # step, micro-batch, rank


class _Leaf(nn.Module):
    def __init__(self, kind: str, linears: list[nn.Linear]) -> None:
        super().__init__()
        self.kind = kind
        if kind == "scale":
            self.scale = nn.Parameter(torch.empty(()))
        elif kind == "empty":
            self.nothing = nn.Parameter(torch.empty(0))
            self.shift = nn.Parameter(torch.empty(WIDTH))
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
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Of its own; those of ``inner`` have theirs."""
        if self.kind == "scale":
            self.scale.fill_(0.7)
        elif self.kind == "empty":
            self.shift.zero_()

    def forward(self, hidden: Tensor, moment: Moment) -> Tensor:
        if self.kind == "scale":
            return hidden * self.scale
        if self.kind == "empty":
            return hidden + self.shift + self.nothing.sum()
        if self.kind == "double":
            return self.inner(hidden.to(self.inner.weight.dtype)).to(hidden.dtype)
        return self.inner(hidden)


class _Group(nn.Module):
    def __init__(self, part: Part, modules: list[nn.Module]) -> None:
        super().__init__()
        self.part = part
        self.children_ = nn.ModuleList(modules)

    def forward(self, hidden: Tensor, moment: Moment) -> Any:
        for call in self.part.calls:
            if _is_left_out(call, moment):
                continue
            output = _tensor_of(_run(self.children_[call.child], call.how, hidden, moment))
            if output is not None:
                hidden = hidden + torch.tanh(output)
        output = hidden * 0.9
        by_kind = {"tensor": output, "tuple": (None, output), "dict": {"hidden": output}}
        return by_kind.get(self.part.output)


def _is_left_out(call: Call, moment: Moment) -> bool:
    step, micro, rank = moment
    if call.when == "always":
        return False
    return (step + micro + (rank if call.when == "on every other rank" else 0)) % 2 == 1


def _run(module: nn.Module, how: str, hidden: Tensor, moment: Moment) -> Any:
    if how in ("recomputed", "reentrant"):
        return checkpoint(module, hidden, moment, use_reentrant=how == "reentrant")
    if how == "no_grad":
        with torch.no_grad():
            return module(hidden, moment)
    output = module(hidden, moment)
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


def build(program: Program) -> nn.Module:
    """The plain model, with the same values on every rank."""
    torch.manual_seed(0)
    return _build(program.root, [], [])


def _build(part: Part, linears: list[nn.Linear], units: list[nn.Module]) -> nn.Module:
    if part.kind == "group":
        return _Group(part, [_build(child, linears, units) for child in part.children])
    if part.kind == "shared" and units:
        return units[-1]
    module = _Leaf("linear" if part.kind == "shared" else part.kind, linears)
    if part.is_unit:
        units.append(module)
    return module


def shard(model: nn.Module, program: Program, world_size: int) -> list[nn.Module]:
    """Shard units bottom-up, as for FSDP2; return them."""
    setup, sharded = program.setup, []
    dtype = getattr(torch, setup.dtype)
    options: dict[str, Any] = {}
    if setup.has_replicas:
        options["mesh"] = replicas(world_size)
    if setup.is_offloaded:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    reshards = {"zero3": True, "default": None}

    def visit(module: nn.Module, part: Part) -> None:
        for child, its_part in zip(getattr(module, "children_", ()), part.children, strict=True):
            visit(child, its_part)
        if part.is_compiled:
            module.compile(backend="eager")
        if (part.is_unit or module is model) and module not in sharded:
            stage = reshards.get(setup.stage, False)
            stage = len(sharded) % 2 == 0 if setup.stage == "mixed" else stage
            sharded.append(fully_shard(module, reshard_after_forward=stage, **options))

    visit(model, program.root)
    if setup.stage == "zero2":
        model.set_reshard_after_backward(False)
    return sharded


@cache
def replicas(world_size: int) -> DeviceMesh:
    """Two rows where the ranks divide so; else a single one."""
    num_rows = 2 if world_size % 2 == 0 else 1
    return init_device_mesh("cpu", (num_rows, world_size // num_rows))
