"""Dispatch modes that a callback enters in one hook and leaves in another.

Torch takes off the innermost mode, whichever is asked to end. So one that is left while another is
inside of it stays, and is taken off with that one: callbacks may stand in any order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

Mode = AbstractContextManager[Any, bool | None]

_entered: list[Mode] = []  # the innermost last
_left: list[Mode] = []  # of those, while they stay


def enter(mode: Mode) -> None:
    """Enter one, inside of those that are entered."""
    mode.__enter__()
    _entered.append(mode)


def leave(mode: Mode) -> None:
    """Leave one, whether or not it is the innermost; until that one is left it goes on to see."""
    _left.append(mode)
    while _entered and _entered[-1] in _left:
        innermost = _entered.pop()
        _left.remove(innermost)
        innermost.__exit__(None, None, None)
