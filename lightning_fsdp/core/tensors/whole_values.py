"""Operations on sharded tensors that are about the whole value, computed from all ranks' slices.

========================================  ==========================================================
operation                                 what it does; collective, so every rank calls it
========================================  ==========================================================
``normal_``, ``uniform_`` and the others  the values that one process would draw for the whole
``randn_like``, ``rand_like``             the same, in a new tensor
``any``, ``all``, ``max``, ``sum``,       one answer for the whole, the same on every rank
``norm``, ``std``, ``torch.equal``, ...
``GradScaler.unscale_``                   divides slices; inf in any is found on every rank
========================================  ==========================================================

So ``torch.nn.init`` and ``reset_parameters()`` work after sharding, as far as they draw or fill a
tensor as a whole, and ``isnan().any()``, ``torch.nn.utils.clip_grad_norm_`` and
``torch.testing.assert_close`` are right. Results have no graph.

Note: gradient scalers
fp16 loses gradients below 6e-8, so its loss is multiplied by a scale. torch's own ``GradScaler``
divides the gradients by it again and looks for inf and NaN, one operation for all gradients of an
optimizer. Each rank sees its slices only, and that operation is where ranks agree: then all of them
step, or none, and all have the same scale. A rank whose slices are all empty takes part like the
others: it has an empty gradient of each parameter that has a gradient elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from lightning_fsdp.core import torch_internals
from lightning_fsdp.core.engine.communicator import Communicator
from lightning_fsdp.core.ranks.groups import all_gather_slices, control_of
from lightning_fsdp.core.tensors.norms import norm_of_norms, partial_norm
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor, handlers, refuse
from lightning_fsdp.core.tensors.slicewise import slicewise_handler
from lightning_fsdp.core.tensors.unreduced_gradient import UNSCALE, UnreducedGradient
from lightning_fsdp.core.torch_internals import types_in_lists

aten = torch.ops.aten

_DRAWS = (
    *(aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float, aten.cauchy_.default),
    *(aten.exponential_.default, aten.log_normal_.default, aten.geometric_.default),
    *(getattr(aten.random_, name) for name in ("default", "to", "from")),
)

_PREDICATES = (aten.any.default, aten.all.default)
_EXTREMES = (aten.max.default, aten.min.default, aten.amax.default, aten.amin.default)
_WAITS_ELSEWHERE = (
    "GradScaler.unscale_: expected reduced gradients on every rank, got some that wait on another."
)
_NO_GRAPH = (
    "To read a value, detach() first; for a term of the loss, call_with(layer, lambda: "
    "layer.weight.abs().sum()). "
)


def support_operations() -> None:
    """Fill the table of handlers, with those of ``slicewise.py`` too. May be called repeatedly."""
    handlers.find = slicewise_handler
    types_in_lists[:] = dict.fromkeys([*types_in_lists, ShardedTensor])
    handlers.update(dict.fromkeys(_DRAWS, _draw))
    handlers.update(dict.fromkeys((*_PREDICATES, *_EXTREMES), _one_answer))
    handlers.update(dict.fromkeys((aten.sum.default, aten.mean.default), _sum))
    handlers.update(dict.fromkeys((aten.var.correction, aten.std.correction), _spread))
    handlers[aten.linalg_vector_norm.default] = _norm
    handlers[aten._foreach_norm.Scalar] = _norms
    handlers[aten.equal.default] = _equal
    handlers[UNSCALE] = _unscale


@contextmanager
def one_stream_of_numbers(
    communicator: Communicator, generator: torch.Generator | None = None
) -> Iterator[None]:
    """Let every rank draw what the first rank draws. Collective.

    Afterwards a generator that was in the same state as the first rank's has moved on with these
    draws, as in one process. On a rank that was seeded differently it has its old state again.

    Args:
        communicator: The ranks that draw.
        generator: The generator that they draw from; default: torch's own on the host.
    """
    source = torch.default_generator if generator is None else generator
    mine = source.get_state()
    firsts = mine.clone()
    control_of(communicator).share(firsts)
    source.set_state(firsts)
    is_done = False
    try:
        yield
        is_done = True
    finally:
        if not is_done or not torch.equal(mine, firsts):
            source.set_state(mine)


def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Draw the whole tensor on every rank, which takes its memory meanwhile, and keep the slice."""
    target: ShardedTensor = args[0]
    generator = kwargs.get("generator")
    if generator is None and target.device.type == "cuda":
        generator = torch.cuda.default_generators[target.device.index]
    with one_stream_of_numbers(target.spec.communicator, generator):
        whole = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        func(whole, *args[1:], **kwargs)
    return target.copy_(whole)


def _one_answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Apply an operation to the results on slices, which gives that of the whole: any, max."""
    tensor = _to_read(func, args, kwargs)
    spec, local = tensor.spec, tensor.to_local()
    rows = _of_ranks(tensor, func(local if local.numel() else local.new_zeros(1)), func)
    # Not by a list for an index, which would be copied to the device, and waited for.
    have = [rank for rank in range(len(rows)) if spec.layout.slice_of(spec.slot, rank).numel]
    return cast(Tensor, func(torch.cat([rows[:0], *(rows[rank : rank + 1] for rank in have)])))


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor = _to_read(func, args, kwargs)
    dtype = func(tensor.to_local().new_zeros(1), **kwargs).dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    total = _of_ranks(tensor, tensor.to_local().sum(dtype=wide), func).sum()
    return (total / tensor.numel() if func is aten.mean.default else total).to(dtype)


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return _norms(func, ([_to_read(func, args, kwargs)], *args[1:2]), kwargs)[0]


def _norms(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The norm of each tensor; those of one model take one exchange, as in clipping by torch."""
    options = dict(zip(("ord", "dtype"), args[1:], strict=False)) | kwargs
    ranks = {t.spec.communicator if type(t) is ShardedTensor else None for t in args[0]}
    if None in ranks or len(ranks) > 1:
        return [torch.linalg.vector_norm(tensor, **options) for tensor in args[0]]
    p = float(options.get("ord", 2.0))
    parts = [partial_norm([_to_read(func, (t,), {}).to_local()], p, t.device) for t in args[0]]
    norms = zip(args[0], _of_ranks(args[0][0], torch.stack(parts), func).unbind(1), strict=True)
    return [norm_of_norms(norm, p).to(options.get("dtype") or t.dtype) for t, norm in norms]


def _spread(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor = _to_read(func, args, kwargs)
    dtype = func(tensor.to_local().new_zeros(2)).dtype  # raises for integers, as torch does
    # In fp64: a mean rounded to 16 bits may be off by as much as the values are spread.
    wide = ShardedTensor(tensor.to_local().double(), tensor.spec)
    num_free = max(wide.numel() - (1 if (c := kwargs.get("correction")) is None else c), 0)
    variance = (wide - wide.mean()).square().sum() / num_free
    return (variance.sqrt() if func is aten.std.correction else variance).to(dtype)


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return args[0].shape == args[1].shape and bool((args[0] == args[1]).all())


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Divide gradients in place, and note in ``found_inf`` whether any is not finite on any rank.

    The arguments are a list of gradients, sharded and plain ones; ``found_inf``, 0-d fp32, which is
    written; and the inverse of the scale, 0-d fp32.
    Collective over the sharding group: replicas hold the same gradients, and find the same.

    Raises:
        RuntimeError: A gradient was not reduced yet, on any rank.
    """
    gradients, found_inf, inverse_scale = args
    waiting = [g for g in gradients if isinstance(g, UnreducedGradient)]
    sharded = [g for g in gradients if type(g) is ShardedTensor]
    parts = [part for g in sharded for part in g.micro_batches.values()]
    plain = [g for g in gradients if not isinstance(g, ShardedTensor)]
    locals_ = [*plain, *(g.to_local() for g in (*sharded, *parts))]
    if sharded and found_inf.is_pinned():  # offloaded: torch has queued copies of both scalars
        torch.cuda.current_stream(sharded[0].spec.communicator.device).synchronize()
    func(locals_, found_inf, inverse_scale)
    torch.autograd.graph.increment_version(locals_)
    for communicator in dict.fromkeys(gradient.spec.communicator for gradient in sharded):
        # The largest, not the sum: fused optimizers skip the step at exactly 1.
        # A rank that refuses tells the others, which wait for it here.
        mine = found_inf.view(1).to(communicator.device) - 2 * len(waiting)
        rows = all_gather_slices(communicator, mine, "GradScaler's search for inf")
        if not waiting:
            torch_internals.assert_async((rows >= 0).all(), _WAITS_ELSEWHERE)
        found_inf.copy_(rows.max())
    if waiting:
        raise waiting[0].refusal("GradScaler.unscale_")
    # The step would reset the count of micro-batches, but the scaler may skip it.
    for flat_param in filter(None, (gradient.spec.flat_param() for gradient in sharded)):
        flat_param.micro_batch = 0


def _to_read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """The tensor that an operation reads.

    Raises:
        RuntimeError: The result would need a graph, or is asked for per dimension.
    """
    tensor: ShardedTensor = args[0]
    given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    if given.get("dim") or given.get("keepdim"):
        refuse(func, args, kwargs)
    # Its gradient would reach only this rank's slice, from only this rank's loss.
    if tensor.requires_grad and torch.is_grad_enabled() and func not in _PREDICATES:
        refuse(func, args, kwargs, _NO_GRAPH)
    return tensor


def _of_ranks(tensor: ShardedTensor, mine: Tensor, func: Any) -> Tensor:
    """``mine``, ``n`` numbers, of each rank: ``(W, n)`` on the tensor's device."""
    communicator = tensor.spec.communicator
    what = f"{func._schema.name.removeprefix('aten::')} of {tensor.spec.name!r}"
    rows = all_gather_slices(communicator, mine.view(-1).to(communicator.device), what)
    return rows.to(tensor.device)
