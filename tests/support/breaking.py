"""How the core is changed on purpose: the ways in which ``tests/support/faults.py`` breaks it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fsdp.core import assembly
from lightning_fsdp.core.engine import torch_internals
from lightning_fsdp.core.engine.communicator import Communicator, LocalRegion, Pending
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.layout import FlatLayout
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor


def change_reduced(change: Callable[[FlatParameter, Tensor], Tensor]) -> None:
    """Let ``change`` have every reduced shard of gradients, whichever way it was reduced."""
    original = FlatParameter.reduce

    def reduce(self: FlatParameter) -> Any:
        used = original(self)
        finish = self._reduction.finish
        self._reduction.finish = lambda: change(self, finish())
        return used

    FlatParameter.reduce = reduce


def change_new_flat_params(change: Callable[[FlatParameter, list[Tensor]], None]) -> None:
    """Let ``change`` have every new flat parameter, and the whole ones that it was made of."""
    original = assembly._make_flat_param

    def make_flat_param(plan: Any, *args: Any) -> FlatParameter:
        wholes = [parameter.detach().clone() for parameter in plan.parameters]
        flat_param = original(plan, *args)
        with torch.no_grad():
            change(flat_param, wholes)
        return flat_param

    assembly._make_flat_param = make_flat_param


def replace_gathers_of_backward(fill: Callable[[Communicator, Tensor], None]) -> None:
    original = Communicator.gather

    def gather(self: Communicator, whole: Tensor, unit_name: str) -> Pending:
        if torch_internals.current_backward() < 0:
            return original(self, whole, unit_name)
        fill(self, whole)
        return Pending("a gather that asks nobody", (), lambda: whole)

    Communicator.gather = gather


def forget_waits_for(what: str) -> None:
    original = Pending.join

    def join(self: Pending) -> None:
        if self.what.startswith(what):
            self.works = ()
        original(self)

    Pending.join = join


def after_reductions_start(change: Callable[[Tensor], object]) -> None:
    original, pack, packed = Communicator.reduce, LocalRegion.pack, list[Tensor]()

    def note(self: LocalRegion, slots: range | None = None) -> Tensor:
        packed.append(pack(self, slots))
        return packed[-1]

    def reduce(self: Communicator, region: LocalRegion) -> Pending:
        packed.clear()
        pending = original(self, region)
        for data in packed:
            change(data)
        return pending

    Communicator.reduce, LocalRegion.pack = reduce, note


def fill_padding(flat_param: FlatParameter, shard: Tensor) -> None:
    for padding in padding_in(shard, flat_param.layout, flat_param.communicator.rank):
        padding.fill_(1)


def padding_in(shard: Tensor, layout: FlatLayout, rank: int) -> list[Tensor]:
    """The parts of a rank's shard that belong to no parameter."""
    first, last = layout.shard_range(rank)
    stops = [0, *(slot.offset + slot.numel for slot in layout.slots)]
    starts = [*(slot.offset for slot in layout.slots), layout.numel]
    gaps = [(max(a, first), min(b, last)) for a, b in zip(stops, starts, strict=True)]
    return [shard[start - first : stop - first] for start, stop in gaps if start < stop]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def has_sharded(parameters: list[Tensor]) -> bool:
    return any(isinstance(parameter, ShardedTensor) for parameter in parameters)
