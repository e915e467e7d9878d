"""The states of a whole copy, its legal transitions, and the function that checks one.

    parameters   SHARDED --unshard--> GATHERING --wait--> UNSHARDED --reshard--> SHARDED
    gradients    NONE --arrive--> LOCAL --reduce--> REDUCING --land--> NONE (they are in ``.grad``)

In flight is a state with a name: who finds ``GATHERING`` knows that the buffer exists, that its
content does not yet, and that somebody has to wait. A collective whose result is not wanted any
more (a prefetch that missed) is waited for, then freed: no transition skips the wait.

What there is of gradients says in which state they are; it is asked, and never kept beside them.
"""

from __future__ import annotations

from enum import Enum


class ParameterState(Enum):
    """What the whole copy of a unit's parameters holds."""

    SHARDED = "sharded"  # no whole copy: its storage has 0 bytes
    GATHERING = "gathering"  # allocated; the all-gather is in flight
    UNSHARDED = "unsharded"  # whole and readable


class Gradients(Enum):
    """Which gradients a flat parameter holds; reduced ones are the parameters'."""

    NONE = "none"
    LOCAL = "local"  # this rank's own, full shape, not reduced
    REDUCING = "reducing"  # the reduction, or a stage that follows it, is in flight


_NEXT = {
    ParameterState.SHARDED: ParameterState.GATHERING,
    ParameterState.GATHERING: ParameterState.UNSHARDED,
    ParameterState.UNSHARDED: ParameterState.SHARDED,
}


def transition(
    unit_name: str, rank: int, current: ParameterState, following: ParameterState
) -> ParameterState:
    """Check one transition against the table.

    Args:
        unit_name: Original name of the unit's module, for the message.
        rank: Rank among all that train together, for the message.
        current: The state that the parameters are in.
        following: The state that they are to enter.

    Returns:
        ``following``.

    Raises:
        RuntimeError: The table does not have it.
    """
    if following is not _NEXT[current]:
        raise RuntimeError(
            f"unit {unit_name!r} (rank {rank}): expected to go from {current.value} to "
            f"{_NEXT[current].value}, got {following.value}. An operation was called out of order: "
            "wait before use, and reshard only what is whole."
        )
    return following
