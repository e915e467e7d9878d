"""Original shape outside, this rank's 1-D slice inside.

A :class:`ShardedTensor` stands for a whole tensor of which this rank owns the elements
``[start, stop)`` in row-major order. Sharded parameters, their gradients, their optimizer state and
the values of ``state_dict()`` are of this one class.

=============================================  ================================================
operation                                      what it does
=============================================  ================================================
pointwise, ``_foreach_*``, ``_fused_*``        runs on the slices
``zeros_like``, ``clone``, ``detach``, casts   another sharded tensor
``copy_`` from a whole plain tensor            keeps this rank's slice of it
a gradient scaler's look for inf               see ``grad_scaler.py``
random draws in place, ``any``, ``equal``      see ``whole_values.py``; collective
everything else (``linear``, norms, views)     raises, and names the cure
=============================================  ================================================
"""

from __future__ import annotations

import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_fsdp.core.engine import torch_internals
from lightning_fsdp.core.engine.communicator import Communicator
from lightning_fsdp.core.engine.flat_chunks import FlatChunks
from lightning_fsdp.core.engine.home import Home
from lightning_fsdp.core.engine.layout import FlatLayout, FlatSlice, Slot

aten = torch.ops.aten


@dataclass(eq=False)
class ShardSpec:
    """Which slice of which region a sharded tensor is. One per parameter, shared by its gradient.

    Attributes:
        name: Original name of the parameter; kept up to date when an outer module is sharded.
        slot: Its place in the flat parameter's region.
        layout: The layout of that region.
        communicator: The sharding group.
        home: Where shards live, and the way from and to it.
        slice: The elements that this rank owns.
    """

    name: str
    slot: Slot
    layout: FlatLayout
    communicator: Communicator = field(repr=False)
    home: Home = field(repr=False)
    slice: FlatSlice = field(init=False)

    def __post_init__(self) -> None:
        self.slice = self.layout.slice_of(self.slot, self.communicator.rank)

    def slice_of(self, whole: Tensor) -> Tensor:
        """This rank's ``(slice.numel,)`` elements of a whole tensor of the original shape."""
        return whole.detach().reshape(-1)[self.slice.start : self.slice.stop]

    def part_of(self, shard: Tensor) -> Tensor:
        """This rank's ``(slice.numel,)`` elements in its shard of the region, sharing memory."""
        offset = self.layout.offset_in_shard(self.slot, self.communicator.rank)
        return shard.narrow(0, offset, self.slice.numel)


class ShardedTensor(FlatChunks, Tensor):
    """A tensor of which this rank holds one slice.

    Made by :func:`~lightning_fsdp.fully_shard`, not by hand. ``shape``, ``dtype`` and ``device``
    are those of the whole tensor. ``torch.distributed.checkpoint`` saves and loads it in place.
    """

    _local: Tensor  # (slice.numel,), this tensor's dtype and device; a view of the shard
    spec: ShardSpec
    micro_batches: dict[int, ShardedTensor]  # of a gradient: what each added, where kept apart
    gradient_hooks: OrderedDict[int, Callable[..., Any]] | None  # of a parameter: see below
    _aliases: weakref.WeakSet[ShardedTensor] | None  # what detach() and .data gave, over its memory

    @staticmethod
    def __new__(  # noqa: D102, PYI034
        cls, local: Tensor, spec: ShardSpec, *, requires_grad: bool = False
    ) -> ShardedTensor:
        sharded: ShardedTensor = torch_internals.wrap_without_storage(  # type: ignore[assignment]
            cls, spec.slot.shape, local, requires_grad
        )
        sharded._local = local
        sharded.spec = spec
        sharded.micro_batches = {}
        sharded.gradient_hooks = None
        sharded._aliases = None
        return sharded

    __torch_function__ = torch_internals.disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            handler = _HANDLERS[func] = _choose_handler(func)
        return handler(func, args, kwargs or {})

    def to_local(self) -> Tensor:
        """This rank's slice, ``(slice.numel,)``, sharing memory; may be empty."""
        return self._local

    @property
    def flat_slice(self) -> FlatSlice:
        """Which elements of the whole this rank holds."""
        return self.spec.slice

    def full_tensor(self, *, rank0_only: bool = False) -> Tensor:
        """The whole tensor in its original shape, a fresh copy. Collective: every rank calls it.

        On the host where shards are offloaded. Each element moves once, from its owner to all, and
        nothing beside the result is held.

        Args:
            rank0_only: Ranks of the sharding group other than 0 get one without values, on the
                meta device, and less moves. The same on every rank.
        """
        spec, communicator = self.spec, self.spec.communicator
        layout, slot, home = spec.layout, spec.slot, spec.home
        what, local = f"full_tensor of {spec.name!r}", self._local.detach()
        with torch.no_grad():
            if rank0_only and communicator.rank != 0:
                communicator.collect_each({communicator.rank: local.to(home.compute_device)}, what)
                return torch.empty(slot.shape, dtype=local.dtype, device="meta")
            pieces = [layout.slice_of(slot, rank) for rank in range(layout.shard_world_size)]
            whole = home.empty(slot.numel, local.dtype)
            home.to_device(local, whole[spec.slice.start : spec.slice.stop])
            parts = [whole[piece.start : piece.stop] for piece in pieces]
            if rank0_only:
                communicator.collect_each(dict(enumerate(parts)), what)
            else:
                communicator.broadcast_each(parts, what)
            whole = home.to_host(whole, may_pin=False).wait()
        return whole.view(slot.shape)

    @property
    def data(self) -> Tensor:
        """The same slice outside the graph; assigning copies into it, shape and dtype kept.

        What was taken before keeps the old values then, as in torch: ``kept = p.data; p.data = ...;
        p.data = kept`` restores them.

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
                f"{value.device}. A unit has one dtype and one device: convert the module that was "
                "sharded, or one around it (.to(dtype)), or move it (.cuda()) before fully_shard."
            )
        with torch.no_grad():
            if not isinstance(self, torch.nn.Parameter):
                self._local = self._local.clone()  # the parameter, which it was taken of, stays
            elif self._aliases:
                old = self._local.clone()
                for alias in self._aliases:
                    alias._local = old
                self._aliases = None
            self.copy_(value)

    def __setitem__(self, index: Any, value: Any) -> None:
        """``tensor[mask] = scalar``; other indices name places in the whole tensor."""
        is_mask = isinstance(index, ShardedTensor) and index.dtype == torch.bool
        if not is_mask or isinstance(value, Tensor):
            _refuse("tensor[index] = value", (self,), {})
        self._local[_local_of(index, self, "tensor[mask] = scalar")] = value

    def register_hook(self, hook: Callable[..., Any]) -> NoReturn:
        """Refused: this tensor is outside the graph; torch would register and never call."""
        self._refuse_hook("register_hook")

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(parameter)`` when its reduced gradient is in ``.grad``, in each backward.

        That is at the backward's end, when nobody computes with the weights any more: an optimizer
        may step there. Not called by a backward that does not reduce, nor where no rank used the
        parameter.
        """
        if self.gradient_hooks is None:
            self.gradient_hooks = OrderedDict()
        handle = RemovableHandle(self.gradient_hooks)
        self.gradient_hooks[handle.id] = hook
        return handle

    def _refuse_hook(self, what: str) -> NoReturn:
        raise NotImplementedError(
            f"parameter {self.spec.name!r}: {what} would never be called, because the graph holds "
            "the gathered copy, not this sharded parameter. Use gradients(module).on_local or "
            "register_post_accumulate_grad_hook, or read .grad after the backward."
        )

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refused: this rank holds a slice; ``full_tensor()`` is collective and takes all ranks."""
        self._refuse_array("numpy()")

    def tolist(self) -> NoReturn:
        """Refused, as :meth:`numpy`."""
        self._refuse_array("tolist()")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse_array("numpy")

    def _refuse_array(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{what} of {self.spec.name!r} (rank {self.spec.communicator.mesh_rank}): expected a "
            "whole tensor, got a ShardedTensor. Take whole = tensor.full_tensor() on every rank, "
            "not only on the one that writes; for all gradients, `for name, whole in "
            "gradients(module).full()`. Then whole.numpy() (a histogram, a picture) is for any "
            "rank."
        )

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
        piece = self.spec.slice
        return (
            f"ShardedTensor({self.spec.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"rank {self.spec.communicator.mesh_rank} holds [{piece.start}, {piece.stop}) of "
            f"{self.numel()} elements)"
        )


def make_parameter(local: Tensor, spec: ShardSpec, requires_grad: bool) -> ShardedTensor:
    """A sharded tensor that is an ``nn.Parameter``, over ``local``, which it aliases."""
    sharded = ShardedTensor(local, spec, requires_grad=requires_grad)
    sharded._is_param = True  # what nn.Parameter's isinstance asks
    return sharded


# Note: dispatch.
# Handlers run below autograd, where torch does not count in-place writes any more. A whole copy
# kept by ZeRO-2 is stale once its shard was written to, and it learns that from the shard's version
# counter; so every handler that writes counts for itself.

_Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def handle(operation: Any, handler: _Handler) -> None:
    """Let ``handler(operation, args, kwargs)``, of a layer above, run an operation on these."""
    _HANDLERS[operation] = handler


_ALIASES = {aten.detach.default, aten.alias.default, aten.view_as.default}
_CREATIONS = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.clone.default,
    aten._to_copy.default,
}
_FOREACH_REDUCTIONS = {"_foreach_norm", "_foreach_max", "_foreach_powsum"}
# Tagged pointwise by torch, but the value of an element depends on its place or on a generator.
_PLACE_DEPENDENT = ("dropout", "bernoulli", "rand", "normal", "uniform")


def _choose_handler(func: Any) -> _Handler:
    name = func._schema.name.removeprefix("aten::")
    if func in _ALIASES:
        return _alias
    if func in _CREATIONS:
        return _create
    if func is aten.copy_.default:
        return _copy_into
    if func in (aten.zero_.default, aten._foreach_zero_.default):
        return _zero
    if name == "fill_":
        return _pointwise
    if name in ("new_zeros", "new_ones", "new_empty", "new_full"):
        return _create_plain
    if name == "equal" or any(part in name for part in _PLACE_DEPENDENT):
        return _refuse
    if name.startswith("_foreach_") and name not in _FOREACH_REDUCTIONS:
        return _elementwise_over_lists
    if name.startswith("_fused_"):
        return _elementwise_over_lists
    if torch.Tag.pointwise in func.tags:
        return _pointwise
    return _refuse


def _alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    source = args[0]
    if source._aliases is None:
        source._aliases = weakref.WeakSet()
    alias = ShardedTensor(source._local, source.spec)
    alias._aliases = source._aliases
    source._aliases.add(alias)
    return alias


def _create(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    if not isinstance(source, ShardedTensor):
        _refuse(func, args, kwargs)
    kwargs.pop("memory_format", None)
    return ShardedTensor(func(source._local, *args[1:], **kwargs), source.spec)


def _create_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # ``new_*`` takes dtype and device of this tensor; a size equal to its own is meant to match it.
    source, size = args[0], tuple(args[1])
    if size != tuple(source.shape):
        return func(source._local, size, *args[2:], **kwargs)
    local = func(source._local, (source._local.numel(),), *args[2:], **kwargs)
    return ShardedTensor(local, source.spec)


def _copy_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if not isinstance(target, ShardedTensor):
        _refuse(func, args, kwargs)
    if source.shape != target.shape:
        raise RuntimeError(
            f"parameter {target.spec.name!r}: expected a source of shape {tuple(target.shape)} for "
            f"copy_, got {tuple(source.shape)}. Copy a whole tensor of the original shape."
        )
    target._local.copy_(_local_of(source, target, func))
    torch.autograd.graph.increment_version(target._local)
    return target


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like = next(t for t in flatten(args, kwargs) if isinstance(t, ShardedTensor))
    local_args = tuple(_local_of(arg, like, func) for arg in args)
    local_kwargs = {name: _local_of(arg, like, func) for name, arg in kwargs.items()}
    result = func(*local_args, **local_kwargs)
    if func._schema.is_mutable:
        written = kwargs.get("out", args[0])
        if not isinstance(written, ShardedTensor):
            _refuse(func, args, kwargs)
        torch.autograd.graph.increment_version(written._local)
        return written
    if isinstance(result, Tensor):
        return ShardedTensor(result, like.spec)
    return tuple(ShardedTensor(part, like.spec) for part in result)


def _zero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_list = isinstance(args[0], (list, tuple))
    for tensor in args[0] if is_list else args:
        if isinstance(tensor, ShardedTensor):  # zeroed as a gradient: its parts go with it
            tensor.micro_batches.clear()
    handler = _elementwise_over_lists if is_list else _pointwise
    return handler(func, args, kwargs)


def _elementwise_over_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``_foreach_*`` and ``_fused_*``: lists of tensors, the n-th of each belonging together."""
    likes = args[0]

    def local_of(arg: Any) -> Any:
        if not isinstance(arg, (list, tuple)) or not any(isinstance(t, Tensor) for t in arg):
            return _local_of(arg, likes[0], func) if isinstance(arg, ShardedTensor) else arg
        return slices_beside(likes, arg, func) if len(arg) == len(likes) else list(arg)

    result = func(*map(local_of, args), **{name: local_of(arg) for name, arg in kwargs.items()})
    if func._schema.is_mutable:
        written = [
            t._local
            for argument, arg in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for t in arg
            if isinstance(t, ShardedTensor)
        ]
        torch.autograd.graph.increment_version(written)
        return result
    return [
        ShardedTensor(t, like.spec) if isinstance(like, ShardedTensor) else t
        for t, like in zip(result, likes, strict=True)
    ]


def slices_beside(likes: Sequence[Any], tensors: Sequence[Any], what: Any) -> list[Any]:
    """Of each tensor, the part that belongs to the slice of the parameter in the same place.

    Args:
        likes: Parameters, sharded or plain.
        tensors: As many of theirs: gradients, state, the parameters themselves. Whole ones are cut;
            what has no dimensions, or is no tensor, is returned.
        what: The operation, for errors.
    """
    # The short way, for what an optimizer's step asks many times: all sharded, with the same specs.
    are_sharded = {ShardedTensor} == set(map(type, tensors)) == set(map(type, likes))
    if are_sharded and list(map(_spec_of, tensors)) == list(map(_spec_of, likes)):
        return list(map(_slice_of, tensors))
    return [_local_of(t, like, what) for t, like in zip(tensors, likes, strict=True)]


_spec_of, _slice_of = operator.attrgetter("spec"), operator.attrgetter("_local")


def _local_of(arg: Any, like: Any, func: Any) -> Any:
    """The part of an argument that belongs to the slice of ``like``."""
    if not isinstance(arg, ShardedTensor):
        if not isinstance(arg, Tensor) or arg.dim() == 0 or not isinstance(like, ShardedTensor):
            return arg
        if arg.shape == like.shape:
            return like.spec.slice_of(arg)
        raise RuntimeError(
            f"{func}: expected a plain tensor of shape {tuple(like.shape)} beside the sharded "
            f"{like.spec.name!r}, got {tuple(arg.shape)}. Call full_tensor() (on every rank) first."
        )
    if not isinstance(like, ShardedTensor):
        _refuse(func, (arg,), {})
    if arg.spec is not like.spec and arg.spec.slice != like.spec.slice:
        raise RuntimeError(
            f"{func}: expected sharded tensors with the same slice, got {like!r} and {arg!r}. "
            "Call full_tensor() on both (on every rank) and work on the whole tensors."
        )
    return arg.to_local()


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    sharded = next(t for t in flatten(args, kwargs) if isinstance(t, ShardedTensor))
    spec = sharded.spec
    advice = (
        "For the norm of all gradients use clip_grad_norm_ of the sharded module, or "
        "gradients(module).norm(). "
        if "norm" in str(func)
        else ""
    )
    raise RuntimeError(
        f"{func} on {spec.name!r} (rank {spec.communicator.mesh_rank}): expected a whole tensor, "
        f"got a ShardedTensor of which this rank holds [{spec.slice.start}, {spec.slice.stop}) of "
        f"{sharded.numel()} elements. {advice}Inside its unit's forward, and in methods given to "
        "register_forward_method, the module holds the whole parameter; elsewhere call "
        "full_tensor() (on every rank), and copy_() a whole tensor back. unshard() gathers ahead "
        "for the forward; the module's parameters stay sharded until then."
    )


def flatten(*structures: Any) -> list[Any]:
    """The leaves of nested lists, tuples and dicts of arguments, in order."""
    leaves: list[Any] = []
    for structure in structures:
        if isinstance(structure, (list, tuple)):
            leaves.extend(flatten(*structure))
        elif isinstance(structure, dict):
            leaves.extend(flatten(*structure.values()))
        else:
            leaves.append(structure)
    return leaves


_HANDLERS: dict[Any, _Handler] = {}
