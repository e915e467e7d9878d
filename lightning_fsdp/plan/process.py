"""What a process holds beside its tensors, where those are in the same memory: on CPU."""

from __future__ import annotations

import json
import subprocess
import sys

_LOOK = """
import json, lightning.pytorch, lightning_fsdp.strategies, transformers
from lightning_fsdp.harness.environment import process_bytes
print(json.dumps(process_bytes("VmRSS")))
"""


def bytes_at_start() -> int | None:
    """Resident bytes of a process that is about to train: Python, torch, Lightning, transformers.

    One is started and looked at. None where the system does not tell.
    """
    command = [sys.executable, "-c", _LOOK]
    looked = subprocess.run(command, capture_output=True, text=True, check=True)
    num_bytes: int | None = json.loads(looked.stdout)
    return num_bytes
