"""The bar over runs, or over searches of many: which one, how many, and how long it will take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from tqdm import tqdm

# Runs are few and long: the mean pace of all of them, not that of the last ones.
_BAR = "{desc}{n_fmt}/{total_fmt} |{bar}| {elapsed}, about {remaining} left"


class Turn(Protocol):
    """What takes turns: an arm, one among some number of ranks, or the search for its batch."""

    @property
    def name(self) -> str:
        """For people."""


T = TypeVar("T", bound=Turn)


def in_turns(arms: Sequence[T], repeats: int) -> Iterator[tuple[int, T]]:
    """Each arm once per round, and a bar over all of it; silent where nobody watches.

    Args:
        arms: In the order of a round.
        repeats: Rounds.

    Yields:
        The round, from 0, and the arm.
    """
    turns = [(repeat, arm) for repeat in range(repeats) for arm in arms]
    with tqdm(total=len(turns), bar_format=_BAR, smoothing=0, disable=None) as bar:
        for repeat, arm in turns:
            which = f", round {repeat + 1}/{repeats}" if repeats > 1 else ""
            bar.set_description(f"{arm.name}{which}")
            yield repeat, arm
            bar.bar_format = _BAR + ", until {eta:%H:%M}"
            bar.update()
