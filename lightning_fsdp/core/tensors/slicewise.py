"""Operations on sharded tensors that run on this rank's slices.

=============================================  ================================================
operation                                      what it does
=============================================  ================================================
pointwise, ``_foreach_*``, ``_fused_*``        runs on the slices
``zeros_like``, ``clone``, ``detach``, casts   another sharded tensor
``copy_`` from a whole plain tensor            keeps this rank's slice of it
random draws, ``sum``, ``norm``, ...,          see ``whole_values.py``; collective
a gradient scaler's search for inf
what torch composes of others (``negative``)   runs as these do
everything else (``linear``, views)            raises, and names the cure
=============================================  ================================================

Note: versions
Handlers run below autograd, where torch no longer counts in-place writes. A whole copy kept by
ZeRO-2 is stale once its shard was written to, which is seen by the shard's version counter; so
every handler that writes has to count.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_fsdp.core.tensors.sharded_tensor import Handler, ShardedTensor, refuse


def _alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """``detach()``: over the same memory, and noted for :attr:`ShardedTensor.data`."""
    source = args[0]
    if source._aliases is None:
        source._aliases = weakref.WeakSet()
    # Outside of inference mode, so that torch lets it share its source's version counter.
    is_inside = torch.is_inference_mode_enabled()  # asked, as to leave it costs more than the rest
    with torch.inference_mode(False) if is_inside else nullcontext():
        alias = ShardedTensor(source._local, source.spec)
    alias._aliases = source._aliases
    source._aliases.add(alias)
    return alias


def _create(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kwargs.pop("memory_format", None)
    return ShardedTensor(func(args[0]._local, *args[1:], **kwargs), args[0].spec)


def _create_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # ``new_*`` takes only dtype and device from this tensor. A size equal to its own is taken to
    # mean a tensor like it, which is then sharded.
    source, size = args[0], tuple(args[1])
    if size != tuple(source.shape):
        return func(source._local, size, *args[2:], **kwargs)
    local = func(source._local, (source._local.numel(),), *args[2:], **kwargs)
    return ShardedTensor(local, source.spec)


def _copy_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if isinstance(target, ShardedTensor) and source.shape != target.shape:
        raise RuntimeError(
            f"parameter {target.spec.name!r}: expected a source of shape {tuple(target.shape)} for "
            f"copy_, got {tuple(source.shape)}. Copy a whole tensor of the original shape."
        )
    return _pointwise(func, args, kwargs)


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on slices; whole plain tensors beside them are cut."""
    like = next(t for t in (*args, *kwargs.values()) if isinstance(t, ShardedTensor))
    written = kwargs.get("out", args[0]) if func._schema.is_mutable else like
    if not isinstance(written, ShardedTensor):
        refuse(func, args, kwargs)
    local_args = tuple(_local_of(arg, like, func) for arg in args)
    local_kwargs = {name: _local_of(arg, like, func) for name, arg in kwargs.items()}
    result = func(*local_args, **local_kwargs)
    if func._schema.is_mutable:
        torch.autograd.graph.increment_version(written._local)
        return written
    if isinstance(result, Tensor):
        return ShardedTensor(result, like.spec)
    return tuple(ShardedTensor(part, like.spec) for part in result)


def _in_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run what torch composes of other operations as these; inference mode would do so too late."""
    result = func.decompose(*args, **kwargs)
    return refuse(func, args, kwargs) if result is NotImplemented else result


def _zero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_list = isinstance(args[0], (list, tuple))
    for tensor in args[0] if is_list else args:
        if isinstance(tensor, ShardedTensor):  # a gradient: what micro-batches added goes with it
            tensor.micro_batches.clear()
    return (_elementwise_over_lists if is_list else _pointwise)(func, args, kwargs)


def _elementwise_over_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``_foreach_*`` and ``_fused_*``: lists of tensors, whose n-th elements belong together."""
    # The first list; a scalar may come before it (``_foreach_pow``).
    likes = next(arg for arg in args if isinstance(arg, (list, tuple)))

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
    """The part of each tensor that belongs to the slice of the parameter in the same place.

    Args:
        likes: Parameters, sharded or plain.
        tensors: As many: their gradients, state, or the parameters themselves. Whole tensors are
            cut; those without dimensions, and what is not a tensor, are returned as they are.
        what: The operation, for errors.

    Raises:
        RuntimeError: A tensor has another shape, or another slice.
    """
    # A short cut for what an optimizer's step asks many times: all sharded, with the same specs.
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
        refuse(func, (like,), {})
    if not isinstance(like, ShardedTensor):
        refuse(func, (arg,), {})
    if arg.spec is not like.spec and arg.spec.slice != like.spec.slice:
        raise RuntimeError(
            f"{func}: expected sharded tensors with the same slice, got {like!r} and {arg!r}. "
            "Give the second as full_tensor() (on every rank): its slice is taken, also in place."
        )
    return arg.to_local()


_BY_NAME: dict[str, Handler] = {
    **dict.fromkeys(("detach", "alias"), _alias),
    **dict.fromkeys(("zeros_like", "ones_like", "empty_like", "full_like"), _create),
    **dict.fromkeys(("clone", "_to_copy"), _create),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full"), _create_plain),
    **dict.fromkeys(("zero_", "_foreach_zero_"), _zero),
    **dict.fromkeys(("_foreach_norm", "_foreach_max", "_foreach_powsum"), refuse),
    "randn_like": lambda func, args, kwargs: torch.empty_like(args[0], **kwargs).normal_(),
    "rand_like": lambda func, args, kwargs: torch.empty_like(args[0], **kwargs).uniform_(),
    "copy_": _copy_into,
    **dict.fromkeys(("fill_", "masked_fill_"), _pointwise),
}


def slicewise_handler(func: Any) -> Handler:
    """What runs an operation that is not about the whole."""
    name = func._schema.name.removeprefix("aten::")
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name.startswith(("_foreach_", "_fused_")):
        return _elementwise_over_lists
    # Not what draws: each rank would draw the numbers of the whole's first elements.
    is_drawn = torch.Tag.nondeterministic_seeded in func.tags
    return _pointwise if torch.Tag.pointwise in func.tags and not is_drawn else _in_parts
