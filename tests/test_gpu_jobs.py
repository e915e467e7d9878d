"""What crashes, hangs, fails or does not fit is a result, and the rest goes on."""

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import measure
from benchmarks.gpu.cases import small_cases
from benchmarks.gpu.jobs import end_of, run_job
from benchmarks.gpu.record import DONE, FAILED, OUT_OF_MEMORY
from benchmarks.gpu.speed import run_speed
from benchmarks.gpu.suite import run_suite
from tests.support.events import wait_until
from tests.support.gpu_records import CONFTEST, ROOT, begun, results_in, soon


def abort():
    os.abort()


def sleep_in_a_child(path):
    child = subprocess.Popen(["sleep", "60"])
    path.write_text(str(child.pid))
    child.wait()


def is_alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def say(text):
    print(text)


def test_a_job_that_crashes_or_hangs_is_a_failure_with_a_reason(tmp_path, monkeypatch):
    log = tmp_path / "log.txt"
    failure = run_job(abort, log=log, limit_s=60.0, method="forkserver")
    assert failure.says.startswith("killed by SIGABRT")
    assert end_of(log)[0] == "Fatal Python error: Aborted"
    path, join = tmp_path / "pid", BaseProcess.join

    def join_once_it_sleeps(process, timeout=None):
        wait_until(lambda: path.exists() and path.read_text())
        join(process, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(BaseProcess, "join", join_once_it_sleeps)
        failure = run_job(sleep_in_a_child, path, log=log, limit_s=0.1, method="forkserver")
    assert failure.kind == "timed out"
    wait_until(lambda: not is_alive(path.read_text()))
    assert run_job(say, "hello", log=log, limit_s=60.0, method="forkserver") is None
    assert end_of(log) == ["hello"]


def test_a_job_that_is_being_started_at_an_interrupt_is_ended_too(tmp_path, monkeypatch):
    start, started = BaseProcess.start, []

    def start_and_be_interrupted(process):
        start(process)
        started.append(process)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(BaseProcess, "start", start_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_job(time.sleep, 60.0, log=tmp_path / "log.txt", limit_s=60.0, method="forkserver")
    (process,) = started
    assert process.exitcode == -signal.SIGKILL


def test_a_failed_case_is_recorded_and_the_rest_goes_on(tmp_path):
    good, *_ = small_cases()
    bad = replace(good, arm="nonsense")
    record = begun(tmp_path / "speed.json")
    run_speed(record, [bad, good], device="cpu", method="forkserver", deadline=soon())
    results = results_in(tmp_path, "speed")
    assert results[bad.name]["state"] == FAILED
    assert results[bad.name]["says"] == "KeyError: 'nonsense'"
    assert "KeyError: 'nonsense'" in results[bad.name]["log"]
    assert results[good.name]["state"] == DONE


def test_what_does_not_fit_is_a_result_of_its_own(tmp_path, monkeypatch):
    def measured(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measure, "_measure", measured)
    out = tmp_path / "result.json"
    with pytest.raises(torch.OutOfMemoryError):
        measure.run_case(small_cases()[0], "cpu", str(out))
    assert json.loads(out.read_text())["state"] == OUT_OF_MEMORY


def test_what_did_not_fit_and_what_is_done_is_not_tried_again(tmp_path):
    record = begun(tmp_path / "speed.json")
    cases = small_cases()[:2]
    for case, state in zip(cases, (DONE, OUT_OF_MEMORY), strict=True):
        record.put(case.name, state=state)
    run_speed(record, cases, device="cpu", method="neither is started", deadline=soon())


SUITE = """
import os, time, pytest

def test_good(): pass

def test_bad(): assert 1 == 2

def test_crash(): os.abort()

def test_hang(): time.sleep(60)

@pytest.mark.skip(reason="not here")
def test_skipped(): pass

def test_last(): pass
"""


# As this project's own, on a machine without the plugin that has the option.
INI = """
[tool.pytest.ini_options]
addopts = ["--strict-config", "--strict-markers"]
filterwarnings = ["error"]
timeout = 120
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:timeout")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "pyproject.toml").write_text(INI)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(SUITE)
    return tmp_path


def run_tests(suite, **options):
    record = begun(suite / "tests.json")
    deadline = options.pop("deadline", soon())
    record = run_suite(record, suite, device="cpu", deadline=deadline, **options)
    return {name.rpartition("::")[2]: result for name, result in record.results.items()}


def test_every_test_has_a_result_whatever_others_do(suite):
    found = run_tests(suite, limit_s=5.0)
    states = {name: result["state"] for name, result in found.items()}
    assert states == {
        "test_good": DONE, "test_bad": FAILED, "test_crash": FAILED, "test_hang": FAILED,
        "test_skipped": "skipped", "test_last": DONE,
    }  # fmt: skip
    assert "assert 1 == 2" in found["test_bad"]["says"]
    assert found["test_crash"]["says"].startswith("Fatal Python error: Aborted\nexit code -6")
    assert found["test_hang"]["says"].startswith("Timeout (0:00:05)")
    assert any("test_hang" in line for line in found["test_hang"]["log"])
    assert found["test_skipped"]["says"] == "Skipped: not here"

    mended = SUITE.replace("os.abort()", "pass").replace("time.sleep(60)", "pass")
    (suite / "test_it.py").write_text(mended.replace("1 == 2", "1 == 1"))
    found = run_tests(suite)
    assert {name: result["state"] for name, result in found.items()} == {
        name: "skipped" if name == "test_skipped" else DONE for name in states
    }
    again = {name for name, result in found.items() if result["session"] == 1}
    assert again == {"test_bad", "test_crash", "test_hang", "test_skipped"}


def test_a_suite_that_cannot_start_is_a_failure_until_it_can(suite):
    (suite / "test_it.py").write_text("import nothing_like_this")
    found = run_tests(suite)
    assert found["test_it.py"]["state"] == FAILED
    assert "nothing_like_this" in found["test_it.py"]["says"]
    (suite / "conftest.py").unlink()
    as_whole = run_tests(suite)["as a whole"]
    assert as_whole["state"] == FAILED
    assert "--device" in "".join(as_whole["log"])
    (suite / "conftest.py").write_text(CONFTEST)
    (suite / "test_it.py").write_text("def test_good(): pass")
    for _ in range(2):  # the second time there is nothing left to run
        found = run_tests(suite)
        assert {name: result["state"] for name, result in found.items()} == {"test_good": DONE}
