"""The door: checks a module, cuts it into units, hooks them, returns the same module.

Everything that can be wrong is found before anything is changed, and what one rank finds every rank
raises: a module is sharded on all ranks, or untouched on all.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp.config import ZERO3, MixedPrecisionPolicy, PrecisionPolicy, ShardingPlan
from lightning_fsdp.core import optimizer_guard, torch_internals
from lightning_fsdp.core.checks import check_modules, check_parameters, check_shared
from lightning_fsdp.core.collectives import Communicator
from lightning_fsdp.core.grouping import (
    SegmentPlan,
    UnitPlan,
    UnitSelector,
    cut_segments,
    find_units,
    plan_units,
)
from lightning_fsdp.core.hooks import ModuleHooks
from lightning_fsdp.core.layout import plan_segment
from lightning_fsdp.core.schedule import Schedule
from lightning_fsdp.core.segment import Segment, WholeSegment
from lightning_fsdp.core.sharded_module import ShardedModule, hooks_of, unit_of
from lightning_fsdp.core.sharded_tensor import ShardedTensor, ShardSpec, make_parameter
from lightning_fsdp.core.unit import Unit

_Module = TypeVar("_Module", bound=nn.Module)


@dataclass(frozen=True)
class _Options:
    """What a call of the door asks for, checked."""

    communicator: Communicator
    device: torch.device
    plan: ShardingPlan
    policy: PrecisionPolicy
    ignored: set[nn.Parameter]


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: PrecisionPolicy | None = None,
    offload_policy: Any = None,
    ignored_params: set[nn.Parameter] | None = None,
) -> Any:
    """Shard the parameters of one module as one unit; call bottom-up, as with torch's FSDP2.

    Parameters that inner calls have sharded already stay in their own units. Collective.

    Args:
        module: A module, or a list of modules that run one after another and form one unit.
        mesh: 1-D device mesh; default: all ranks of the default process group.
        reshard_after_forward: Free the whole copy after the forward; ``None``: unless the module is
            the outermost one.
        mp_policy: Dtypes; this package's or torch's ``MixedPrecisionPolicy``.
        offload_policy: Not offered yet; torch's ``OffloadPolicy()`` (no offloading) is accepted.
        ignored_params: Parameters to leave as they are.

    Returns:
        The same object, which now has the methods of :class:`ShardedModule`. Its parameters keep
        their identity and become :class:`ShardedTensor`.

    Raises:
        RuntimeError: There is no process group, or ranks disagree.
        ValueError: A module or parameter cannot be sharded; the message names it.
        TypeError: An argument has the wrong type.
        NotImplementedError: An argument asks for what is not there yet.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    for candidate in modules:
        if not isinstance(candidate, nn.Module):
            raise TypeError(
                f"fully_shard: expected an nn.Module or a list of them, got {candidate!r}."
            )
        if isinstance(candidate, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"fully_shard: expected a module with a forward, got {type(candidate).__name__}. "
                "Shard its children instead."
            )
    if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
        raise NotImplementedError(
            f"fully_shard: reshard_after_forward={reshard_after_forward} (to a smaller group) is "
            "not offered. Use True, False or None."
        )
    root = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    plan = ShardingPlan(reshard_after_forward=reshard_after_forward, reshard_after_backward=True)
    options = _check_options(root, mesh, plan, mp_policy, offload_policy, ignored_params)
    _shard(root, [("", modules)], options, outermost=modules)
    return module


def shard_model(
    model: _Module,
    plan: ShardingPlan = ZERO3,
    *,
    units: UnitSelector = None,
    mesh: DeviceMesh | None = None,
    mp_policy: PrecisionPolicy | None = None,
    offload_policy: Any = None,
    ignored_params: set[nn.Parameter] | None = None,
) -> _Module:
    """Shard a whole model; finds the units itself. Collective.

    Args:
        model: The model; nothing of it stays unsharded but ``ignored_params``.
        plan: ``ZERO2`` or ``ZERO3``.
        units: Class names, a predicate on modules, or a minimum number of parameters; default:
            repeated blocks, embeddings, head and leftovers.
        mesh: As in :func:`fully_shard`; so are the arguments after it.
        mp_policy: Dtypes.
        offload_policy: Not offered yet.
        ignored_params: Parameters to leave as they are.

    Returns:
        The same object.

    Raises:
        As :func:`fully_shard`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard_model: expected an nn.Module, got {model!r}.")
    if not isinstance(plan, ShardingPlan):
        raise TypeError(f"shard_model: expected a ShardingPlan (ZERO2, ZERO3), got {plan!r}.")
    options = _check_options(model, mesh, plan, mp_policy, offload_policy, ignored_params)
    _shard(model, find_units(model, units), options, outermost=[model])
    return model


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let another method than ``forward`` gather the module's parameters, too.

    Args:
        module: A sharded module.
        name: A method, e.g. ``generate`` or a Lightning ``training_step``.

    Raises:
        ValueError: The module is not sharded, or has no such method.
    """
    hooks = hooks_of(module)
    if hooks is None:
        raise ValueError(
            f"register_forward_method: expected a sharded module, got {type(module).__name__}. "
            "Call fully_shard first."
        )
    method = getattr(module, name, None)
    if not callable(method):
        raise ValueError(
            f"register_forward_method: expected a method of {type(module).__name__}, got {name!r}."
        )
    reference = weakref.ref(module)
    function = getattr(type(module), name)

    def gathering(*args: Any, **kwargs: Any) -> Any:
        owner = reference()
        assert owner is not None, "a method is called through its module"
        return hooks.run(lambda *a, **k: function(owner, *a, **k), *args, **kwargs)

    setattr(module, name, gathering)


def _check_options(
    root: nn.Module,
    mesh: DeviceMesh | None,
    plan: ShardingPlan,
    mp_policy: PrecisionPolicy | None,
    offload_policy: Any,
    ignored_params: set[nn.Parameter] | None,
) -> _Options:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "fully_shard: expected a process group, got none. Call "
            "torch.distributed.init_process_group() first (or start the script with torchrun)."
        )
    if mesh is not None and mesh.ndim != 1:
        raise NotImplementedError(
            f"fully_shard: expected a 1-D mesh, got {mesh.ndim} dimensions "
            f"{mesh.mesh_dim_names}. Replication over a second dimension (HSDP) is not offered "
            "yet; pass the dimension to shard over, e.g. mesh['shard']."
        )
    if offload_policy is not None and type(offload_policy).__name__ != "OffloadPolicy":
        raise NotImplementedError(
            f"fully_shard: expected offload_policy=None, got {offload_policy!r}. CPU offload is "
            "not offered yet."
        )
    policy: PrecisionPolicy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    if not isinstance(policy, PrecisionPolicy):
        raise TypeError(
            f"fully_shard: expected a MixedPrecisionPolicy for mp_policy, got {mp_policy!r}."
        )
    group = dist.group.WORLD if mesh is None else mesh.get_group()
    assert group is not None, "the default group is initialized"
    device_type = _device_type_of(group) if mesh is None else mesh.device_type
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return _Options(Communicator.of(group), device, plan, policy, set(ignored_params or ()))


def _shard(
    root: nn.Module,
    units: Sequence[tuple[str, list[nn.Module]]],
    options: _Options,
    outermost: Sequence[nn.Module],
) -> None:
    """Check everything, agree with the other ranks, then change the module."""
    error: Exception | None = None
    plans: list[UnitPlan] = []
    segments: list[SegmentPlan] = []
    inner = _inner_schedules(root)
    try:
        check_modules(outermost, inner)
        managed = {module for module in root.modules() if unit_of(module) is not None}
        plans = plan_units(root, units, options.ignored, managed)
        for plan in plans:
            check_parameters(plan)
        segments = cut_segments(plans)
        known = _known_segments(inner)
        check_shared(plans, known)
        statement = _describe(plans, segments, options)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as caught:
        error = caught
        statement = f"refused, {type(caught).__name__}: {caught}"
    try:
        options.communicator.agree(f"sharding {type(root).__name__}", statement)
    except RuntimeError as disagreement:
        raise disagreement from error
    if error is not None:
        raise error
    _build(root, plans, segments, known, options, inner, outermost)


def _build(
    root: nn.Module,
    plans: Sequence[UnitPlan],
    segment_plans: Sequence[SegmentPlan],
    known: dict[Tensor, Segment],
    options: _Options,
    inner: Sequence[Schedule],
    outermost: Sequence[nn.Module],
) -> None:
    schedule = Schedule(options.communicator)
    for other in inner:
        for unit in other.units:
            if unit.reshard_after_forward is None:  # it is not the outermost one any more
                unit.reshard_after_forward = True
        schedule.add(other.units)
    segment_of = dict(known)
    for segment_plan in segment_plans:
        if not isinstance(segment_plan.parameters[0], ShardedTensor):
            segment = _make_segment(segment_plan, options)
            segment_of.update(dict.fromkeys(segment.parameters, segment))
    for plan in plans:
        unit = _make_unit(plan, segment_of, options)
        schedule.add([unit])
        for module in plan.modules:
            _attach(module, unit, schedule)
        for places in plan.sites.values():
            for site in places:
                site.module.__dict__.setdefault("_lightning_fsdp_unit", unit)
    for module in outermost:
        if hooks_of(module) is None:
            _attach(module, None, schedule)
    for module in root.modules():
        hooks = hooks_of(module)
        if hooks is not None:
            hooks.schedule = schedule
    _rename(root, schedule)
    _move_buffers(root, options.device)
    if options.device.type == "cpu":
        torch_internals.reuse_freed_host_memory()
    optimizer_guard.watch(schedule)


def _make_segment(plan: SegmentPlan, options: _Options) -> Segment:
    communicator = options.communicator
    shapes = [tuple(parameter.shape) for parameter in plan.parameters]
    named_shapes = list(zip(plan.names, shapes, strict=True))
    layout = plan_segment(named_shapes, communicator.world_size)
    dtype = plan.parameters[0].dtype
    shard = torch.zeros(layout.shard_numel, dtype=dtype, device=options.device)
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
    return Segment(layout, shard, parameters)


def _make_unit(plan: UnitPlan, segment_of: dict[Tensor, Segment], options: _Options) -> Unit:
    segments = list(dict.fromkeys(segment_of[parameter] for parameter in plan.sites))
    wholes = [
        WholeSegment(segment, [plan.sites.get(p, []) for p in segment.parameters], options.policy)
        for segment in segments
    ]
    return Unit(
        plan.name or type(plan.modules[0]).__name__,
        plan.modules,
        wholes,
        options.communicator,
        policy=options.policy,
        reshard_after_forward=options.plan.reshard_after_forward,
        reshard_after_backward=options.plan.reshard_after_backward,
    )


def _attach(module: nn.Module, unit: Unit | None, schedule: Schedule) -> None:
    module.__dict__["_lightning_fsdp_hooks"] = ModuleHooks(module, unit, schedule)
    cls = type(module)
    module.__class__ = type(cls.__name__, (ShardedModule, cls), {"__module__": cls.__module__})


def _rename(root: nn.Module, schedule: Schedule) -> None:
    """Give units and parameters their names as seen from the outermost module."""
    names = {module: name for name, module in root.named_modules()}
    for unit in schedule.units:
        unit.name = names.get(unit.modules[0]) or type(root).__name__
    for name, parameter in root.named_parameters():
        if isinstance(parameter, ShardedTensor):
            parameter.spec.name = name


def _move_buffers(root: nn.Module, device: torch.device) -> None:
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != device.type:
                module._buffers[name] = buffer.to(device)


def _inner_schedules(root: nn.Module) -> list[Schedule]:
    hooks = [hooks_of(module) for module in root.modules()]
    return list(dict.fromkeys(h.schedule for h in hooks if h is not None))


def _known_segments(schedules: Sequence[Schedule]) -> dict[Tensor, Segment]:
    return {
        parameter: whole.segment
        for schedule in schedules
        for unit in schedule.units
        for whole in unit.wholes
        for parameter in whole.segment.parameters
    }


def _describe(plans: Sequence[UnitPlan], segments: Sequence[SegmentPlan], options: _Options) -> str:
    """One text that is equal on two ranks exactly if they are about to shard alike."""
    lines = [f"{options.plan}, {options.policy}"]
    for plan in plans:
        parameters = ", ".join(
            f"{plan.names[p]} {tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
            for p in plan.sites
        )
        lines.append(f"unit {plan.name or '(root)'}: {parameters}")
    numel = sum(math.prod(p.shape) for segment in segments for p in segment.parameters)
    lines.append(f"{numel} elements in {len(segments)} segments")
    return "; ".join(lines)


def _device_type_of(group: dist.ProcessGroup) -> str:
    return "cuda" if "nccl" in dist.get_backend(group) else "cpu"
