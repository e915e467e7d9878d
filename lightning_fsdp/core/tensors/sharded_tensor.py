"""Original shape outside, this rank's 1-D slice inside.

A :class:`ShardedTensor` stands for a whole tensor of which this rank owns the elements
``[start, stop)`` in row-major order. Sharded parameters, their gradients, their optimizer state and
the values of ``state_dict()`` are of this one class. What the engine needs of it is in ``Sharded``.

What an operation does with them is looked up in a table (:data:`handlers`), which other files fill;
an operation without a handler raises, and names a cure.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, Self, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_fsdp.core.engine import torch_internals
from lightning_fsdp.core.engine.communicator import Communicator
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.layout import FlatSlice
from lightning_fsdp.core.engine.schedule import recovering
from lightning_fsdp.core.engine.sharded import Sharded, ShardSpec, WaitingGradient
from lightning_fsdp.core.engine.structures import tensors_in
from lightning_fsdp.core.ranks.exchange import move_each
from lightning_fsdp.core.tensors.flat_chunks import FlatChunks
from lightning_fsdp.core.torch_internals import swap_tensors, without_torch_function

Hook = TypeVar("Hook")
_GRAD: Any = Tensor.grad  # the property


def spec_of_leaf(tensor: Tensor) -> ShardSpec | None:
    """The parameter that a leaf, held by a module or kept since, belongs to; else ``None``."""
    spec = None if isinstance(tensor, Sharded) else tensor.__dict__.get("spec")  # see guards.py
    return spec if isinstance(spec, ShardSpec) else None


def flat_param_of(tensor: Tensor) -> FlatParameter | None:
    """The flat parameter of a sharded parameter; ``None`` for anything else.

    Gradients, copies and ``detach()`` share a parameter's spec, and are no part of it.
    """
    if not isinstance(tensor, Sharded):
        return None
    flat_param: FlatParameter | None = tensor.spec.flat_param()
    is_part = flat_param is not None and flat_param.parameters[tensor.spec.index] is tensor
    return flat_param if is_part else None


def _without_values(what: str) -> Any:
    """A method that raises, as this rank holds only a slice, and gathering takes all ranks."""

    def refuse(self: ShardedTensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"{what} of {self.spec.name!r} (rank {self.spec.communicator.mesh_rank}): expected a "
            "whole tensor, got a ShardedTensor. Take whole = tensor.full_tensor() on every rank, "
            "not only on the one that writes; for all gradients, `for name, whole in "
            "gradients(module).full()`. Then whole.numpy() (a histogram, a picture) is for any "
            "rank."
        )

    return refuse


class ShardedTensor(Sharded, FlatChunks):
    """A tensor of which this rank holds one slice.

    Made by :func:`~lightning_fsdp.fully_shard`, not by hand. ``shape``, ``dtype`` and ``device``
    are those of the whole tensor. ``torch.distributed.checkpoint`` saves and loads it in place.
    """

    # A parameter's: see register_post_accumulate_grad_hook.
    gradient_hooks: OrderedDict[int, Callable[..., Any]] | None = None
    # What detach() and .data returned, over the same memory.
    _aliases: weakref.WeakSet[ShardedTensor] | None = None

    __torch_function__ = torch_internals.disabled_torch_function  # type: ignore[assignment]

    @classmethod
    @torch_internals.skip_all_in_compiling
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return handlers[func](func, args, kwargs or {})

    @property
    def identity(self) -> tuple[int, int]:
        """Equal for tied names, ``detach()`` and ``.data`` of one tensor, and different for copies.

        For dictionaries, as ``id()`` is another one for each of these.
        """
        memory = self._local.untyped_storage().data_ptr()  # a copy without elements has none
        return id(self.spec), memory or id(self)

    @property
    def micro_batches(self) -> dict[int, ShardedTensor]:
        """What each micro-batch added to a gradient, by number, where these are kept apart."""
        return cast("dict[int, ShardedTensor]", self.__dict__.setdefault("_micro_batches", {}))

    @property
    def flat_slice(self) -> FlatSlice:  # type: ignore[override]
        """Which elements of the whole this rank holds."""
        return self.spec.slice

    def full_tensor(self, *, rank0_only: bool = False) -> Tensor:
        """The whole tensor in its original shape, a fresh copy. Collective: every rank calls it.

        Each element is sent once, from the rank that has it to all, and nothing but the result is
        allocated.

        Args:
            rank0_only: Send to rank 0 of the sharding group only; others get a tensor on the meta
                device. The same on every rank.

        Returns:
            Original shape and dtype, on the device of the shards: on the host where offloaded.
        """
        spec, communicator = self.spec, self.spec.communicator
        layout, slot, home = spec.layout, spec.slot, spec.home
        what, local = f"full_tensor of {spec.name!r}", self._local.detach().reshape(-1)
        if rank0_only and communicator.rank != 0:
            mine = {communicator.rank: local.to(home.compute_device)}
            move_each(communicator, mine, what, rank0_only=True)
            return torch.empty(slot.shape, dtype=local.dtype, device="meta")
        slices = [layout.slice_of(slot, rank) for rank in range(layout.shard_world_size)]
        whole = home.empty(slot.numel, local.dtype)
        parts = {rank: whole[each.start : each.stop] for rank, each in enumerate(slices)}
        home.to_device(local, parts[communicator.rank])
        move_each(communicator, parts, what, rank0_only=rank0_only)
        return home.to_host(whole, may_pin=False).wait().view(slot.shape)

    def _set_grad(self, value: Any) -> None:
        """Set ``.grad``; of a whole plain tensor this rank's slice is taken, sharing its memory.

        The whole tensor has to be the same on every rank. Anything else is up to torch.
        """
        is_plain = isinstance(value, Tensor) and not isinstance(value, Sharded)
        if is_plain and value.shape == self.shape:
            value = ShardedTensor(self.spec.slice_of(value), self.spec)
        with recovering:
            _GRAD.__set__(self, value)

    # Reading is torch's own function: ``.grad`` is read often, and costs no call in Python.
    grad: Any = property(_GRAD.__get__, _set_grad, _GRAD.__delete__)

    @property
    def data(self) -> Tensor:
        """The same slice, outside the graph. Assigning copies values into it.

        What ``.data`` returned before keeps the old values then, as in torch: ``kept = p.data;
        p.data = ...; p.data = kept`` restores them.

        Raises:
            RuntimeError: What is assigned has another shape, dtype or device.
        """
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.dtype != self.dtype or value.device != self.device or value.shape != self.shape:
            raise RuntimeError(
                f"parameter {self.spec.name!r}: expected .data of shape {tuple(self.shape)}, "
                f"{self.dtype} on {self.device}, got {tuple(value.shape)}, {value.dtype} on "
                f"{value.device}. Assign a whole one; change shapes, and move it, before fully_"
                "shard; convert the module that was sharded, or one around it (.to(dtype))."
            )
        with torch.no_grad():
            if not isinstance(self, torch.nn.Parameter):
                self._local = self._local.clone()  # leaves the parameter that it was taken from
            elif self._aliases:
                old = self._local.clone()
                for alias in self._aliases:
                    alias._local = old
                self._aliases = None
            self.copy_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As ``Tensor.requires_grad_``; it takes effect at once, also inside a forward."""
        super().requires_grad_(requires_grad)
        if (flat_param := flat_param_of(self)) is not None:
            with without_torch_function():  # that of a leaf without memory is slow
                flat_param.leaves[self.spec.index].requires_grad = requires_grad
        return self

    requires_grad = property(Tensor.requires_grad.__get__, requires_grad_)  # type: ignore[attr-defined]

    def __setitem__(self, index: Any, value: Any) -> None:
        """Set ``tensor[mask] = scalar``; other indices are refused, as they mean the whole tensor.

        Raises:
            RuntimeError: The index is not a sharded mask of the same shape, or the value is a
                tensor.
        """
        is_mask = isinstance(index, ShardedTensor) and index.dtype == torch.bool
        if not is_mask or index.spec.slice != self.spec.slice or isinstance(value, Tensor):
            refuse("tensor[index] = value", (self,), {})
        self._local[index.to_local()] = value

    def register_hook(self, hook: Callable[..., Any]) -> NoReturn:
        """Refused: this tensor is outside the graph, so a hook would never be called."""
        raise NotImplementedError(
            f"parameter {self.spec.name!r}: register_hook would never be called, because the graph "
            "holds the gathered copy, not this sharded parameter. Use gradients(module).on_local "
            "or register_post_accumulate_grad_hook, or read .grad after the backward."
        )

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(parameter)`` when its reduced gradient is in ``.grad``, in each backward.

        That is at the backward's end, when nothing computes with the weights any more, so an
        optimizer may step there. It is not called by a backward that does not reduce, or if no rank
        used the parameter.

        Returns:
            A handle that removes the hook.
        """
        return register(hook, self.__dict__.setdefault("gradient_hooks", OrderedDict()))

    # Refused: torch would take the address of memory that does not exist, which may crash.
    numpy, tolist, apply_, storage = map(_without_values, ("numpy", "tolist", "apply_", "storage"))
    share_memory_, __array__, __dlpack__ = map(_without_values, ("share_memory", "numpy", "DLPack"))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{self.spec.name!r} is a ShardedTensor: this rank holds {self._local.numel()} of "
            f"{self.numel()} elements, so saving it would lose the rest. Save "
            "full_state_dict(module) instead, or full_optimizer_state_dict(optimizer)."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        with torch.inference_mode(False), torch.no_grad():
            local = self._local.detach().clone()
            if not isinstance(self, torch.nn.Parameter):
                spec = memo.get(id(self.spec), self.spec)
                return ShardedTensor(local, spec, requires_grad=self.requires_grad)
            spec = memo[id(self.spec)] = replace(self.spec)
            return make_parameter(local, spec, self.requires_grad)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = self.spec.slice
        return (
            f"ShardedTensor({self.spec.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"rank {self.spec.communicator.mesh_rank} holds [{held.start}, {held.stop}) of "
            f"{self.numel()} elements)"
        )


def make_parameter(local: Tensor, spec: ShardSpec, requires_grad: bool) -> ShardedTensor:
    """A sharded tensor that is an ``nn.Parameter``, over the memory of ``local``, ``(n,)``."""
    sharded = ShardedTensor(local, spec, requires_grad=True)
    sharded._is_param = True  # what isinstance(tensor, nn.Parameter) looks at
    Tensor.register_hook(sharded, partial(refuse_graph, spec))  # type: ignore[no-untyped-call]
    sharded.requires_grad = requires_grad
    return sharded


def refuse_graph(spec: ShardSpec, *gradients: Any) -> NoReturn:
    """What autograd calls in place of accumulating a gradient: it would not be reduced.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(
        f"backward to {spec.name!r} (rank {spec.communicator.mesh_rank}): expected a graph that a "
        "forward of the sharded module made, got one from before fully_shard, or that reads the "
        "parameter outside of its unit's forward, without other ranks' losses. Run the forward "
        "again; for such a term of the loss, call_with(layer, lambda: layer.weight.abs().sum())."
    )


def may_wait(flat_params: Iterable[FlatParameter]) -> list[FlatParameter]:
    """Those of which any rank may have gradients that wait; the same on all ranks.

    These are those of backwards without reduction, or without the mean over replicas.
    """
    return [f for f in flat_params if (f.sends_sums or f.waits_for_mean) and f.is_trainable]


def check_gradients(parameters: Iterable[ShardedTensor], what: str) -> None:
    """Make sure that after backwards without reduction all ranks have the same gradients.

    Collective if there were such backwards since the last reduction, or some that left out the
    mean over replicas. A gradient that was zeroed on some ranks before it was reduced becomes
    zeros on all.

    Args:
        parameters: Those that count.
        what: The operation that needs the gradients, for the message.

    Raises:
        RuntimeError: A gradient waits to be reduced, on any rank.
    """
    asked = defaultdict[Communicator, list[ShardedTensor]](list)
    for parameter in parameters:
        flat_param = flat_param_of(parameter)
        if flat_param is not None and may_wait([flat_param]):
            asked[flat_param.communicator].append(parameter)
    for communicator, of_group in asked.items():
        waiting = [isinstance(parameter.grad, WaitingGradient) for parameter in of_group]
        present = [parameter.grad is not None for parameter in of_group]
        any_rank = communicator.any_rank([waiting, present])()
        for parameter, is_waiting, is_present in zip(of_group, *any_rank, strict=True):
            if is_waiting:
                of_replica = not parameter.spec.flat_param().sends_sums
                raise unreduced(parameter.spec, what, is_of_replica=of_replica)
            if is_present and parameter.grad is None:
                parameter.grad = zero_gradient(parameter)
    num_asked = Counter(p.spec.flat_param() for of_group in asked.values() for p in of_group)
    for flat_param, number in num_asked.items():
        if number == len(flat_param.parameters):
            flat_param.sends_sums = flat_param.waits_for_mean = False  # no rank has any: ask once


def unreduced(spec: ShardSpec, what: str, *, is_of_replica: bool = False) -> RuntimeError:
    """The error for using a gradient that waits, on this rank or another, for ``what``."""
    got = "one rank's own, which was not reduced over the ranks"
    cure = "set_requires_gradient_sync(True) (or outside no_sync())"
    if is_of_replica:
        got = "one replica's, which was not averaged over the replicas"
        cure = "set_requires_all_reduce(True)"
    return RuntimeError(
        f"gradient of {spec.name!r} (rank {spec.communicator.mesh_rank}): expected a reduced "
        f"gradient for {what}, got {got}. Run the last micro-batch's backward with {cure} first, "
        "or drop it with zero_grad()."
    )


def zero_gradient(parameter: Sharded) -> ShardedTensor:
    """A reduced gradient of zeros."""
    return ShardedTensor(torch.zeros_like(parameter._local), parameter.spec)


def convert(flat_param: FlatParameter, dtype: torch.dtype) -> None:
    """Change the main dtype of shard, parameters and reduced gradients; the objects stay.

    Args:
        flat_param: A flat parameter whose whole copy nobody holds, without gradients that wait to
            be reduced.
        dtype: The new main dtype.
    """
    shard = flat_param.home.new_shard(flat_param.shard.numel(), dtype).copy_(flat_param.shard)
    for parameter in cast(Sequence[ShardedTensor], flat_param.parameters):
        gradient, parameter.grad = parameter.grad, None
        spec, marks = parameter.spec, dict(parameter.__dict__)
        converted = make_parameter(spec.part_of(shard), spec, parameter.requires_grad)
        converted.__dict__.update({**marks, **converted.__dict__, "_aliases": None})
        swap_tensors(parameter, converted)
        if isinstance(gradient, ShardedTensor):
            parameter.grad = ShardedTensor(gradient.to_local().to(dtype), spec)
    flat_param.take_in(shard)


def register(hook: Hook, *tables: dict[int, Hook]) -> RemovableHandle:
    """Put a hook into tables; the handle that is returned removes it from all of them."""
    handle = RemovableHandle(OrderedDict(), extra_dict=list(tables))
    for table in tables:
        table[handle.id] = hook
    return handle


Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs an operation; called with the operation, its arguments and its keyword arguments."""


def refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], advice: str = "") -> NoReturn:
    """The handler of operations that have no meaning on slices.

    Raises:
        RuntimeError: Always; it names the parameter, the rank and a cure.
    """
    spec = next(t.spec for t in tensors_in((args, kwargs)) if isinstance(t, ShardedTensor))
    if ".lora_" in spec.name:  # of peft, whose merge_adapter() computes with it
        advice += "Merge adapters by save_pretrained(module, folder, merge_adapters=True). "
    raise RuntimeError(
        f"{func} on {spec.name!r} (rank {spec.communicator.mesh_rank}): expected a whole tensor, "
        f"got a ShardedTensor of which this rank holds [{spec.slice.start}, {spec.slice.stop}) of "
        f"{spec.slot.numel} elements. {advice}Call module(x), not module.forward(x). Inside its "
        "unit's forward, and in methods given to register_forward_method, take it from the module "
        "(self.weight), not from an argument; a module around that reads it is to be a unit "
        "(units=[..., its class]). Elsewhere call full_tensor() (on every rank), and copy_() it "
        "back. unshard() gathers ahead, no more. A wrapper (DDP, torch's FSDP) is left out: "
        "gradients are reduced already."
    )


class _Handlers(dict[Any, Handler]):
    """Handlers by operation; ``find`` gives that of an operation at its first call."""

    find: Callable[[Any], Handler] | None = None

    def __missing__(self, operation: Any) -> Handler:
        handler = self[operation] = refuse if self.find is None else self.find(operation)
        return handler


handlers = _Handlers()
