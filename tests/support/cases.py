"""Several cases of a test on the same ranks, which pay once for what a first run costs."""

from collections.abc import Callable, Iterable
from typing import Any

from tests.support.ranks import run_on_ranks
from tests.support.trainer import on_trainer_ranks


def each_on_ranks(
    fn: Callable[..., Any], world_size: int, cases: Iterable[Any], *args: Any, **options: Any
) -> dict[Any, list[Any]]:
    """Call ``fn(rank, world_size, case, *args)`` for one case after the other; returns by case what
    each rank returned. A failure names its case. The options are those of ``run_on_ranks``.
    """
    cases = tuple(cases)
    results = run_on_ranks(_each, world_size, fn, cases, args, **options)
    return {case: [of_rank[i] for of_rank in results] for i, case in enumerate(cases)}


def each_on_trainer_ranks(
    fn: Callable[..., Any],
    world_size: int,
    cases: Iterable[Any],
    *args: Any,
    timeout_s: float = 120,
) -> dict[Any, list[Any]]:
    """``each_on_ranks``, with an environment in which Lightning sees torchrun."""
    cases = tuple(cases)
    results = on_trainer_ranks(_each, world_size, fn, cases, args, timeout_s=timeout_s)
    return {case: [of_rank[i] for of_rank in results] for i, case in enumerate(cases)}


def _each(
    rank: int, world_size: int, fn: Callable[..., Any], cases: tuple[Any, ...], args: Any
) -> list[Any]:
    found = []
    for case in cases:
        try:
            found.append(fn(rank, world_size, case, *args))
        except BaseException as error:
            error.add_note(f"case: {getattr(case, '__name__', case)}")
            raise
    return found
