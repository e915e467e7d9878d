"""Operations on sharded tensors that are about the whole, where ranks can tell it from slices.

========================================  ==========================================================
operation                                 what it does; collective, all ranks call it alike
========================================  ==========================================================
``normal_``, ``uniform_`` and the others  the values that one process would draw for the whole
``any``, ``all``, ``torch.equal``         one answer for the whole, the same on every rank
========================================  ==========================================================

So ``torch.nn.init`` and ``reset_parameters()`` work after sharding, as far as they draw or fill a
tensor as a whole, and ``isnan().any()`` and ``torch.testing.assert_close`` tell the truth.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_fsdp.core.engine.communicator import Communicator
from lightning_fsdp.core.ranks.groups import all_gather_slices, control_of
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor, handle
from lightning_fsdp.core.tensors.slices import slices_beside

aten = torch.ops.aten

_DRAWS = (
    *(aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float, aten.cauchy_.default),
    *(aten.exponential_.default, aten.log_normal_.default, aten.geometric_.default),
    *(getattr(aten.random_, name) for name in ("default", "to", "from")),
)


def support_whole_values() -> None:
    """Let these operations work on sharded tensors. May be called again."""
    for draw in _DRAWS:
        handle(draw, _draw)
    handle(aten.any.default, _any)
    handle(aten.all.default, _all)
    handle(aten.equal.default, _equal)


@contextmanager
def one_stream_of_numbers(
    communicator: Communicator, generator: torch.Generator | None = None
) -> Iterator[None]:
    """Draw what the first rank would draw, on every rank. Collective.

    Afterwards the generator of a rank that stood where the first rank's did stands where those
    draws left it, as in one process. A rank that was seeded differently gets its own back.

    Args:
        communicator: The ranks that draw.
        generator: What they draw from; default: torch's own on the host.
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


def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Draw the whole on every rank, and keep this rank's slice; as large as the whole meanwhile."""
    target: ShardedTensor = args[0]
    generator = kwargs.get("generator")
    if generator is None and target.device.type == "cuda":
        generator = torch.cuda.default_generators[target.device.index]
    spec = target.spec
    with one_stream_of_numbers(spec.communicator, generator):
        whole = torch.empty(spec.slot.shape, dtype=target.dtype, device=target.device)
        func(whole, *args[1:], **kwargs)
    target.to_local().copy_(spec.slice_of(whole))
    torch.autograd.graph.increment_version(target.to_local())
    return target


def _any(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return _gathered(args[0], func(args[0].to_local()), "any").any()


def _all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return _gathered(args[0], func(args[0].to_local()), "all").all()


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if args[0].shape != args[1].shape:
        return False
    like = next(tensor for tensor in args if isinstance(tensor, ShardedTensor))
    ours = [slices_beside([like], [tensor], func)[0] for tensor in args]
    is_equal = torch.tensor(func(*ours), device=like.device)
    return bool(_gathered(like, is_equal, "torch.equal").all())


def _gathered(tensor: ShardedTensor, answer: Tensor, what: str) -> Tensor:
    """The 0-d bools of all ranks, where the tensor is."""
    communicator = tensor.spec.communicator
    mine = answer.view(1).to(communicator.device)
    rows = all_gather_slices(communicator, mine, f"{what} of {tensor.spec.name!r}")
    return rows.view(-1).to(tensor.device)
