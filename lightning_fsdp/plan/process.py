"""What a process holds beside its tensors, where those are in the same memory: on CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_MODULES = "lightning.pytorch, lightning_fsdp.strategies, torch.optim, transformers"
_LOOK = f"import {_MODULES}; print(open({str(_STATUS)!r}).read())"


def bytes_at_start() -> int | None:
    """Resident bytes of a process that is about to train: Python, torch, Lightning, transformers.

    One is started and looked at. None where the system does not tell (it has no ``/proc``).
    """
    if not _STATUS.exists():
        return None
    looked = subprocess.run(
        [sys.executable, "-c", _LOOK], capture_output=True, text=True, check=True
    )
    for line in looked.stdout.splitlines():
        if line.startswith("VmRSS:"):
            return 1024 * int(line.split()[1])
    return None
