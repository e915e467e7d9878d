"""What a gradient scaler asks of sharded gradients, answered the same on every rank.

fp16 loses gradients below 6e-8, so its loss is multiplied by a scale. torch's own ``GradScaler``
divides the gradients by it again and looks for inf and NaN, one operation for all gradients of an
optimizer. Each rank sees its slices only, and that operation is where ranks agree:

    scaler.unscale_(optimizer)    slices divided; inf in any rank's slice is found on every rank
    scaler.step(optimizer)        every rank steps, or none
    scaler.update()               the same scale on every rank

A rank whose slices are all empty takes part like the others: it has an empty gradient of each
parameter that has a gradient elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_fsdp.core.ranks.groups import all_gather_slices
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor, handlers
from lightning_fsdp.core.tensors.unreduced_gradient import UNSCALE


def support_grad_scaler() -> None:
    """Let torch's ``GradScaler`` work on sharded gradients. May be called repeatedly."""
    handlers[UNSCALE] = _unscale


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Divide gradients in place, and note in ``found_inf`` whether any is not finite on any rank.

    The arguments are a list of gradients, sharded and plain ones (it is not called if one waits to
    be reduced); ``found_inf``, 0-d fp32, which is written; and the inverse of the scale, 0-d fp32.
    Collective over the sharding group: replicas hold the same gradients, and find the same.
    """
    gradients, found_inf, inverse_scale = args
    sharded = [g for g in gradients if isinstance(g, ShardedTensor)]
    parts = [part for g in sharded for part in g.micro_batches.values()]
    locals_ = [g.to_local() if isinstance(g, ShardedTensor) else g for g in [*gradients, *parts]]
    if found_inf.is_pinned():  # offloaded: torch has queued the copies of both scalars to the host
        torch.cuda.current_stream(sharded[0].spec.communicator.device).synchronize()
    func(locals_, found_inf, inverse_scale)
    torch.autograd.graph.increment_version(locals_)
    for communicator in dict.fromkeys(gradient.spec.communicator for gradient in sharded):
        # The largest, not the sum: fused optimizers skip the step at exactly 1.
        mine = found_inf.view(1).to(communicator.device)
        found_inf.copy_(all_gather_slices(communicator, mine, "GradScaler's search for inf").max())
    # The step would reset the count of micro-batches, but the scaler may skip it.
    for flat_param in filter(None, (gradient.spec.flat_param() for gradient in sharded)):
        flat_param.micro_batch = 0
