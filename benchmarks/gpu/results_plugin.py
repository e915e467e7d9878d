"""Loaded by pytest: writes every result as it comes, and leaves out what passed before.

``pytest -p benchmarks.gpu.results_plugin --gpu-results FILE``. A test that takes too long ends the
process with the stacks of all threads, so that its name stays behind as the one that ran.
"""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.record import DONE, FAILED, Record

RUNNING, SKIPPED, NOT_REACHED = "running", "skipped", "not reached"
_MOST_SAID = 2000  # characters of a failure


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu")
    group.addoption("--gpu-results", type=Path, help="JSON file that takes the results")
    group.addoption("--gpu-limit", type=float, default=120.0, help="seconds per test")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(
        _Results(Record(config.getoption("--gpu-results")), config.getoption("--gpu-limit"))
    )


class _Results:
    def __init__(self, record: Record, limit_s: float) -> None:
        self._record = record
        self._limit_s = limit_s
        self._found: dict[str, Any] = {}  # of the test that runs
        self._stderr = os.dup(2)  # of the process: pytest puts others in its place

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """What was not tried comes first; what failed before this session is tried again."""
        settled = [item for item in items if self._is_settled(item.nodeid)]
        items[:] = [item for item in items if item not in settled]
        items.sort(key=lambda item: self._record.state_of(item.nodeid) == FAILED)
        config.hook.pytest_deselected(items=settled)
        for item in items:
            if self._record.state_of(item.nodeid) is None:
                self._record.put(item.nodeid, state=NOT_REACHED)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported has no tests, and is a failure itself."""
        if report.failed:
            says = report.longreprtext[-_MOST_SAID:]
            self._record.put(report.nodeid, state=FAILED, says=says)
        else:
            self._record.results.pop(report.nodeid, None)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._record.put(nodeid, state=RUNNING)
        self._found = {"state": DONE, "seconds": 0.0}
        faulthandler.dump_traceback_later(self._limit_s, exit=True, file=self._stderr)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._found["seconds"] += report.duration
        if report.skipped:
            self._found |= {"state": SKIPPED, "says": str(report.longrepr[-1])}
        elif report.failed:
            self._found |= {"state": FAILED, "says": report.longreprtext[-_MOST_SAID:]}

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._record.put(nodeid, **self._found)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """That nothing was left to run is no failure."""
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._record.results:
            session.exitstatus = pytest.ExitCode.OK

    def _is_settled(self, name: str) -> bool:
        result = self._record.results.get(name, {})
        is_of_now = result.get("session") == len(self._record.sessions) - 1
        return result.get("state") == DONE or (is_of_now and result["state"] == FAILED)
