"""The part ``tests``: pytest in a process of its own, started again after a test that ended it."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.record import FAILED, Record
from benchmarks.gpu.results_plugin import NOT_REACHED, RUNNING
from benchmarks.gpu.speed import tail_of
from lightning_fsdp.harness.processes import last_line, run_command

AS_WHOLE = "pytest"  # the result of what is no test's
_LEAST_S = 5.0
_NOTHING_COLLECTED = 5


def run_suite(
    record: Record, tests: Path, *, device: str, deadline: float, limit_s: float = 120.0
) -> Record:
    """Run what has not passed yet.

    Args:
        record: Takes a result per test, under its name.
        tests: A folder or file; pytest is told the device by ``--device``.
        device: ``cpu`` or ``cuda``.
        deadline: Of ``time.monotonic()``.
        limit_s: Seconds per test.

    Returns:
        The record with the results.
    """
    command = [sys.executable, "-m", "pytest", str(tests), "--device", device]
    command += ["-p", "benchmarks.gpu.results_plugin"]
    command += ["--gpu-results", str(record.path), "--gpu-limit", str(limit_s)]
    # Without plugins that this project's configuration is for, it has options that nobody knows.
    command += ["-o", "addopts=-ra", "-W", "ignore::pytest.PytestConfigWarning"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        while (left_s := deadline - time.monotonic()) > _LEAST_S:
            failure = run_command(command, log=log, timeout_s=left_s)
            record = Record(record.path)
            broken = [name for name, r in record.results.items() if r["state"] == RUNNING]
            is_over = failure is not None and failure.kind == "timed out"
            for name in broken:
                state = NOT_REACHED if is_over else FAILED
                says = f"the process ended: {last_line(log)}"
                record.put(name, state=state, says=says, log=tail_of(log))
            if is_over or not broken:
                break
        else:
            return record
        tried = [r for r in record.results.values() if r["state"] != NOT_REACHED]
        if failure is not None and not tried:
            record.put(AS_WHOLE, state=FAILED, says=failure.says, log=tail_of(log))
    return record
