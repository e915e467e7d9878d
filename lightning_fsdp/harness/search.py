"""The largest size that fits: a bounded search that says why each size that failed did so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_fsdp.harness.command_line import Interrupted

Attempt = Callable[[int], str | None]
"""Tries a size; returns why it does not fit, or ``None``."""


@dataclass(frozen=True)
class Tried:
    """One attempt.

    Attributes:
        failure: Why the size does not fit, or ``None``.
        is_verification: Whether it was one at full length.
    """

    size: int
    failure: str | None
    is_verification: bool


@dataclass(frozen=True)
class Search:
    """What a search found.

    Attributes:
        largest: The largest size that fits, as far as was tried; ``None``: not even 1 does.
        cap: Sizes above it were not tried.
        tried: All attempts, in order.
    """

    largest: int | None
    cap: int
    tried: tuple[Tried, ...]

    @property
    def limit(self) -> str:
        """Why it is not larger."""
        failures = [tried for tried in self.tried if tried.failure is not None]
        if not failures:
            return f"nothing larger was tried: the cap is {self.cap}"
        nearest = min(failures, key=lambda tried: tried.size)
        length = "at full length, " if nearest.is_verification else ""
        return f"{length}{nearest.size}: {nearest.failure}"


def largest_that_fits(
    attempt: Attempt,
    *,
    cap: int,
    verify: Attempt | None = None,
    guess: Callable[[], int] | None = None,
) -> Search:
    """Double from 1 until an attempt fails, then bisect.

    Sizes below one that fits are taken to fit as well, and sizes above one that fails to fail.

    Args:
        attempt: Tries a size, quickly.
        cap: The largest size to try.
        verify: Tries a size at full length. What it refuses does not fit, whatever ``attempt``
            said, and the search goes on below; what the search finds has passed it.
        guess: What the answer probably is, by the attempts so far. Asked twice, once 1 and 2 fit:
            the first is tried, and the second with its neighbours.

    Raises:
        ValueError: ``cap`` leaves nothing to try.
        Interrupted: After Ctrl-C, with the search so far; its last attempt is the interrupted one.
        KeyboardInterrupt: That was the first attempt.
    """
    if cap < 1:
        raise ValueError(f"cap: expected at least 1, got {cap}. Raise it.")
    tried: list[Tried] = []

    def fits(size: int, *, by: Attempt) -> bool:
        is_full = by is verify
        try:
            tried.append(Tried(size, by(size), is_full))
        except KeyboardInterrupt as interrupt:
            if not tried:
                raise
            tried.append(Tried(size, "interrupted", is_full))
            raise Interrupted(Search(largest or None, cap, tuple(tried))) from interrupt
        return tried[-1].failure is None

    largest, refused = 0, cap + 1  # what is known to fit, and what is not; nothing in between

    def narrow(size: int) -> None:
        nonlocal largest, refused
        if largest < size < refused:  # else the answer is known
            if fits(size, by=attempt):
                largest = size
            else:
                refused = size

    while largest < cap < refused:  # so far everything fits
        narrow(min(2 * largest or 1, cap))
        if largest == 2 and guess is not None:
            narrow(min(guess(), cap))
            likely = min(guess(), cap)
            for size in (likely, likely + 1, likely - 1):
                narrow(size)
    while True:
        while refused - largest > 1:
            narrow((largest + refused) // 2)
        if largest == 0 or verify is None or fits(largest, by=verify):
            return Search(largest or None, cap, tuple(tried))
        refused = largest
        passed = [t.size for t in tried if t.failure is None and t.size < refused]
        largest = max(passed, default=0)
