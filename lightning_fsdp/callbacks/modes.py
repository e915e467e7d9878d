"""Dispatch modes that a callback enters in one hook and leaves in another.

Torch takes off the innermost mode, whichever is asked to end. So one that is left while another is
inside of it stays, and is taken off with that one: callbacks may stand in any order.

While there is one, nothing is compiled. Dynamo would give up the code that it meets then, and run
it uncompiled for the rest of the process.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

Mode = AbstractContextManager[Any, bool | None]

_entered: list[Mode] = []  # the innermost last
_left: list[Mode] = []  # of those, while they stay
_stance = ExitStack()


def enter(mode: Mode) -> None:
    """Enter one, inside of those that are entered."""
    if not _entered:
        _stance.enter_context(torch.compiler.set_stance("force_eager"))
    mode.__enter__()
    _entered.append(mode)


def leave(mode: Mode) -> None:
    """Leave one, whether or not it is the innermost; until that one is left it goes on to see."""
    _left.append(mode)
    while _entered and _entered[-1] in _left:
        innermost = _entered.pop()
        _left.remove(innermost)
        innermost.__exit__(None, None, None)
    if not _entered:
        _stance.close()
