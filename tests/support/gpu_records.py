"""A session of measurements on a GPU, and where its results are."""

import json
import time
from pathlib import Path

from benchmarks.gpu.record import DONE, Record

ROOT = Path(__file__).parents[2]

SESSION = {
    "device": {"type": "cuda", "name": "NVIDIA H200", "driver": "580"},
    "versions": {"torch": "2.11.0"},
    "commit": "0123456789abcdef",
    "date": "2026-11-22T00:00:00+00:00",
    "peak_tflops": 989.0,
    "missing": [],
}


def results_in(folder, part):
    return json.loads((folder / f"{part}.json").read_text())["results"]


def begun(path):
    record = Record(path)
    record.begin(SESSION)
    return record


def soon(seconds=200.0):
    return time.monotonic() + seconds


CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--device")
"""


def measured(step_s, **more):
    return {
        "state": DONE, "step_s": [step_s] * 20, "optimizer_s": [step_s / 10] * 20,
        "host_s": [step_s / 2] * 5, "batch": 8, "seq_len": 1000, "flops_per_token": 1e10,
        "peak_allocated_bytes": 123 * 2**30, "peak_reserved_bytes": 130 * 2**30,
        "losses": [2.0, 1.0], "exposed_s": 0.1234, "captured_optimizer_s": [0.001] * 20, **more,
    }  # fmt: skip
