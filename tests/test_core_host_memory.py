"""What stays with a process of memory that tensors have freed, and for how long."""

import subprocess
import sys

import pytest

import lightning_fsdp
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


# Two of these in turn: in the heap, neither fits into the hole that the other leaves.
LARGE = """
import torch
from lightning_fsdp.core import host_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

{call}
host_memory.keep_freed_memory()
torch.ones(2**24)
before, most, kept = resident(), 0, []
for step in range(8):
    whole = torch.ones((40 + 8 * step) * 2**18)
    kept.append(torch.ones(2**18))
    most = max(most, resident() - before)
    del whole
print(most, resident() - before)
"""


@pytest.mark.skipif(host_memory._glibc() is None, reason="of glibc")
def test_large_blocks_leave_no_holes():
    done = subprocess.run(
        [sys.executable, "-c", LARGE.format(call="")], capture_output=True, text=True, check=True
    )
    most, left = map(int, done.stdout.split())
    assert 96 * MIB <= most <= 112 * MIB  # the largest, beside what is kept
    assert left <= 12 * MIB


@pytest.mark.skipif(host_memory._glibc() is None, reason="of glibc")
def test_the_c_library_is_left_alone_where_that_is_asked_for(monkeypatch):
    class Libc:
        def __getattr__(self, name):
            raise AssertionError(f"{name} was called")

    monkeypatch.setattr(host_memory, "_glibc", Libc)
    monkeypatch.setattr(host_memory, "_is_left_alone", False)
    with pytest.raises(AssertionError, match="mallopt was called"):
        host_memory.keep_freed_memory()
    lightning_fsdp.leave_host_memory_alone()
    host_memory.keep_freed_memory()
    host_memory.return_unused_memory(0)
    host_memory.return_unused_memory(0)
