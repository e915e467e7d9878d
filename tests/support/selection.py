"""Which tests are slow, in which order they run, which of their cases are enough, and their time.

``tests/seconds.json`` has the seconds of a case of each test that takes long, and of the run that
measured them what the other tests took in the mean, how long it was until the first, and how many
such seconds passed in one of its own. ``pytest --write-seconds`` writes it.
"""

import collections
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

SECONDS = Path(__file__).resolve().parents[1] / "seconds.json"
SLOW_S = 1.6
"""From here on a test is slow."""

_WRITTEN_S = 1.0
OTHERS, START, AT_ONCE = "(others)", "(start)", "(at once)"
_PLAIN = (str, int, float, type(None))


class Record:
    """A plugin that notes how long tests take, and writes it down at the end."""

    def __init__(self) -> None:
        self._seconds = collections.defaultdict[str, collections.Counter[str]](collections.Counter)
        self._begun_s = time.monotonic()
        self._start_s = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self._seconds:
            self._start_s = time.monotonic() - self._begun_s
        self._seconds[_function(report.nodeid)][report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        whole_s = time.monotonic() - self._begun_s
        means = {name: sum(c.values()) / len(c) for name, c in self._seconds.items()}
        long = {name: round(s, 1) for name, s in sorted(means.items()) if s >= _WRITTEN_S}
        others = [s for name in means.keys() - long for s in self._seconds[name].values()]
        total_s = sum(sum(c.values()) for c in self._seconds.values())
        of_run = {
            OTHERS: round(sum(others) / max(1, len(others)), 3),
            START: round(self._start_s, 1),
            AT_ONCE: round(total_s / (whole_s - self._start_s), 2),
        }
        SECONDS.write_text(json.dumps(of_run | long, indent=1) + "\n")


def mark_and_sort(items: list[pytest.Item]) -> None:
    """Mark what is slow; files that take longest come first, so that no worker ends alone."""
    seconds_of = _seconds_of_cases()
    of_file = collections.Counter[Path]()
    for item in items:
        seconds = seconds_of[_function(item.nodeid)]
        of_file[item.path] += seconds
        if seconds >= SLOW_S:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: -of_file[item.path])  # stable: the order within a file stays


def each_value_once(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Few cases of each test that is not slow, such that each value of a parameter is in one.

    Of three engines times two precisions that is three cases, not six. Tests without parameters are
    kept, and slow ones that are marked ``quick``; and of a file all of whose tests are slow, a case
    of the one that takes least.
    """
    seconds_of = _seconds_of_cases()
    by_file = collections.defaultdict[Path, dict[str, list[pytest.Item]]](dict)
    for item in items:
        by_file[item.path].setdefault(_function(item.nodeid), []).append(item)
    kept: list[pytest.Item] = []
    for tests in by_file.values():
        quick = [cases for cases in tests.values() if _is_quick(cases[0])]
        kept += [item for cases in quick for item in _covering(cases)]
        if not quick:
            kept.append(tests[min(tests, key=lambda test: seconds_of[test])][0])
    return kept


def minutes_of(items: Iterable[pytest.Item]) -> float:
    """How long a run of these takes, where the seconds were written."""
    seconds_of = _seconds_of_cases()
    total_s = sum(seconds_of[_function(item.nodeid)] for item in items)
    return (seconds_of[START] + total_s / seconds_of[AT_ONCE]) / 60


def _seconds_of_cases() -> dict[str, float]:
    written = json.loads(SECONDS.read_text())
    return collections.defaultdict(lambda: written[OTHERS], written)


def _is_quick(item: pytest.Item) -> bool:
    return not item.get_closest_marker("slow") or bool(item.get_closest_marker("quick"))


def _covering(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    kept: list[pytest.Item] = []
    seen: set[tuple[str, object]] = set()
    while True:
        # The first of those that show most: the choice is the same on every worker.
        best = max(cases, key=lambda case: len(_values(case) - seen))
        if kept and not _values(best) - seen:
            return kept
        kept.append(best)
        seen |= _values(best)


def _values(item: pytest.Item) -> set[tuple[str, object]]:
    """Names and values of a case's parameters; objects that are not plain are their own value."""
    callspec = getattr(item, "callspec", None)
    params = {} if callspec is None else callspec.params
    return {(name, v if isinstance(v, _PLAIN) else id(v)) for name, v in params.items()}


def _function(nodeid: str) -> str:
    return nodeid.partition("[")[0].removeprefix("tests/")
