"""Turns a module that has passed all checks into a sharded one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import cast

import torch
from torch import Tensor, nn

from lightning_fsdp.config import CPUOffloadPolicy, PrecisionPolicy, ShardingPlan
from lightning_fsdp.core import host_memory, torch_internals
from lightning_fsdp.core.engine.communicator import Communicator
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.home import Home
from lightning_fsdp.core.engine.hooks import ModuleHooks, enter_in_unit, hooks_of
from lightning_fsdp.core.engine.layout import plan_layout
from lightning_fsdp.core.engine.schedule import Schedule
from lightning_fsdp.core.engine.sharded import ShardSpec
from lightning_fsdp.core.engine.unit import Site, Unit, WeakModule
from lightning_fsdp.core.engine.watcher import Watcher
from lightning_fsdp.core.grouping import FlatParameterPlan, UnitPlan, reads_weights_in_backward
from lightning_fsdp.core.materialize import materialize, meta_buffers
from lightning_fsdp.core.optimizers import optimizer_guard
from lightning_fsdp.core.ranks.agreement import RecordedOrder
from lightning_fsdp.core.ranks.groups import agree_on, control_of
from lightning_fsdp.core.ranks.replicas import ReplicatedFlatParameter
from lightning_fsdp.core.safety.checks import plain_in, refuse_added
from lightning_fsdp.core.safety.guards import FreedMemory
from lightning_fsdp.core.safety.kept_losses import losses_kept_in
from lightning_fsdp.core.safety.recovery import Recovery
from lightning_fsdp.core.safety.unused import UnusedParameters
from lightning_fsdp.core.sharded_module import ShardedModule, schedules_of
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor, make_parameter, refuse_graph
from lightning_fsdp.core.tensors.unreduced_gradient import UnreducedGradient
from lightning_fsdp.core.tensors.whole_values import one_stream_of_numbers, support_operations


@dataclass(frozen=True)
class Prepared:
    """What to shard and how, after all checks.

    Attributes:
        root: The module, or an ``nn.ModuleDict`` of several.
        outermost: The modules that the caller gave.
        plan: When whole copies are freed.
        policy: Dtypes.
        offload: How shards are offloaded; ``None`` where they are not.
        units: The units to make, inner ones first.
        flat_params: The flat parameters to make.
    """

    root: nn.Module
    outermost: list[nn.Module]
    plan: ShardingPlan
    policy: PrecisionPolicy
    offload: CPUOffloadPolicy | None
    units: list[UnitPlan]
    flat_params: list[FlatParameterPlan]

    def describe(self) -> str:
        """A text that is equal on two ranks exactly if they are about to shard in the same way."""
        lines = [f"{self.plan}, {self.policy}, {self.offload or 'not offloaded'}"]
        for unit in self.units:
            parameters = ", ".join(
                f"{unit.names[p]} {tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
                f"{' on meta' if p.is_meta else ''}"
                for p in unit.sites
            )
            lines.append(f"unit {unit.name or '(root)'}: {parameters}")
        if buffers := meta_buffers(self.root):
            lines.append(f"buffers on meta: {', '.join(buffers.values())}")
        return "; ".join(lines)


class NewShard:
    """The shard of a flat parameter to be, which takes slices of whole parameters.

    Attributes:
        shard: ``(layout.shard_numel,)``, main dtype, where shards live.
        specs: By parameter.
    """

    def __init__(self, plan: FlatParameterPlan, communicator: Communicator, home: Home) -> None:
        names = plan.users[0].names
        named_shapes = [(names[p], tuple(p.shape)) for p in plan.parameters]
        layout = plan_layout(named_shapes, communicator.world_size, communicator.places)
        self.shard = home.new_shard(layout.shard_numel, plan.parameters[0].dtype)
        self.specs = {
            parameter: ShardSpec(names[parameter], index, layout, communicator, home)
            for index, parameter in enumerate(plan.parameters)
        }

    def take(self, parameter: Tensor, whole: Tensor) -> None:
        """Copy this rank's elements of a parameter out of ``whole``, its value."""
        spec = self.specs[parameter]
        with torch.no_grad():
            spec.part_of(self.shard).copy_(spec.slice_of(whole))


def assemble(prepared: Prepared, communicator: Communicator, home: Home) -> None:
    """Shard what was prepared. Collective.

    Raises:
        ValueError: Something on the meta device has no initialiser. Like anything raised here, on
            every rank, and before the module is changed.
        RuntimeError: Ranks came to different initial values.
    """
    new_shards, buffers = _initialise(prepared, communicator, home)
    support_operations()
    names = control_of(communicator).model_names()
    schedule = Schedule(communicator, partial(_new_watchers, communicator, names))
    for other in schedules_of(prepared.root.modules()):
        for unit in other.units:
            if unit.reshard_after_forward is None:  # it is not the outermost one any more
                unit.reshard_after_forward = True
        schedule.add(other.units)
    flat_params = []  # parameters refer to them weakly: kept alive until units own them
    for plan in prepared.flat_params:
        new = new_shards.get(plan.parameters[0]) or NewShard(plan, communicator, home)
        flat_params.append(_make_flat_param(plan, new, prepared.policy))
    for unit_plan in prepared.units:
        unit = _make_unit(unit_plan, prepared, communicator)
        schedule.add([unit])
        for module in unit_plan.modules:
            _attach(module, unit)
        for sites in unit_plan.sites.values():
            for site in sites:
                enter_in_unit(site.module, unit)
                torch_internals.stop_flattening(site.module)
    for module in prepared.outermost:
        if hooks_of(module) is None:
            _attach(module, None)
    for module in prepared.root.modules():
        if (hooks := hooks_of(module)) is not None:
            hooks.run_by(schedule, losses_kept_in(module), partial(refuse_added, plain_in(module)))
    _rename(prepared.root, schedule)
    _move_buffers(prepared.root, home.compute_device, buffers)
    optimizer_guard.watch()


def _initialise(
    prepared: Prepared, communicator: Communicator, home: Home
) -> tuple[dict[Tensor, NewShard], dict[Tensor, Tensor]]:
    """Compute values for what is on the meta device, changing nothing of the module. Collective.

    Returns:
        By parameter, the shard of each flat parameter with some on the meta device, which then
        holds this rank's slices of their values; and the real buffer, by the one that it replaces.
    """
    new_shards: dict[Tensor, NewShard] = {}
    for plan in prepared.flat_params:
        if any(parameter.is_meta for parameter in plan.parameters):
            new_shards |= dict.fromkeys(plan.parameters, NewShard(plan, communicator, home))
    if not new_shards and not meta_buffers(prepared.root):
        return {}, {}

    def compute() -> tuple[dict[Tensor, Tensor], str]:
        with one_stream_of_numbers(communicator):
            return materialize(
                prepared.root,
                [unit.sites for unit in prepared.units],
                lambda parameter, whole: new_shards[parameter].take(parameter, whole),
            )

    what = (
        f"initialising {type(prepared.root).__name__} (where ranks differ, initialisers drew from "
        "another generator than torch's, or read what differs between ranks)"
    )
    return new_shards, agree_on(communicator, what, compute, itemgetter(1))[0]


def _new_watchers(communicator: Communicator, names: Iterator[str]) -> list[Watcher]:
    """The watchers of a schedule, or of a copy of it; each takes the next of the model's names."""
    watchers: list[Watcher] = [
        RecordedOrder(control_of(communicator), next(names)),
        UnusedParameters(communicator.any_rank),
        FreedMemory(),
        Recovery(),
    ]
    if communicator.device.type == "cpu":
        watchers.append(host_memory.UnusedMemory())
    return watchers


def _make_flat_param(
    plan: FlatParameterPlan, new: NewShard, policy: PrecisionPolicy
) -> FlatParameter:
    """Turn parameters into sharded ones, as the same objects, and make their flat parameter."""
    for parameter in plan.parameters:
        if not parameter.is_meta:
            new.take(parameter, parameter)
        spec = new.specs[parameter]
        sharded = make_parameter(spec.part_of(new.shard), spec, parameter.requires_grad)
        sharded.__dict__.update(parameter.__dict__)  # marks that the user put on the parameter
        if parameter.requires_grad:
            # The node that accumulates the gradient. Graphs from before share it while one of them
            # is alive: the hook refuses their backward. Without one, this is a new node.
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            node.register_prehook(partial(refuse_graph, spec))
        torch_internals.swap_tensors(parameter, sharded)
    parameters = cast(tuple[ShardedTensor, ...], tuple(plan.parameters))
    # What follows a reduction is a mean over replicas, or over hosts.
    means = parameters[0].spec.communicator.after_reduction
    kind = ReplicatedFlatParameter if means else FlatParameter
    return kind(plan.users[0].name, new.shard, parameters, policy, UnreducedGradient)


def _make_unit(plan: UnitPlan, prepared: Prepared, communicator: Communicator) -> Unit:
    """Make a unit of parameters that are sharded by now."""
    sites_in: dict[FlatParameter, dict[int, list[Site]]] = {}
    for parameter, sites in plan.sites.items():
        spec = cast(ShardedTensor, parameter).spec
        sites_in.setdefault(spec.flat_param(), {})[spec.index] = sites
    return Unit(
        plan.name or type(plan.modules[0]).__name__,
        tuple(map(WeakModule, plan.modules)),
        sites_in,
        communicator,
        policy=prepared.policy,
        reshard_after_forward=prepared.plan.reshard_after_forward,
        reshard_after_backward=prepared.plan.reshard_after_backward,
        needs_backward_gather=any(map(reads_weights_in_backward, plan.modules)),
    )


def _attach(module: nn.Module, unit: Unit | None) -> None:
    ModuleHooks(module, unit)
    module.__class__ = _sharded_class(type(module))
    torch_internals.enter_as_sharded(module)


def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """One class for all modules of a class, so that they share compiled code."""
    for derived in cls.__subclasses__():  # no cache of our own, which would keep classes alive
        if derived.__bases__ == (ShardedModule, cls):
            return derived
    return type(cls.__name__, (ShardedModule, cls), {"__module__": cls.__module__})


def _rename(root: nn.Module, schedule: Schedule) -> None:
    """Give units and parameters their names as seen from the outermost module."""
    names = {module: name for name, module in root.named_modules()}
    for unit in reversed(schedule.units):
        if unit.modules:  # the user may have deleted them from the model
            unit.name = names.get(unit.modules[0]) or type(root).__name__
        for flat_param in unit.flat_params:
            flat_param.name = unit.name
    for name, parameter in root.named_parameters():
        if isinstance(parameter, ShardedTensor):
            parameter.spec.name = name


def _move_buffers(root: nn.Module, device: torch.device, real: dict[Tensor, Tensor]) -> None:
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer in real:
                buffer = module._buffers[name] = real[buffer]
            if buffer is not None and buffer.device.type != device.type:
                module._buffers[name] = buffer.to(device)
