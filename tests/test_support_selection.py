"""Which tests are left out where each is to run once."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import selection


class _Item:
    def __init__(self, nodeid, params=None):
        self.nodeid, self.path = nodeid, Path(nodeid.partition("::")[0])
        self.marks = []
        if params is not None:
            self.callspec = SimpleNamespace(params=params)

    def add_marker(self, mark):
        self.marks.append(mark.name)

    def get_closest_marker(self, name):
        return name if name in self.marks else None


def test_each_value_is_in_a_case_and_few_cases_are_needed():
    def case(engine, dtype):
        return _Item(f"tests/test_a.py::test_x[{engine}-{dtype}]", {"e": engine, "d": dtype})

    grid = [case(*pair) for pair in itertools.product("abc", (16, 32))]
    single = _Item("tests/test_a.py::test_y")
    kept = selection.each_value_once([*grid, single])
    assert len(kept) == 4
    assert kept[-1] is single
    assert {item.callspec.params["e"] for item in kept[:-1]} == set("abc")
    assert {item.callspec.params["d"] for item in kept[:-1]} == {16, 32}
    pairs = [_Item(f"tests/test_a.py::test_z[{n}]", {"a": n, "b": n % 2}) for n in range(4)]
    assert selection.each_value_once(pairs) == pairs


@pytest.fixture
def known(monkeypatch, tmp_path):
    path = tmp_path / "seconds.json"
    seconds = {"test_b.py::test_slow": 9.0, "test_b.py::test_quick": 1.5}
    seconds |= {"test_c.py::test_long": 8.0, "test_c.py::test_longer": 9.0}
    seconds |= {selection.OTHERS: 0.5, selection.START: 9.0, selection.AT_ONCE: 2.5}
    path.write_text(json.dumps(seconds))
    monkeypatch.setattr(selection, "SECONDS", path)


def test_what_takes_long_is_slow_and_its_file_comes_first(known):
    names = ["a.py::test_short", "b.py::test_quick", "b.py::test_slow[x]", "b.py::test_slow[y]"]
    items = [_Item(f"tests/test_{name}") for name in names]
    quick = [items[0], items[1]]
    selection.mark_and_sort(items)
    assert [item.nodeid for item in items][-1] == "tests/test_a.py::test_short"
    assert set(selection.each_value_once(items)) == set(quick)


def test_of_a_file_in_which_all_is_slow_the_shortest_stays(known):
    names = ["longer[a]", "longer[b]", "long[a]", "long[b]"]
    items = [_Item(f"tests/test_c.py::test_{name}") for name in names]
    selection.mark_and_sort(items)
    assert selection.each_value_once(items) == [items[2]]


def test_what_is_marked_quick_stays_though_it_is_slow(known):
    items = [_Item(f"tests/test_b.py::test_{name}") for name in ("quick", "slow")]
    selection.mark_and_sort(items)
    assert selection.each_value_once(items) == items[:1]
    items[1].marks.append("quick")
    assert selection.each_value_once(items) == items


def test_minutes_are_those_of_the_cases_at_once(known):
    names = ["b.py::test_slow[x]", "b.py::test_slow[y]", "b.py::test_quick", "a.py::test_new"]
    items = [_Item(f"tests/test_{name}") for name in names]
    assert selection.minutes_of(items) == pytest.approx((9 + (9 + 9 + 1.5 + 0.5) / 2.5) / 60)


def test_the_tests_take_8_minutes_once_and_25_in_all(all_items):
    """On two cores that do nothing else, by the last run that was written."""
    assert selection.minutes_of(selection.each_value_once(all_items)) < 8
    assert selection.minutes_of(all_items) < 25


def test_seconds_are_written_per_case_of_a_test(known, monkeypatch):
    monkeypatch.setattr(selection.time, "monotonic", iter([10.0, 11.5, 15.75]).__next__)
    record = selection.Record()
    for nodeid, seconds in (("test_x[a]", 1.0), ("test_x[a]", 2.0), ("test_x[b]", 5.0), ("t", 0.5)):
        report = SimpleNamespace(nodeid=f"tests/test_c.py::{nodeid}", duration=seconds)
        record.pytest_runtest_logreport(report)
    record.pytest_sessionfinish()
    of_run = {selection.OTHERS: 0.5, selection.START: 1.5, selection.AT_ONCE: 2.0}
    assert json.loads(selection.SECONDS.read_text()) == {**of_run, "test_c.py::test_x": 4.0}
