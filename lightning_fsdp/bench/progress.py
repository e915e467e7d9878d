"""The bar over runs, or over searches of many: which one, and until when.

A bar's own guess is the mean pace, brought up to date when a run ends. Runs here are few, long and
of very different lengths, so the guess is made per arm, and told as a time of day, which stays true
while a run lasts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Protocol, TypeVar

from tqdm import tqdm

_BAR = "{desc}{n_fmt}/{total_fmt} |{bar}|{postfix}"


class Turn(Hashable, Protocol):
    """What takes turns: an arm, one among some number of ranks, or the search for its batch."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def num_sequences(self) -> int:
        """Per rank and optimizer step: how much work it is."""


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
    spent: dict[T, list[float]] = {}
    with tqdm(total=len(turns), bar_format=_BAR, disable=None) as bar:
        for index, (repeat, arm) in enumerate(turns):
            left_s = time_left(spent, [later for _, later in turns[index:]])
            which = f", round {repeat + 1}/{repeats}" if repeats > 1 else ""
            bar.set_description(f"{arm.name}{which}", refresh=False)
            bar.set_postfix_str("time left not known yet" if left_s is None else _told(left_s))
            start = time.perf_counter()
            yield repeat, arm
            spent.setdefault(arm, []).append(time.perf_counter() - start)
            bar.update()
        bar.set_postfix_str("")


def time_left(spent: Mapping[T, Sequence[float]], ahead: Sequence[T]) -> float | None:
    """Seconds that the runs ahead will take, or ``None`` before the first has ended.

    Args:
        spent: Seconds of each run so far, by arm.
        ahead: An arm per run to come.
    """
    if not spent:
        return None
    done = [(arm.num_sequences, second) for arm, seconds in spent.items() for second in seconds]
    works, seconds = zip(*done, strict=True)
    slope, start = 0.0, statistics.fmean(seconds)
    if len(set(works)) > 1:  # processes take their time to start, whatever the batch
        slope, start = statistics.linear_regression(works, seconds)
    # An arm that has run takes as long again; another, as long as one of its size would.
    return sum(
        statistics.fmean(spent[arm])
        if arm in spent
        else max(0.0, start + slope * arm.num_sequences)
        for arm in ahead
    )


def _told(left_s: float) -> str:
    end = datetime.now().astimezone() + timedelta(seconds=left_s)
    left = f"{left_s:.0f} s" if left_s < 90 else f"{left_s / 60:.0f} min"
    return f"about {left} left, until {end:%H:%M}"
