"""Where processes stand, as the kernel tells: for the message of a test whose processes hang.

What is slow only uses the processor, or waits for it; what hangs sleeps. Where an interpreter has
begun to end, Python has no stacks to show any more: then a debugger does, if there is one.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

_SAMPLE_S = 0.5
_DEBUGGER_S = 60.0  # in all


def where_they_stand(pids: Sequence[int]) -> str:
    """Of each process its parent, its use of the processor, its threads, and its native stacks."""
    before = {pid: _cpu_s(pid) for pid in pids}
    time.sleep(_SAMPLE_S)
    loads = " ".join(f"{load:.1f}" for load in os.getloadavg())
    told = [f"load average {loads} on {os.cpu_count()} processors"]
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            told += _process(pid, before[pid])
    deadline_s = time.monotonic() + _DEBUGGER_S
    return "\n".join([*told, *(_native_stacks(pid, deadline_s) for pid in pids)])


def _process(pid: int, cpu_s_before: float) -> list[str]:
    folder, cpu_s = Path("/proc", str(pid)), _cpu_s(pid)
    command = folder.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    used = f"{cpu_s:.2f} s of processor, {cpu_s - cpu_s_before:.2f} of the last {_SAMPLE_S:g}"
    told = [f"process {pid} (parent {_stat(folder)[1]}, {used}): {command}"]
    for task in sorted(folder.joinpath("task").iterdir()):
        with contextlib.suppress(OSError):
            name = task.joinpath("comm").read_text().strip()
            told.append(
                f"  thread {task.name} {name}: state {_stat(task)[0]}, "
                f"in {_read(task / 'wchan') or '?'}, call {_read(task / 'syscall') or '?'}"
            )
    return told


def _stat(folder: Path) -> list[str]:
    """From the state on; the name before it may have any character."""
    return folder.joinpath("stat").read_text().rpartition(")")[2].split()


def _cpu_s(pid: int) -> float:
    with contextlib.suppress(OSError):
        user, system = _stat(Path("/proc", str(pid)))[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):  # some kernels keep these to themselves
        return path.read_text().strip()
    return ""


def _native_stacks(pid: int, deadline_s: float) -> str:
    if (gdb := shutil.which("gdb")) is None:
        return f"no gdb to show the native stacks of process {pid}"
    command = [gdb, "-nx", "-batch", "-p", str(pid), "-ex", "thread apply all backtrace 40"]
    limit_s = max(0.0, deadline_s - time.monotonic())
    try:
        shown = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"gdb did not show the native stacks of process {pid} in time"
    lines = [line for line in shown.stdout.splitlines() if line.startswith(("Thread", "#"))]
    return "\n".join([f"native stacks of process {pid}:", *lines])
