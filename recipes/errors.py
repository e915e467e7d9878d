"""A mistake of the user: shown on the command line without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self


class RecipeError(ValueError):
    """An option or an input that cannot work; the message names it and says what to do."""

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


def find_recipe_error(error: BaseException) -> RecipeError | None:
    """The mistake behind ``error``, where another library has wrapped it in an error of its own."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, RecipeError):
        cause = cause.__cause__
    return cause


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
