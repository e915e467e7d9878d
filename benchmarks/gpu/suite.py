"""The part ``tests``: pytest in a process of its own, started again after a test that ended it."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.jobs import end_of
from benchmarks.gpu.record import AS_WHOLE, FAILED, Record
from benchmarks.gpu.results_plugin import NOT_REACHED, RUNNING
from lightning_fsdp.harness.processes import run_command

_LEAST_S = 5.0


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
    command += ["--continue-on-collection-errors"]
    # Without plugins that this project's configuration is for, it has options that nobody knows.
    command += ["-o", "addopts=-ra", "-W", "ignore::pytest.PytestWarning"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        while (left_s := deadline - time.monotonic()) > _LEAST_S:
            failure = run_command(command, log=log, timeout_s=left_s)
            record = Record(record.path)
            broken = [name for name, r in record.results.items() if r["state"] == RUNNING]
            is_over = failure is not None and failure.kind == "timed out"
            state = NOT_REACHED if is_over else FAILED
            for name in broken:
                lines = end_of(log)
                how = "" if failure is None else failure.says
                record.put(name, state=state, says="\n".join([*lines[:1], how]), log=lines)
            if is_over or not broken:
                break
        else:
            return record
        now = len(record.sessions) - 1
        is_explained = any(
            result["state"] == FAILED and result["session"] == now
            for result in record.results.values()
        )
        if failure is not None and not is_over and not is_explained:
            record.put(AS_WHOLE, state=FAILED, says=failure.says, log=end_of(log))
    return record
