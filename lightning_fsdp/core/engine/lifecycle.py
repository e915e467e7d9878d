"""The states of a flat parameter: of its whole copy, and of its gradients.

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
