"""A script that hangs is killed, with all that it has started, and shown where it stood."""

import re
import shutil
from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.jobs import Job

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
SCRIPT = """
import os, subprocess, sys, time

def computes():
    print("COMPUTES", flush=True)
    while True:
        pass

def talks():
    while True:
        print("TALKS", flush=True)
        time.sleep(0.1)

class HangsAtTheEnd:
    def __del__(self, sleep=time.sleep, write=os.write):
        write(1, b"ENDS\\n")
        sleep(600)

def ends():
    global kept
    kept = HangsAtTheEnd()

def ends_with_a_child():
    subprocess.Popen([sys.executable, *sys.argv[:-1], "computes"])
    ends()

def leaves_a_silent_child():
    child = "import time; time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.DEVNULL, stderr=-3)

globals()[sys.argv[2]]()
"""


def failure_of(job, **limits):
    """Nothing is left of it."""
    with pytest.raises(pytest.fail.Exception) as failed:
        job.wait(**limits)
    assert job.process.returncode is not None
    assert not job._members()
    return str(failed.value)


def test_the_failure_tells_what_hangs_from_what_computes_and_shows_where(tmp_path):
    job = Job(tmp_path, [], SCRIPT, "ends_with_a_child")
    for text in ("COMPUTES", "ENDS"):
        job.wait_for(text)
    told = failure_of(job, silent_s=0.2)
    assert told.startswith("still running, and silent for 0.2 s:\nload average ")
    processes = re.findall(
        r"process (\d+) \(parent (\d+), \S+ s of processor, (\S+) of the last 0.5\): .* (\w+)\n"
        r"  thread \1 python\S*: state (\S), in \S+, call \S",
        told,
    )
    of = {mode: (pid, parent, float(used), state) for pid, parent, used, mode, state in processes}
    assert set(of) == {"ends_with_a_child", "computes"}
    pid, _, used, state = of["ends_with_a_child"]
    assert (pid, used, state) == (str(job.process.pid), 0.0, "S")
    assert of["computes"][1] == pid
    assert of["computes"][2] > 0
    assert re.search(r"\d\.\d\d s  ENDS\n", told)  # when it was said
    assert "in computes\n" in told  # Python's stack
    if shutil.which("gdb") is not None:  # Python has none to show
        assert re.search(rf"native stacks of process {pid}:\n(.+\n)*#\d+ .*Py_Finalize", told)


def test_what_talks_without_end_is_not_waited_for_without_end(tmp_path):
    job = Job(tmp_path, [], SCRIPT, "talks")
    job.wait_for("TALKS")
    assert failure_of(job, timeout_s=0.5).startswith("still running after 0.5 s:\n")


def test_a_child_that_says_nothing_and_is_left_is_shown_and_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "_LEFT_S", 0.2)
    told = failure_of(Job(tmp_path, [], SCRIPT, "leaves_a_silent_child"))
    assert re.search(r"^left processes \[(\d+)\] behind:\n.*\nprocess \1 .*: \S+ -c import ", told)


def test_what_is_waited_for_and_never_said_is_missed(tmp_path):
    job = Job(tmp_path, [], "print('something else')")
    with pytest.raises(AssertionError, match=r"ended without 'BEGINS':\nsomething else"):
        job.wait_for("BEGINS")
    assert job.wait() == (0, "something else\n")
