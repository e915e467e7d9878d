"""The entry point: checks a module, cuts it into units, hooks them, returns the same module.

Everything that can be wrong is found before anything is changed, and what one rank finds, every
rank raises: a module is sharded on all ranks, or untouched on all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp.config import ZERO3, MixedPrecisionPolicy, PrecisionPolicy, ShardingPlan
from lightning_fsdp.core import grouping
from lightning_fsdp.core.assembly import Prepared, assemble
from lightning_fsdp.core.engine.communicator import Communicator
from lightning_fsdp.core.host_memory import MappedHome, OffloadedHome
from lightning_fsdp.core.ranks import groups
from lightning_fsdp.core.ranks.groups import Comm, StateOver
from lightning_fsdp.core.safety import checks
from lightning_fsdp.core.sharded_module import schedules_of
from lightning_fsdp.core.tensors.sharded_tensor import flat_param_of
from lightning_fsdp.units import UnitSelector, find_units

_Module = TypeVar("_Module", bound=nn.Module)


_Choice = tuple[ShardingPlan, list[tuple[str, list[nn.Module]]]]
"""The plan, checked, and the units below a root: the name and modules of each."""

_Choose = Callable[[nn.Module], _Choice]


class _Options(NamedTuple):
    """The arguments that :func:`fully_shard` and :func:`shard_model` share, as they were given."""

    mesh: DeviceMesh | None
    mp_policy: PrecisionPolicy | None
    offload_policy: Any
    ignored_params: set[nn.Parameter] | None
    comm: Comm
    state_over: StateOver


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: None = None,
    mp_policy: PrecisionPolicy | None = None,
    offload_policy: Any = None,
    ignored_params: set[nn.Parameter] | None = None,
    comm: Comm = "auto",
    state_over: StateOver = "replica",
) -> Any:
    """Shard the parameters of one module as one unit; call bottom-up, as with torch's FSDP2.

    Parameters that inner calls have sharded already stay in their own units. What is on the meta
    device gets initial values, one unit at a time and the same on every rank, from the module's own
    initialisers: ``reset_parameters()``, and ``_init_weights(module)`` of an enclosing model. What
    has values already is not broadcast, as each rank keeps its slice of its own model: build the
    same one on every rank. Collective.

    Args:
        module: A module, or a list of modules that run one after another and form one unit.
        mesh: Device mesh; default: all ranks of the default process group. Over a 2-D mesh
            parameters are sharded over the last dimension and replicated over the first (HSDP).
        reshard_after_forward: Free the whole copy after the forward; ``None``: unless the module is
            the outermost one.
        shard_placement_fn: Only ``None``, FSDP2's default: parameters are cut as one flat region.
        mp_policy: Dtypes; this package's or torch's ``MixedPrecisionPolicy``.
        offload_policy: This package's or torch's ``CPUOffloadPolicy``: shards, reduced gradients
            and optimizer state live on the host. ``None`` or ``OffloadPolicy()``: they live on the
            device that computes.
        ignored_params: Parameters to leave as they are.
        comm: How ranks get data from each other over gloo. ``"direct"``: ranks of one host read
            each other's memory. ``"pairs"``: they send. ``"auto"``: directly where the kernel
            permits it to all of them. Other backends use their own collectives.
        state_over: Over which ranks of a 2-D mesh shards, and with them optimizer state, are
            spread. ``"replica"``: those of the last dimension. ``"all"``: both dimensions; each
            rank also keeps, in the compute dtype, the part that gathers over the last dimension
            read. It is filled over the first dimension, once per optimizer step.

    Returns:
        The same object, which now has the methods of :class:`ShardedModule`. Its parameters keep
        their identity and become :class:`ShardedTensor`.

    Raises:
        RuntimeError: There is no process group, ranks disagree, or ``"direct"`` is not permitted.
        ValueError: A module or parameter cannot be sharded (the message names it), ``comm`` or
            ``state_over`` is not offered, or ``"all"`` comes without a 2-D mesh.
        TypeError: An argument has the wrong type.
        NotImplementedError: An argument asks for what is not supported.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]

    def choose(root: nn.Module) -> _Choice:
        if shard_placement_fn is not None:
            raise NotImplementedError(
                f"fully_shard: expected None for shard_placement_fn, got {shard_placement_fn!r}. "
                "Parameters are cut as one flat region, whatever their dimensions; leave it out."
            )
        return replace(ZERO3, reshard_after_forward=reshard_after_forward), [("", modules)]

    options = _Options(mesh, mp_policy, offload_policy, ignored_params, comm, state_over)
    _shard(modules, options, choose)
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
    comm: Comm = "auto",
    state_over: StateOver = "replica",
) -> _Module:
    """Shard a whole model; finds the units itself. Collective.

    A model built under ``torch.device("meta")`` gets its initial values here, see
    :func:`fully_shard`; only this rank's shard and one unit at a time are ever in memory.

    Args:
        model: The model; all of its parameters are sharded but ``ignored_params``.
        plan: ``ZERO2`` or ``ZERO3``.
        units: Class names, a predicate on modules, or a minimum number of parameters; default:
            repeated blocks, embeddings, head and leftovers.
        mesh: As in :func:`fully_shard`, like the arguments that follow.
        mp_policy: Dtypes.
        offload_policy: Where shards live.
        ignored_params: Parameters to leave as they are.
        comm: How data moves over gloo.
        state_over: Over which ranks shards are spread.

    Returns:
        The same object.

    Raises:
        As :func:`fully_shard`.
    """

    def choose(root: nn.Module) -> _Choice:
        if not isinstance(plan, ShardingPlan):
            raise TypeError(f"shard_model: expected a ShardingPlan (ZERO2, ZERO3), got {plan!r}.")
        return plan, find_units(root, units)

    options = _Options(mesh, mp_policy, offload_policy, ignored_params, comm, state_over)
    _shard([model], options, choose)
    return model


def _shard(modules: list[Any], options: _Options, choose: _Choose) -> None:
    """Check everything, agree with the other ranks, then change the module."""
    # Also for a caller with another default device, e.g. meta, or in inference mode.
    with torch.device("cpu"), torch.inference_mode(False):
        communicator = _open_group(options)
        what = ", ".join(type(module).__name__ for module in modules)
        prepare = functools.partial(_prepare, modules, options, choose, communicator)
        where = f"{groups.describe(communicator)}; comm={options.comm!r}"
        prepared = groups.agree_on(
            communicator, f"sharding {what}", prepare, lambda p: f"{where}; {p.describe()}"
        )
        groups.connect(communicator, options.comm)
        device, offload = communicator.device, prepared.offload
        home = MappedHome(device) if offload is None else OffloadedHome(device, offload)
        assemble(prepared, communicator, home)


def _open_group(options: _Options) -> Communicator:
    """The communicator of the mesh, or of the default group. Collective at the first request.

    Raises:
        RuntimeError: There is no process group.
    """
    mesh = options.mesh
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "fully_shard: expected a process group, got none. Call "
            "torch.distributed.init_process_group() first (or start the script with torchrun)."
        )
    # A mesh that is not offered is refused later, by all ranks: they agree in the default group.
    over = mesh if isinstance(mesh, DeviceMesh) and checks.is_offered(mesh) else dist.group.WORLD
    assert over is not None, "it is initialized"
    return groups.communicator_of(over, comm=options.comm, state_over=options.state_over)


def _prepare(
    modules: list[Any], options: _Options, choose: _Choose, communicator: Communicator
) -> Prepared:
    """Check everything; what is to be done."""
    ignored = set(options.ignored_params or ())
    checks.check_arguments(modules, options.mesh, options.mp_policy, ignored)
    groups.check_choices(communicator, options.mesh, options.comm, options.state_over)
    offload = checks.read_offload_policy(options.offload_policy)
    # Names that errors give: a list of modules has none of its own.
    named = nn.ModuleDict({f"modules[{index}]": module for index, module in enumerate(modules)})
    root = modules[0] if len(modules) == 1 else named
    inner = schedules_of(root.modules())
    checks.check_modules(modules, inner)
    checks.check_meshes([schedule.communicator for schedule in inner], communicator)
    plan, chosen = choose(root)
    managed = {m for schedule in inner for unit in schedule.units for m in unit.modules}
    units = grouping.plan_units(root, chosen, ignored, managed)
    checks.check_parameters(units)
    policy = options.mp_policy or MixedPrecisionPolicy()
    known = list(filter(None, (flat_param_of(p) for unit in units for p in unit.sites)))
    checks.check_ties(known, policy, offload)
    checks.check_meshes([flat_param.communicator for flat_param in known], communicator)
    flat_params = grouping.cut_flat_params(units)
    return Prepared(root, modules, plan, policy, offload, units, flat_params)
