"""The states of a flat parameter: of its whole copy, and of its gradients.

    parameters   SHARDED --unshard--> GATHERING --wait--> UNSHARDED --reshard--> SHARDED
    gradients    none --arrive--> local --reduce--> reducing --land--> none (they are in ``.grad``)

Being in flight is a state of its own: in ``GATHERING`` the buffer is allocated, its content is not
there yet, and somebody has to wait for it. A gather whose result is not wanted any more (a prefetch
that missed) is waited for before its buffer is freed: no transition skips the wait.

The state of the gradients is not stored: ``FlatParameter.gradients`` tells it by which there are.
"""

from __future__ import annotations

from enum import Enum


class ParameterState(Enum):
    """What the whole copy of a unit's parameters holds."""

    SHARDED = "sharded"  # no whole copy: its storage has 0 bytes
    GATHERING = "gathering"  # allocated; the all-gather is in flight
    UNSHARDED = "unsharded"  # whole and readable
