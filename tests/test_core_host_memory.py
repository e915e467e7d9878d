"""What stays with a process of memory that tensors have freed, and for how long."""

import resource
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest
import torch

import lightning_fsdp
from benchmarks.core_step import VOCABULARY, build_model, train_one_step
from lightning_fsdp import ZERO2, ZERO3, libc, shard_model
from lightning_fsdp.core import host_memory
from lightning_fsdp.core.engine.hooks import hooks_of
from lightning_fsdp.core.sharded_module import units_in
from tests.support.models import causal_lm, lm_loss, mlp, mlp_batch, mlp_loss, token_batch
from tests.support.ranks import run_on_ranks

MIB = 2**20
# Each line of what it prints is what one look found, in a fork of one new process that has torch.
LOOKS = """
import os, sys
import torch
from lightning_fsdp import libc
from lightning_fsdp.core.engine.hooks import hooks_of
from lightning_fsdp.core.engine.home import FlatBuffer
from lightning_fsdp.core import host_memory
from lightning_fsdp.core.sharded_module import units_in

torch.set_num_threads(1)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def holes(slack, written):
    # Every second of many blocks is freed: holes that nothing larger fits into.
    libc.keep_freed_memory()
    libc.return_unused_memory(slack=0)
    blocks = [torch.ones(2**18) for _ in range(256)]  # of 1 MiB
    del blocks[::2]
    before = resident()
    libc.return_unused_memory(written, slack=slack)
    return before - resident(), float(sum(block.sum() for block in blocks))

def large():
    # Two of these in turn: in the heap, neither fits into the hole that the other leaves.
    libc.keep_freed_memory()
    torch.ones(2**24)
    before, most, kept = resident(), 0, []
    for step in range(8):
        whole = torch.ones((40 + 8 * step) * 2**18)
        kept.append(torch.ones(2**18))
        most = max(most, resident() - before)
        del whole
    return most, resident() - before

def huge_bytes():
    rows = [row.split() for row in open("/proc/self/smaps")]
    return sum(1024 * int(row[1]) for row in rows if row[0] == "AnonHugePages:")

def huge(is_left_alone, numel):
    if is_left_alone:
        libc.leave_host_memory_alone()
    home = host_memory.MappedHome(torch.device("cpu"))
    flat = FlatBuffer(numel, torch.float32, home)
    before, seen = huge_bytes(), []
    for _ in range(2):
        flat.free()
        seen.append(huge_bytes() - before)
        flat.allocate()
        flat.flat.fill_(1.0)
        seen.append(huge_bytes() - before)
    return seen

for name, *case in {looks}:
    if os.fork() == 0:
        print(*globals()[name](*case), flush=True)
        sys.exit()
    assert os.wait()[1] == 0
"""
HOLES = {  # slack, written: is it returned
    (64 * MIB, None): True,
    (512 * MIB, None): False,
    (64 * MIB, libc.LOOK_AFTER_BYTES): True,
    (64 * MIB, 1): False,
}
HUGE = {  # is the memory left alone, elements: are huge pages asked for
    (False, 2**24): True,
    (False, 2**20): False,  # in the heap, with other things
    (True, 2**24): False,
}


MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.fixture(scope="module")
def found():
    """What each look found."""
    looks = [("holes", *case) for case in HOLES] + [("huge", *case) for case in HUGE] + [("large",)]
    done = subprocess.run(
        [sys.executable, "-c", LOOKS.replace("{looks}", str(looks))],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = [[float(word) for word in line.split()] for line in done.stdout.splitlines()]
    return dict(zip(looks, lines, strict=True))


@pytest.mark.skipif(libc._glibc() is None, reason="of glibc")
def test_what_lies_unused_is_returned_once_the_process_holds_too_much(found):
    for case, is_returned in HOLES.items():
        freed, total = found["holes", *case]
        assert total == 128 * 2**18, f"{case}: what is in use stays"
        assert (freed > 100 * MIB) == is_returned, case


@pytest.mark.skipif(libc._glibc() is None, reason="of glibc")
def test_large_blocks_leave_no_holes(found):
    most, left = found[("large",)]
    assert 96 * MIB <= most <= 112 * MIB  # the largest, beside what is kept
    assert left <= 12 * MIB


@pytest.mark.skipif(libc._glibc() is None, reason="of glibc")
@pytest.mark.skipif(
    not MODE.exists() or "[madvise]" not in MODE.read_text(),
    reason="of kernels that give huge pages to who asks for them",
)
def test_large_whole_copies_are_backed_by_huge_pages(found):
    for case, is_asked in HUGE.items():
        freed, whole, freed_again, whole_again = found["huge", *case]
        assert freed == freed_again == 0, case
        numel = case[1]
        least, most = (4 * numel - 2 * libc.HUGE_PAGE_BYTES, inf) if is_asked else (0, 0)
        for seen in (whole, whole_again):
            assert least <= seen <= most, case


def _written_between_looks(rank, world_size):
    written = []
    libc.return_unused_memory = lambda num_bytes=None: written.append(num_bytes)
    model = shard_model(mlp(), ZERO2)
    with model.no_sync():
        mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    kept, written[:] = sum(written), []
    mlp_loss(model, mlp_batch(0, 1, rank)).backward()
    flat_params = hooks_of(model).schedule.flat_params
    wanted = sum(4 * flat_param.layout.numel for flat_param in flat_params)
    return kept, sum(written), wanted


def test_the_process_is_looked_at_in_a_backward_that_does_not_reduce_too():
    for kept, reduced, whole in run_on_ranks(_written_between_looks, 2):
        assert kept == whole  # a gradient of everything stays
        assert reduced == whole / 2  # the shards


def _room_before_gradients(rank, world_size):
    rooms = []
    libc.SLACK_BYTES = 0
    libc.return_unused_memory = lambda written=None, slack=0: rooms.append(-slack)
    found = {}
    for plan in (ZERO2, ZERO3):
        model = shard_model(causal_lm(), plan)
        sizes = {
            unit.name: sum(4 * flat_param.layout.numel for flat_param in unit.flat_params)
            for unit in units_in(model)
        }
        loss = lm_loss(model, token_batch(0, 0, rank))
        rooms.clear()
        loss.backward()
        found[plan] = [room for room in rooms if room], sizes
    return found


def test_there_is_room_before_the_gradients_of_a_large_unit_come():
    """Of its whole copy, too, where that was freed."""
    for found in run_on_ranks(_room_before_gradients, 2):
        rooms, sizes = found[ZERO2]
        assert sorted(set(rooms)) == sorted(set(sizes.values()))
        rooms, sizes = found[ZERO3]
        block = sizes["blocks.1"]
        assert rooms.count(2 * block) == 3, "a block is gathered again for its backward"
        assert block not in rooms


def _page_faults_of_steps(rank, world_size):
    model = shard_model(build_model(), ZERO3)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    so_far = []
    for _ in range(10):
        train_one_step(model, optimizer, torch.randint(VOCABULARY, (1, 32)))
        so_far.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return (so_far[-1] - so_far[5]) / 4


@pytest.mark.skipif(libc._glibc() is None, reason="of glibc")
def test_a_step_needs_no_pages_that_the_step_before_gave_back():
    """At 23 M parameters: all of the heap are some 150,000 pages."""
    assert all(faults < 5_000 for faults in run_on_ranks(_page_faults_of_steps, 2))


@pytest.mark.skipif(libc._glibc() is None, reason="of glibc")
def test_the_c_library_is_left_alone_where_that_is_asked_for(monkeypatch):
    class Libc:
        def __getattr__(self, name):
            raise AssertionError(f"{name} was called")

    monkeypatch.setattr(libc, "_glibc", Libc)
    monkeypatch.setattr(libc, "_is_left_alone", False)
    monkeypatch.setattr(libc, "_keeps_freed_memory", False)
    with pytest.raises(AssertionError, match="mallopt was called"):
        libc.keep_freed_memory()
    home = object.__new__(host_memory.MappedHome)
    home.compute_device = torch.device("cpu")
    with pytest.raises(AssertionError, match="mallopt was called"):
        home.empty(libc.OWN_BYTES, torch.uint8)
    lightning_fsdp.leave_host_memory_alone()
    home = host_memory.MappedHome(torch.device("cpu"))
    home.empty(libc.OWN_BYTES, torch.uint8)
    libc.return_unused_memory(slack=0)
