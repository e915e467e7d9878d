"""What stands in ``.grad`` while a gradient waits to be reduced over all ranks.

    part          this rank's own, of backwards that did not communicate
    of_replica    the mean over this rank's replica, of reductions that left out the other replicas

``.grad`` is the one truth: whoever sets it to ``None`` or zeroes it drops what waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

from torch import Tensor

from lightning_fsdp.core.engine.communicator import Pending
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
    _waiting(parameter, make).part = gradient


def keep_in_replica(
    parameters: Iterable[tuple[Sharded, bool, bool]], shard: Tensor, make: MakeWaiting
) -> None:
    """Let means over a replica wait, added up.

    Args:
        parameters: All of a region, each with whether it has trained, and here.
        shard: ``(shard_numel,)`` with their slices in it, which are kept.
        make: Makes what stands in ``.grad``.
    """
    for parameter, has_trained, is_used in parameters:
        if has_trained:
            local, part = _waiting(parameter, make), parameter.spec.part_of(shard)
            local.of_replica = part if local.of_replica is None else local.of_replica.add_(part)
            local.is_used |= is_used


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


def take_of_replica(parameters: Sequence[Sharded], has_one: list[bool]) -> dict[int, Tensor]:
    """The means over a replica by slot, which wait no more.

    Args:
        parameters: Whose they are.
        has_one: By slot; set where this rank had a gradient.
    """
    taken = {}
    for slot, parameter in enumerate(parameters):
        local = local_gradient_of(parameter)
        if local is not None and local.of_replica is not None:
            taken[slot], parameter.grad = local.of_replica, local.prior
            has_one[slot] |= local.is_used
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


def let_join(reduction: Pending, parameters: Sequence[Sharded], has_one: list[bool]) -> None:
    """Let a reduction over the shards take along what had stayed in the replica.

    Args:
        reduction: In flight; the mean over replicas has not begun.
        parameters: Of its region.
        has_one: As of :func:`take_of_replica`.
    """
    taken, finish = take_of_replica(parameters, has_one), reduction.finish

    def joined() -> Tensor:
        shard = finish()
        for slot, part in taken.items():
            parameters[slot].spec.part_of(shard).add_(part)
        return shard

    reduction.finish = joined


def _waiting(parameter: Sharded, make: MakeWaiting) -> LocalGradient:
    if (waiting := local_gradient_of(parameter)) is None:
        parameter.grad = waiting = make(parameter)
    return waiting
