"""The states of a unit, the table of legal steps, and the one function that takes a step.

Two things of a unit have a life: its whole parameters and its gradients.

    parameters   SHARDED --unshard--> GATHERING --wait--> UNSHARDED --reshard--> SHARDED
    gradients    NONE --arrive--> LOCAL --reduce--> REDUCING --land--> REDUCED --clear--> NONE
                 with replicas:  REDUCING --average--> AVERAGING --land--> REDUCED
                 offloaded:      one of them --bring_home--> RETURNING --land--> REDUCED

In flight is a state with a name: who finds ``GATHERING`` knows that the buffer exists, that its
content does not yet, and that somebody has to wait. A collective whose result is not wanted any
more (a prefetch that missed) is waited for, then freed: no step skips the wait.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar


class ParameterState(Enum):
    """What the whole copy of a unit's parameters holds."""

    SHARDED = "sharded"  # no whole copy: its storage has 0 bytes
    GATHERING = "gathering"  # allocated; the all-gather is in flight
    UNSHARDED = "unsharded"  # whole and readable


class GradientState(Enum):
    """Which gradients a unit holds."""

    NONE = "none"
    LOCAL = "local"  # this rank's own, full shape, not reduced
    REDUCING = "reducing"  # the reduce-scatter is in flight
    AVERAGING = "averaging"  # the all-reduce over the replicas is in flight
    RETURNING = "returning"  # the reduced shard is on its way to the host
    REDUCED = "reduced"  # the mean over ranks, as shards


_State = TypeVar("_State", ParameterState, GradientState)

_LEGAL_STEPS: dict[Enum, frozenset[Enum]] = {
    ParameterState.SHARDED: frozenset({ParameterState.GATHERING}),
    ParameterState.GATHERING: frozenset({ParameterState.UNSHARDED}),
    ParameterState.UNSHARDED: frozenset({ParameterState.SHARDED}),
    # A second micro-batch may arrive over gradients that were reduced before it, and gradients
    # of a step that failed are dropped while local.
    GradientState.NONE: frozenset({GradientState.LOCAL}),
    GradientState.LOCAL: frozenset({GradientState.REDUCING, GradientState.NONE}),
    GradientState.REDUCING: frozenset(
        {GradientState.AVERAGING, GradientState.RETURNING, GradientState.REDUCED}
    ),
    GradientState.AVERAGING: frozenset({GradientState.RETURNING, GradientState.REDUCED}),
    GradientState.RETURNING: frozenset({GradientState.REDUCED}),
    GradientState.REDUCED: frozenset({GradientState.LOCAL, GradientState.NONE}),
}


def take_step(unit_name: str, rank: int, current: _State, following: _State) -> _State:
    """Check one step against the table.

    Args:
        unit_name: Original name of the unit's module, for the message.
        rank: Rank among all that train together, for the message.
        current: The state that the unit is in.
        following: The state that it is to enter.

    Returns:
        ``following``.

    Raises:
        RuntimeError: The table has no such step.
    """
    if following not in _LEGAL_STEPS[current]:
        legal = ", ".join(sorted(state.value for state in _LEGAL_STEPS[current]))
        raise RuntimeError(
            f"unit {unit_name!r} (rank {rank}): expected a step from {current.value} to one of "
            f"[{legal}], got {following.value}. An operation was called out of order: wait before "
            "use, and reshard only what is whole."
        )
    return following
