"""Versions, machine and commit, for a reader of results."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """Where and with what a result came about; JSON. What is not installed has no version."""
    packages = ("torch", "lightning", "transformers")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {name: version(name) for name in packages if is_installed(name)},
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "gpus": _gpus()},
    }


def describe(document: dict[str, Any]) -> str:
    """One sentence about where and how the figures came about; another, if Ctrl-C ended it."""
    machine, versions = document["machine"], document["versions"]
    gpus = "".join(f", {n} {name}" for name, n in Counter(machine.get("gpus", ())).items())
    not_made = document.get("interrupted")
    ending = f"\n\nInterrupted: {not_made}." if not_made is not None else ""
    return (
        f"{document['date'][:10]}, {machine['processor']}, {machine['cores']} cores{gpus}; torch "
        f"{versions['torch']}, Lightning {versions['lightning']}; `{document['command']}`"
        f"{ending}"
    )


def process_bytes(what: str) -> int | None:
    """Of this process, as Linux keeps it: ``VmRSS``, in memory now, or ``VmHWM``, the most so far.

    ``getrusage`` gives a figure that a process inherits from the one that started it. None where
    the system does not tell.
    """
    found = _linux_says("self/status", what)
    return None if found is None else 1024 * int(found.removesuffix("kB"))


def is_installed(name: str) -> bool:
    """Whether a package is there, by the name that it is installed by."""
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _commit() -> str | None:
    """Of the repository that this file is in, with ``-dirty`` behind it where files differ."""
    here = Path(__file__)
    if shutil.which("git") is None:
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    if not git("ls-files", here.name):  # installed, below somebody else's repository or none
        return None
    return git("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*") or None


def _gpus() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _processor() -> str:
    # Several generations may have one name: one multiplies bf16 50 times as fast as another.
    name = _linux_says("cpuinfo", "model name") or platform.processor() or platform.machine()
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def _linux_says(file: str, key: str) -> str | None:
    """What a file below ``/proc`` has behind a key; ``None`` where it has none, or is none."""
    path = Path("/proc", file)
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == key), None)
