"""Every private or renamed name of torch that the core uses, but for the engine's.

Each is here once, with the reason; checked against torch 2.13. If a name goes away, only this file
changes, or the engine's own.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._composable.contract import (  # noqa: TID251 (a list that modules carry)
    REGISTRY_KEY,
    RegistryItem,
)
from torch.optim import Optimizer
from torch.utils import _foreach_utils

StepHook = Callable[[Optimizer, Any, Any], Any]

# Classes of tensors that ``torch.nn.utils`` passes on in lists, if they are not plain.
types_in_lists: list[type[Tensor]] = _foreach_utils._foreach_supported_types

# A context in which torch functions treat subclasses as plain tensors.
without_torch_function = torch._C.DisableTorchFunctionSubclass

# The transform of ``torch.func`` (``grad``, ``vmap``) that is running, or ``None``. No public name.
current_transform: Callable[[], object] = torch._C._functorch.peek_interpreter_stack

# What an optimizer of ``torch.optim`` collects parameters, gradients and state of a group with.
init_group_of: Callable[[Optimizer], Any] = operator.attrgetter("_init_group")

# torch 2.13 renamed them and deprecates the old names; 2.11 and 2.12 have only those.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values. No public name tells those that a dry run makes."""
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether a parameter has hooks on its gradient: before or after it is accumulated."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def next_to_step(optimizer: Optimizer, before: StepHook, after: StepHook) -> None:
    """Make ``before`` the last hook before an optimizer's step, and ``after`` the first one after.

    With public names, hooks are called in the order in which they were registered.
    """
    pre_hooks: Any = optimizer._optimizer_step_pre_hooks
    post_hooks: Any = optimizer._optimizer_step_post_hooks
    ours = -1  # no handle has this number
    pre_hooks[ours], post_hooks[ours] = before, after
    pre_hooks.move_to_end(ours)
    post_hooks.move_to_end(ours, last=False)


def assert_async(condition: Tensor, message: str) -> None:
    """Raise if a 0-d condition is false: on the host at once, on CUDA in the kernel that finds out.

    No public name.
    """
    torch._assert_async(condition, message)


def enter_as_sharded(module: nn.Module) -> None:
    """Tell torch's other ways of distributing a module that this one is sharded.

    ``replicate()`` around it then leaves its parameters alone, and torch's own ``fully_shard``
    refuses it. No public name.
    """
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


def leave_as_plain(module: nn.Module) -> None:
    """Undo :func:`enter_as_sharded`."""
    registry = module.__dict__.get(REGISTRY_KEY, {})
    registry.pop("fully_shard", None)
    if not registry:
        module.__dict__.pop(REGISTRY_KEY, None)


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and a device but no data, as under ``FakeTensorMode``.

    With such tensors, memory and traffic of a model of any size are planned. No public name.
    """
    return isinstance(tensor, FakeTensor)


def access_flags(tensor: Tensor) -> ctypes.Array[ctypes.c_ubyte] | None:
    """Three bytes of a tensor's storage: 1 in the first and third makes every access raise.

    That includes a resize. torch does not check whether a storage was resized to 0 bytes: most
    kernels then follow a null pointer, and the process crashes. A storage has flags that make an
    access raise instead (fake tensors use them), but Python can set neither of the two that are
    needed here, so they are written where they lie in memory, while the storage is alive:

        first     has_mutable_data_ptr_check_: the others are asked at all
        third     throw_on_immutable_data_ptr_

    Returns:
        ``None`` if they are not found; then nothing is guarded.
    """
    offset = None if is_fake(tensor) else _offset_of_access_flags()
    if offset is None:
        return None
    return (ctypes.c_ubyte * 3).from_address(tensor.untyped_storage()._cdata + offset)


@functools.cache
def _offset_of_access_flags() -> int | None:
    """The offset of a ``c10::StorageImpl``'s flags; ``None`` if they are not as in known versions.

    They are three bytes in a row. ``_set_throw_on_mutable_data_ptr`` sets the first two, which
    shows where they are; an attempt on another storage shows that the first and third do what they
    should.
    """
    with torch.inference_mode(False):
        shown, tried = torch.zeros(1, device="cpu"), torch.zeros(1, device="cpu")
    storages = shown.untyped_storage(), tried.untyped_storage()
    length = 96  # bytes; the object is longer
    before = ctypes.string_at(storages[0]._cdata, length)
    torch._C._set_throw_on_mutable_data_ptr(shown)
    after = ctypes.string_at(storages[0]._cdata, length)
    changed = [i for i in range(length) if before[i] != after[i]]
    if len(changed) != 2 or after[changed[0] : changed[0] + 3] != b"\1\1\0":
        return None
    flags = (ctypes.c_ubyte * 3).from_address(storages[1]._cdata + changed[0])
    flags[0] = flags[2] = 1
    try:
        tried.clone()
    except RuntimeError:
        return changed[0]
    finally:
        flags[0] = flags[2] = 0
    return None


def stop_flattening(module: nn.Module) -> None:
    """Let ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` leave their weights where they are.

    They move weights into memory of their own, for cuDNN; leaves would no longer be views of the
    whole copy.
    """
    if isinstance(module, nn.RNNBase):
        module.__dict__["flatten_parameters"] = lambda: None


def allow_flattening(module: nn.Module) -> None:
    """Undo :func:`stop_flattening`."""
    if isinstance(module, nn.RNNBase):
        module.__dict__.pop("flatten_parameters", None)


def backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """Name of a group's backend for devices of a type; it may have another one for each type."""
    backends = dist.get_backend_config(group).split(",")
    return dict(backend.split(":") for backend in backends).get(device_type, "none")


def device_type_of(group: dist.ProcessGroup) -> str:
    """The type of device that a group is meant for: CUDA if it has NCCL."""
    return "cuda" if "nccl" in backend_of(group, "cuda") else "cpu"


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of ``group`` may take. No public name."""
    device = torch.device(device_type_of(group))
    try:
        timeout: timedelta = group._get_backend(device).options._timeout
    except (RuntimeError, AttributeError):  # a backend without options
        return timedelta(minutes=30)
    return timeout


def likeness_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same name whose collectives do nothing.

    To profilers, dispatch modes and other observers, calls on it look like calls on the group. No
    public name makes one.
    """
    from torch._C._distributed_c10d import FakeProcessGroup, HashStore

    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    fake = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)  # depends on the version
    likeness = dist.ProcessGroup(HashStore(), rank, world_size)
    likeness._register_backend(
        torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, fake(rank, world_size)
    )
    likeness._set_group_name(group.group_name)
    return likeness


def swap_tensors(ours: Tensor, theirs: Tensor) -> None:
    """Exchange the contents of two tensor objects, which keep their identity.

    As ``torch.utils.swap_tensors``, which refuses tensors that are referred to weakly, as recurrent
    layers do, and counts references from C++: even one that is there for a moment only, a
    transport's thread that has just sent a tensor. Such a thread keeps the old content, and weak
    references go on referring to the same object. No public names.
    """
    ours.__class__, theirs.__class__ = theirs.__class__, ours.__class__
    ours.__dict__, theirs.__dict__ = theirs.__dict__, ours.__dict__
    torch._C._swap_tensor_impl(ours, theirs)
