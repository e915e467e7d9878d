"""Refuses what cannot be sharded, before anything is changed, or what was added too late.

Messages name it, with a cure, but not the rank: ranks compare them, and all raise the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp.config import CPUOffloadPolicy, PrecisionPolicy
from lightning_fsdp.core import torch_internals
from lightning_fsdp.core.engine.communicator import Communicator
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.hooks import hooks_of, unit_of
from lightning_fsdp.core.engine.schedule import Schedule
from lightning_fsdp.core.grouping import UnitPlan
from lightning_fsdp.core.ranks.groups import describe, spans_same_ranks
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor, flat_param_of
from lightning_fsdp.units import has_forward


def check_arguments(modules: Sequence[Any], mesh: Any, mp_policy: Any, ignored: set[Any]) -> None:
    """Refuse arguments of the wrong type, and meshes that are not supported.

    Raises:
        TypeError: A module, the mesh, the policy or an ignored parameter has the wrong type.
        ValueError: A module has no forward of its own.
        NotImplementedError: The mesh has other than 1 or 2 dimensions, or other devices.
    """
    for got, kind, words in [
        *((module, (nn.Module,), "an nn.Module or a list of them") for module in modules),
        *((each, (Tensor,), "parameters for ignored_params") for each in ignored),
        (mesh, (DeviceMesh, type(None)), "a DeviceMesh for mesh"),
        (mp_policy, (PrecisionPolicy, type(None)), "a MixedPrecisionPolicy for mp_policy"),
    ]:
        if not isinstance(got, kind):
            raise TypeError(f"fully_shard: expected {words}, got {got!r}.")
    for module in modules:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not has_forward(module):
            got, cure = type(module).__name__, "Shard its children instead."
            raise ValueError(_message("a module with a forward", got, cure))
    if mesh is not None and not is_offered(mesh):
        expected = "a mesh of 1 dimension (shard) or 2 (replicate, shard) of cpu or cuda devices"
        got = f"{mesh.ndim} dimensions {mesh.mesh_dim_names} of {mesh.device_type!r}"
        cure = "Pass the dimensions to use, e.g. mesh['replicate', 'shard']."
        raise NotImplementedError(_message(expected, got, cure))


def read_offload_policy(policy: Any) -> CPUOffloadPolicy | None:
    """An offload policy, this package's or torch's, as this package's; ``None`` where it is off.

    Raises:
        TypeError: It is neither.
        ValueError: It asks for pinned memory, and there is no accelerator.
    """
    names = [kind.__name__ for kind in type(policy).__mro__]  # torch's FSDP is not imported here
    if "CPUOffloadPolicy" not in names:
        if policy is None or "OffloadPolicy" in names:
            return None
        raise TypeError(
            f"fully_shard: expected a CPUOffloadPolicy for offload_policy, got {policy!r}."
        )
    if policy.pin_memory and not torch.accelerator.is_available():
        expected = "an accelerator for offload_policy=CPUOffloadPolicy(pin_memory=True)"
        cure = "Pass CPUOffloadPolicy(pin_memory=False)."
        raise ValueError(_message(expected, "none, so no memory can be pinned", cure))
    return CPUOffloadPolicy(policy.pin_memory)


def is_offered(mesh: DeviceMesh) -> bool:
    """Whether a mesh can be sharded over."""
    return mesh.ndim in (1, 2) and mesh.device_type in ("cpu", "cuda")


def check_meshes(earlier: Iterable[Communicator], communicator: Communicator) -> None:
    """Refuse a mesh that differs from that of units sharded before: norms and agreement need one.

    Raises:
        ValueError: It differs.
    """
    for other in earlier:
        if not spans_same_ranks(other, communicator):
            got = f"{describe(other)} before and {describe(communicator)} now"
            cure = "Pass the same mesh to every call."
            raise ValueError(_message("one mesh for all units of a model", got, cure))


def check_modules(outermost: Sequence[nn.Module], inner: Sequence[Schedule]) -> None:
    """Refuse modules that cannot be sharded now.

    Raises:
        ValueError: They are sharded already, or wrapped by DDP.
        RuntimeError: A forward or backward of an inner module runs.
    """
    for module in outermost:
        kind = type(module).__name__
        if hooks_of(module) is not None:
            got, cure = f"{kind}, which is already sharded", "Call fully_shard once per module."
            raise ValueError(_message("a module that is not sharded", got, cure))
        if (unit := unit_of(module)) is not None:
            got = f"{kind}, whose parameters already belong to unit {unit.name!r}"
            raise ValueError(_message("to be called bottom-up", got, "Shard inner modules first."))
        if isinstance(module, nn.parallel.DistributedDataParallel):
            cure = "Shard the module inside it instead of wrapping it."
            raise ValueError(_message("a plain module", "DistributedDataParallel", cure))
    if any(schedule.is_busy for schedule in inner):
        raise RuntimeError(
            "fully_shard: expected to be called between steps, got a call during a forward or "
            "backward of an inner module."
        )


def check_parameters(units: Iterable[UnitPlan]) -> None:
    """Refuse parameters that cannot be sharded, by name.

    Args:
        units: The units to be.

    Raises:
        ValueError: A parameter is of a kind, or used in a way, that does not work on slices; or it
            shares memory with another one: each would get slices of its own, which would diverge.
    """
    found: dict[int, str] = {}
    for plan in units:
        for parameter, sites in plan.sites.items():
            if flat_param_of(parameter) is not None:
                continue  # tied to a unit that was sharded before
            name = plan.names[parameter]
            modules = [site.module for site in sites]
            problem = _problem_with(parameter) or problem_with_use(parameter, name, modules, found)
            if problem is not None:
                expected, got, cure = problem
                where = f"unit {plan.name or type(plan.modules[0]).__name__!r}"
                raise ValueError(_message(expected, f"{got} for {name!r}", cure, where))


def check_ties(
    flat_params: Iterable[FlatParameter], policy: PrecisionPolicy, offload: CPUOffloadPolicy | None
) -> None:
    """Refuse other policies for weights tied to a unit sharded before: they share a flat parameter.

    Raises:
        ValueError: The dtypes or the offload policies differ.
    """
    for flat_param in flat_params:
        theirs = flat_param.policy
        pairs = {
            "param_dtype in mp_policy": (theirs.param_dtype, policy.param_dtype),
            "reduce_dtype in mp_policy": (theirs.reduce_dtype, policy.reduce_dtype),
            "offload_policy": (flat_param.home.policy, offload),
        }
        for what, (there, here) in pairs.items():
            if there != here:
                expected = f"one {what} for all units that share its weights"
                got, cure = f"{there} there and {here} here", "Pass the same policy to both calls."
                raise ValueError(_message(expected, got, cure, f"unit {flat_param.name!r}"))


def plain_in(module: nn.Module) -> dict[str, Tensor]:
    """Plain parameters by name, of modules in no unit: those in units may hold leaves now."""
    return {
        name: parameter
        for prefix, inner in module.named_modules()
        if unit_of(inner) is None
        for name, parameter in inner.named_parameters(prefix, recurse=False)
        if not isinstance(parameter, ShardedTensor)
    }


def refuse_added(known: dict[str, Tensor], module: nn.Module) -> None:
    """Refuse to train parameters that were added to a module after it was sharded.

    Args:
        known: Those that were left plain when it was sharded; their owner may have moved them, or
            wrapped their module, since.
        module: The module that is about to run.

    Raises:
        RuntimeError: There is one. Each rank would step it with its own gradient.
    """
    for name, parameter in plain_in(module).items():
        is_known = name in known or any(parameter is other for other in known.values())
        if parameter.requires_grad and not is_known:
            raise RuntimeError(
                f"{type(module).__name__}: expected all parameters before the sharding, got "
                f"{name!r} after it: each rank would train its own. Add adapters and heads before, "
                "in a Trainer in configure_model; or name them in fully_shard's ignored_params."
            )


def _message(expected: str, got: str, cure: str, where: str = "fully_shard") -> str:
    return f"{where}: expected {expected}, got {got}. {cure}"


def _problem_with(parameter: Tensor) -> tuple[str, str, str] | None:
    """What was expected, what was found, what to do; ``None`` for a parameter in order."""
    if isinstance(parameter, ShardedTensor):
        cure = "Copy the module that it belongs to, or pass full_tensor() on as a new parameter."
        return "a plain parameter", "the copy of a sharded one", cure
    if torch.nn.parameter.is_lazy(parameter):
        return "an initialized parameter", "a lazy one", "Run a forward first."
    if not parameter.is_floating_point():
        cure = "Register it as a buffer, a complex one as two real ones, or in ignored_params."
        return "a floating-point parameter", str(parameter.dtype), cure
    if type(parameter) is not nn.Parameter and not torch_internals.is_fake(parameter):
        cure = "Use plain parameters, or add it to ignored_params."
        return "a plain nn.Parameter", type(parameter).__name__, cure
    if parameter.is_inference() and parameter.requires_grad:
        cure = "Build the model outside of torch.inference_mode(); torch.no_grad() is right."
        return "a parameter that autograd knows", "an inference tensor", cure
    if parameter.layout is not torch.strided:
        return "a strided parameter", str(parameter.layout), "Convert it with to_dense()."
    if parameter.grad is not None:
        return "no gradient yet", "one in .grad", "Call zero_grad() before sharding."
    if (dtype := getattr(parameter, "grad_dtype", None)) not in (None, parameter.dtype):
        cure = "Leave grad_dtype alone: shards and gradients have the dtype of their parameter."
        return f"a gradient of {parameter.dtype}", f"grad_dtype = {dtype}", cure
    return None


def problem_with_use(
    parameter: Tensor, name: str, modules: Iterable[nn.Module], found: dict[int, str]
) -> tuple[str, str, str] | None:
    """A use of a parameter that is lost where modules compute with a copy of it.

    Args:
        parameter: The parameter.
        name: Its name, the same wherever it is registered.
        modules: The modules that it is registered in.
        found: Names of parameters asked about before, by the address of their first element;
            written.

    Returns:
        As :func:`_problem_with`.
    """
    if torch_internals.has_gradient_hooks(parameter):
        cure = "Use on_local or on_reduced of gradients(module), or of trainer.strategy.gradients."
        return "no hook of its gradient before sharding", "one", cure
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            return "a module of Python", "one of TorchScript", "Take the one that was scripted."
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if module.sparse:
            return "a dense gradient", "an embedding with sparse=True", "Build it dense."
        if module.max_norm is not None:  # it would write to the copy, which is thrown away
            cure = "Renormalise after the optimizer's step; fully_shard also has ignored_params."
            return "a forward that reads weights", "an embedding with max_norm", cure
    if torch_internals.has_values(parameter) and parameter.numel():
        other = found.setdefault(parameter.data_ptr(), name)
        if other != name:
            cure = "Register one parameter in both places, which ties them, or clone values."
            return "own memory", f"that of {other!r}", cure
    return None
