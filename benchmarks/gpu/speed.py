"""The part ``speed``: cases one after another until the time is over; the rest is for another run.

What has not been tried comes first, then what failed; what did not fit stays as it is.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.cases import Case
from benchmarks.gpu.jobs import end_of, run_job
from benchmarks.gpu.measure import run_case
from benchmarks.gpu.record import DONE, FAILED, OUT_OF_MEMORY, Record

CASE_LIMIT_S = 150.0
_LEAST_S = 10.0  # in which a case can be measured


def run_speed(
    record: Record, cases: Sequence[Case], *, device: str, method: str, deadline: float
) -> None:
    """Measure what is not known yet.

    Args:
        record: Takes the results.
        cases: In order.
        device: ``cpu`` or ``cuda``.
        method: To start processes by.
        deadline: Of ``time.monotonic()``.
    """
    todo = [case for case in cases if record.state_of(case.name) not in (DONE, OUT_OF_MEMORY)]
    todo.sort(key=lambda case: record.state_of(case.name) is not None)
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "result.json", Path(folder) / "log.txt"
        for index, case in enumerate(todo):
            left_s = deadline - time.monotonic()
            if left_s < _LEAST_S:
                return
            for path in (out, log):
                path.unlink(missing_ok=True)
            limit_s, start = min(left_s, CASE_LIMIT_S), time.monotonic()
            failure = run_job(
                run_case, case, device, str(out), log=log, limit_s=limit_s, method=method
            )
            wall_s = time.monotonic() - start
            result = json.loads(out.read_text()) if out.exists() else {}
            if failure is not None and result.get("state") != DONE:
                if failure.kind == "timed out" and limit_s < CASE_LIMIT_S:
                    return  # the time is over for all of them, and not for this one
                result = {"state": FAILED, "says": failure.says, **result, "log": end_of(log)}
            record.put(case.name, wall_s=wall_s, **result)
            says = result.get("says", "")
            print(f"speed {index + 1}/{len(todo)}: {case.name}: {result['state']} {says}"[:160])
