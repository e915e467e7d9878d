"""Memory that tensors have freed and the C library cannot use again goes back, seldom."""

import subprocess
import sys

import pytest

from lightning_fsdp.core import host_memory

MIB = 2**20
# Every second of many blocks is freed: holes that nothing larger fits into.
HOLES = """
import torch
from lightning_fsdp.core.host_memory import keep_freed_memory, return_unused_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

keep_freed_memory()
return_unused_memory({most})
blocks = [torch.ones(2**18) for _ in range(256)]  # of 1 MiB
del blocks[::2]
before = resident()
return_unused_memory({most})
print(before - resident(), float(sum(block.sum() for block in blocks)))
"""


@pytest.mark.skipif(host_memory._glibc() is None, reason="of glibc")
@pytest.mark.parametrize(("most", "returned"), [(64 * MIB, True), (512 * MIB, False)])
def test_what_lies_unused_is_returned_once_the_process_has_grown(most, returned):
    done = subprocess.run(
        [sys.executable, "-c", HOLES.format(most=most)], capture_output=True, text=True, check=True
    )
    freed, total = done.stdout.split()
    assert float(total) == 128 * 2**18, "what is in use stays"
    assert (float(freed) > 100 * MIB) == returned
