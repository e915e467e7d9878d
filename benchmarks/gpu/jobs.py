"""Functions in processes of their own, so that a crash or a full device costs one of them only.

The processes are forked from a server that has torch loaded and no CUDA context: importing torch
and transformers anew would take longer than most cases. Where a fork cannot use the device, because
something that was imported has touched the driver, processes start anew instead.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_fsdp.harness.environment import environment
from lightning_fsdp.harness.processes import Failure, held_back, last_line

_GRACE_S = 5.0
_FAULT = r"Fatal Python error: |Timeout \(\d"  # as faulthandler begins, maybe within a line
_MOST_LINES = 50  # of a log that are kept


def preload(modules: Sequence[str]) -> None:
    """What the server imports, if it is there; before the first job."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))


def run_job(
    function: Callable[..., object], *args: Any, log: Path, limit_s: float, method: str
) -> Failure | None:
    """Call a function in a process; nothing that this starts outlives the call.

    Args:
        function: At the top level of a module. What it found it writes to a file.
        *args: Picklable.
        log: File for everything that it prints.
        limit_s: Seconds after which it is ended.
        method: ``forkserver``, or ``spawn`` for a process that starts anew.

    Returns:
        Why it failed, or ``None``.
    """
    process = multiprocessing.get_context(method).Process(
        target=_run, args=(str(log), limit_s, function, args)
    )
    try:
        with held_back():
            process.start()
        process.join(limit_s)
        is_late = process.is_alive()
    finally:
        if process.pid is not None:  # else it could not be started
            with contextlib.suppress(ProcessLookupError):  # its session, with what it started
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
    if is_late:
        return Failure("timed out", f"took longer than {limit_s:.0f} s")
    if process.exitcode == 0:
        return None
    code = process.exitcode or 0
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return Failure("error", f"{how}: {last_line(log) if log.exists() else 'no output'}")


def end_of(log: Path) -> list[str]:
    """What a process printed last: from the fault that ended it, if Python saw one."""
    text = log.read_text(errors="replace") if log.exists() else ""
    fault = re.search(_FAULT, text)
    return (
        text[fault.start() :].splitlines()[:_MOST_LINES]
        if fault is not None
        else text.splitlines()[-_MOST_LINES:]
    )


def describe_session(kind: str) -> tuple[dict[str, Any], str]:
    """Ask a process what is there, which also shows how processes have to be started.

    Args:
        kind: Of the device: ``cpu`` or ``cuda``.

    Returns:
        JSON about the machine, what is installed, and the device; and the start method to use.

    Raises:
        RuntimeError: There is no such device, or it cannot be used.
    """
    says = ""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "session.json", Path(folder) / "log.txt"
        for method in ("forkserver", "spawn"):
            failure = run_job(_describe, kind, str(out), log=log, limit_s=120.0, method=method)
            if failure is None:
                return json.loads(out.read_text()), method
            says = failure.says
    raise RuntimeError(f"--device {kind}: expected a device that computes, got: {says}")


def _describe(kind: str, out: str) -> None:
    session = {**environment(), "device": _cuda() if kind == "cuda" else _cpu()}
    Path(out).write_text(json.dumps(session))


def _cpu() -> dict[str, Any]:
    return {"type": "cpu", "name": "cpu"}


def _cuda() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        sys.exit("no CUDA device that this torch can use. Use --device cpu")
    torch.ones(8, device="cuda").sum().item()
    properties = torch.cuda.get_device_properties(0)
    return {
        "type": "cuda",
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "cudnn": torch.backends.cudnn.version(),
    }


def _driver() -> str | None:
    """As the kernel module says it, which needs no tool; else as the tool says it."""
    path = Path("/proc/driver/nvidia/version")
    if path.exists():
        first = path.read_text().splitlines()[0]  # NVRM version: NVIDIA ... Module  580.95.05  ...
        return next((word for word in first.split() if re.fullmatch(r"[\d.]{5,}", word)), first)
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(ask, capture_output=True, text=True, timeout=30.0, check=True)
        return said.stdout.strip()
    return None


def _run(log: str, limit_s: float, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    os.setsid()
    with Path(log).open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    faulthandler.enable()
    # The parent kills long before; this one is for a parent that was itself killed.
    faulthandler.dump_traceback_later(limit_s + _GRACE_S, exit=True)
    function(*args)
