"""Turns a module that was found in order into a sharded one: segments, units, hooks, names."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from lightning_fsdp.config import PrecisionPolicy, ShardingPlan
from lightning_fsdp.core import optimizer_guard, torch_internals
from lightning_fsdp.core.collectives import Communicator
from lightning_fsdp.core.grouping import SegmentPlan, UnitPlan
from lightning_fsdp.core.hooks import ModuleHooks
from lightning_fsdp.core.layout import plan_segment
from lightning_fsdp.core.schedule import Schedule
from lightning_fsdp.core.segment import Segment, SegmentUse
from lightning_fsdp.core.sharded_module import ShardedModule, hooks_of
from lightning_fsdp.core.sharded_tensor import ShardedTensor, ShardSpec, make_parameter
from lightning_fsdp.core.unit import Unit


@dataclass(frozen=True)
class Prepared:
    """A request that was found in order."""

    root: nn.Module
    outermost: list[nn.Module]
    plan: ShardingPlan
    policy: PrecisionPolicy
    units: list[UnitPlan]
    segments: list[SegmentPlan]
    inner: list[Schedule]  # of modules below the root that were sharded before
    known: dict[Tensor, Segment]  # of parameters tied to a unit that was sharded before


def assemble(prepared: Prepared, communicator: Communicator, device: torch.device) -> None:
    """Shard what was prepared. Raises nothing that the ranks have not agreed on before."""
    schedule = Schedule(communicator)
    for other in prepared.inner:
        for unit in other.units:
            if unit.reshard_after_forward is None:  # it is not the outermost one any more
                unit.reshard_after_forward = True
        schedule.add(other.units)
    segment_of = dict(prepared.known)
    for segment_plan in prepared.segments:
        segment = _make_segment(segment_plan, prepared.policy, communicator, device)
        segment_of.update(dict.fromkeys(segment.parameters, segment))
    for unit_plan in prepared.units:
        unit = _make_unit(unit_plan, segment_of, prepared, communicator)
        schedule.add([unit])
        for module in unit_plan.modules:
            _attach(module, unit, schedule)
        for sites in unit_plan.sites.values():
            for site in sites:
                site.module.__dict__.setdefault("_lightning_fsdp_unit", unit)
    for module in prepared.outermost:
        if hooks_of(module) is None:
            _attach(module, None, schedule)
    for module in prepared.root.modules():
        hooks = hooks_of(module)
        if hooks is not None:
            hooks.schedule = schedule
    _rename(prepared.root, schedule)
    _move_buffers(prepared.root, device)
    if device.type == "cpu":
        torch_internals.reuse_freed_host_memory()
    optimizer_guard.watch(schedule)


def _make_segment(
    plan: SegmentPlan, policy: PrecisionPolicy, communicator: Communicator, device: torch.device
) -> Segment:
    shapes = [tuple(parameter.shape) for parameter in plan.parameters]
    named_shapes = list(zip(plan.names, shapes, strict=True))
    layout = plan_segment(named_shapes, communicator.world_size)
    dtype = plan.parameters[0].dtype
    shard = torch.zeros(layout.shard_numel, dtype=dtype, device=device)
    parameters: list[ShardedTensor] = []
    for slot, parameter in zip(layout.slots, plan.parameters, strict=True):
        spec = ShardSpec(slot.name, slot, layout, communicator)
        offset = layout.offset_in_shard(slot, communicator.rank)
        local = shard.narrow(0, offset, spec.slice.numel)
        with torch.no_grad():
            local.copy_(spec.slice_of(parameter))
        sharded = make_parameter(local, spec, parameter.requires_grad)
        sharded.__dict__.update(parameter.__dict__)  # marks that the user put on the parameter
        torch_internals.swap_tensors(parameter, sharded)
        parameters.append(cast(ShardedTensor, parameter))
    segment = Segment(plan.users[0].name, layout, shard, parameters, communicator, policy)
    for parameter in parameters:
        parameter.spec.segment = weakref.ref(segment)
    return segment


def _make_unit(
    plan: UnitPlan,
    segment_of: dict[Tensor, Segment],
    prepared: Prepared,
    communicator: Communicator,
) -> Unit:
    uses: dict[Segment, SegmentUse] = {}
    for parameter, sites in plan.sites.items():
        segment = segment_of[parameter]
        use = uses.setdefault(segment, SegmentUse(segment, {}))
        slot = cast(ShardedTensor, parameter).spec.slot
        use.sites[segment.layout.slots.index(slot)] = sites
    return Unit(
        plan.name or type(plan.modules[0]).__name__,
        plan.modules,
        list(uses.values()),
        communicator,
        policy=prepared.policy,
        reshard_after_forward=prepared.plan.reshard_after_forward,
        reshard_after_backward=prepared.plan.reshard_after_backward,
    )


def _attach(module: nn.Module, unit: Unit | None, schedule: Schedule) -> None:
    module.__dict__["_lightning_fsdp_hooks"] = ModuleHooks(module, unit, schedule)
    module.__class__ = _sharded_class(type(module))


def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """One class for all modules of a class: compiled code of one serves the others."""
    if cls not in _sharded_classes:
        namespace = {"__module__": cls.__module__}
        _sharded_classes[cls] = type(cls.__name__, (ShardedModule, cls), namespace)
    return _sharded_classes[cls]


_sharded_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _rename(root: nn.Module, schedule: Schedule) -> None:
    """Give units and parameters their names as seen from the outermost module."""
    names = {module: name for name, module in root.named_modules()}
    for unit in reversed(schedule.units):
        unit.name = names.get(unit.modules[0]) or type(root).__name__
        for segment in unit.segments:
            segment.name = unit.name
    for name, parameter in root.named_parameters():
        if isinstance(parameter, ShardedTensor):
            parameter.spec.name = name


def _move_buffers(root: nn.Module, device: torch.device) -> None:
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != device.type:
                module._buffers[name] = buffer.to(device)
