"""What stands in ``.grad`` while a gradient waits to be reduced over all ranks.

    part          this rank's own, of backwards that did not communicate
    of_replica    the mean over this rank's replica, of reductions that left out the other replicas

``.grad`` is the one truth: whoever sets it to ``None`` or zeroes it drops what waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from torch import Tensor

from lightning_fsdp.core.engine.sharded import Sharded


class LocalGradient(Sharded):
    """Of one parameter; made empty, beside a reduced gradient that was there before."""

    part: Tensor | None  # the sum of this rank's own: original shape, reduce dtype
    of_replica: Tensor | None  # the sum of means over a replica: (slice.numel,), reduce dtype
    is_used: bool  # whether this rank had gradients in ``of_replica``
    prior: Sharded | None  # reduced gradient of earlier micro-batches, to be added to


MakeWaiting = Callable[[Sharded], LocalGradient]


def local_gradient_of(parameter: Sharded) -> LocalGradient | None:
    """What waits in ``.grad`` to be reduced."""
    present = parameter.grad
    return present if isinstance(present, LocalGradient) else None


def own_gradient_of(parameter: Sharded) -> Tensor | None:
    """What waits there of this rank's own."""
    local = local_gradient_of(parameter)
    return None if local is None else local.part


def keep_own(parameter: Sharded, gradient: Tensor, make: MakeWaiting) -> None:
    """Let this rank's own gradient wait; there was none."""
    let_wait(parameter, make).part = gradient


def let_wait(parameter: Sharded, make: MakeWaiting) -> LocalGradient:
    """What waits in ``.grad``, made if nothing does."""
    if (local := local_gradient_of(parameter)) is None:
        parameter.grad = local = make(parameter)
    return local


def take_own(parameters: Sequence[Sharded]) -> dict[int, Tensor]:
    """This rank's own gradients by slot, which wait no more."""
    taken = {}
    for slot, parameter in enumerate(parameters):
        local = local_gradient_of(parameter)
        if local is not None and local.part is not None:
            taken[slot], local.part = local.part, None
            if local.of_replica is None:
                parameter.grad = local.prior
    return taken


def add_reduced(parameter: Sharded, gradient: Sharded) -> Sharded:
    """Add a reduced gradient to ``.grad``, beside what may wait there; gives their sum."""
    local = local_gradient_of(parameter)
    present = parameter.grad if local is None else local.prior
    if present is not None:
        return cast(Sharded, present.add_(gradient))
    if local is not None:
        local.prior = gradient
    else:
        parameter.grad = gradient
    return gradient
