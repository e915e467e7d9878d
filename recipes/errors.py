"""A mistake of the user: shown on the command line without a traceback."""

from __future__ import annotations


class RecipeError(ValueError):
    """An option or an input that cannot work; the message names it and says what to do."""


def find_recipe_error(error: BaseException) -> RecipeError | None:
    """The mistake behind ``error``, where another library has wrapped it in an error of its own."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, RecipeError):
        cause = cause.__cause__
    return cause
