"""A mistake of the user: shown on the command line without a traceback."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Self

from torch.distributed import TCPStore  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy


class RecipeError(ValueError):
    """An option or an input that cannot work; the message names it and says what to do.

    Attributes:
        is_shown_elsewhere: Whether another rank shows it, so that this one need not.
    """

    is_shown_elsewhere: bool = False

    @classmethod
    def at(cls, place: object, expected: str, got: object, cure: str) -> Self:
        """The error for a place that does not hold what it should.

        Args:
            place: An option, a file, or a line of a file.
            expected: What it should hold.
            got: What it holds; told in one line.
            cure: What to do, as a sentence.
        """
        return cls(f"{place}: expected {expected}, got {' '.join(str(got).split())}. {cure}")


def require_in_range(
    option: str, value: float, cure: str, least: float, limit: float = math.inf
) -> None:
    """Refuse a number that is out of range.

    Args:
        option: Its name.
        value: What was given.
        cure: What to do, as a sentence.
        least: The smallest that can work.
        limit: Every one that can work is below it.

    Raises:
        RecipeError: It is out of range.
    """
    if not (least <= value and (value < limit or limit == math.inf)):
        expected = f"{least} or more" + (f" and less than {limit}" if limit < math.inf else "")
        raise RecipeError.at(option, expected, value, cure)


def find_recipe_error(error: BaseException) -> RecipeError | None:
    """The mistake behind ``error``, where another library has wrapped it in an error of its own."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, RecipeError):
        cause = cause.__cause__
    return cause


def is_said_first(message: str) -> bool:
    """Whether no other rank has said this, where torchrun has started all of them.

    Each of them parses the options, before there is a process group in which they could agree. So
    they ask torchrun's own store. What only one of them finds is said by that one.
    """
    found = os.environ
    if found.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    host, port = found["MASTER_ADDR"], int(found["MASTER_PORT"])
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=2))
        return store.add(f"{found.get('TORCHELASTIC_RESTART_COUNT')} {message}", 1) == 1
    except RuntimeError:  # it has ended
        return True


@contextmanager
def mistakes_in(option: str, *kinds: type[Exception]) -> Iterator[None]:
    """What another library refuses within is a mistake in an option.

    Args:
        option: Where to look for it.
        kinds: Errors that say so.

    Raises:
        RecipeError: In their place, in one line.
    """
    try:
        yield
    except RecipeError:
        raise
    except kinds as error:
        raise RecipeError(f"{option}: {' '.join(str(error).split())}") from error


@contextmanager
def agreed_mistakes(strategy: Strategy | None) -> Iterator[None]:
    """A mistake that one rank finds within ends all of them; one that all find, rank 0 shows.

    So does another error; it is raised where it happened, and the others say that it did.

    Args:
        strategy: Of the Trainer, with its processes started: all ranks come here. ``None``: there
            is no other rank.

    Raises:
        RecipeError: On every rank that has no error of its own.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 (whatever it is, the other ranks must hear of it)
        error = caught
    if strategy is not None and strategy.reduce_boolean_decision(error is not None, all=False):
        is_everywhere = strategy.reduce_boolean_decision(error is not None, all=True)
        is_shown_here = strategy.is_global_zero if is_everywhere else error is not None
        error = error or RecipeError("expected no mistake on any rank. Another rank shows it.")
        if isinstance(error, RecipeError):
            error.is_shown_elsewhere = not is_shown_here
    if error is not None:
        raise error
