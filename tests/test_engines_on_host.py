"""Whole values lie in a host's memory once, until a rank writes to its own."""

import errno
import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_fsdp import MixedPrecisionPolicy
from lightning_fsdp.engines import base, on_host
from lightning_fsdp.engines.on_host import FILE_NAME, one_per_host
from tests.support import ranks
from tests.support.cases import each_on_ranks
from tests.support.engine_runs import ENGINES
from tests.support.own_memory import MIB, bytes_in_files, in_files, needs_proc
from tests.support.ranks import assert_errors, errors_on_ranks, run_on_ranks

pytestmark = needs_proc

SHAPES_AND_DTYPES = [
    ((), torch.float32),
    ((3, 5), torch.bfloat16),
    ((0, 4), torch.float32),
    ((7,), torch.float8_e4m3fn),
    ((300,), torch.float64),  # more than a file is made to hold
    ((5, 2), torch.complex64),
    ((60,), torch.float32),
    ((9,), torch.bool),
    ((2, 3, 4), torch.int64),
]


def make_values():
    generator = torch.Generator().manual_seed(0)
    for number, (shape, dtype) in enumerate(SHAPES_AND_DTYPES):
        yield number, (100 * torch.rand(shape, generator=generator)).to(dtype)
    yield "turned", torch.arange(6.0).view(2, 3).t()


def assert_values(values):
    expected = dict(make_values())
    assert list(values) == list(expected)
    for key, value in values.items():
        assert value.is_contiguous()
        assert value.dtype == expected[key].dtype
        assert torch.equal(value.float(), expected[key].float()), key


def _write_through_descriptors():
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    for link in links:
        if FILE_NAME in str(link.readlink()):
            with link.open("r+b") as file:
                file.write(b"x")


def _small_files(rank, world_size):
    on_host.WINDOW_BYTES = 512
    files = len(list(Path("/proc/self/fd").iterdir()))
    values = one_per_host(make_values())
    assert_values(values)
    assert all(v.data_ptr() % 64 == 0 for v in values.values())
    with pytest.raises(PermissionError):
        _write_through_descriptors()
    found = in_files([v for v in values.values() if v.numel()])
    del values
    gc.collect()
    assert FILE_NAME not in Path("/proc/self/maps").read_text()
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    return all(found)


def test_values_of_every_kind_are_right_in_files_that_go_with_them():
    assert run_on_ranks(_small_files, 2) == [True, True]


def _without_elements(rank, world_size):
    empty, three = torch.empty(0, 3), torch.arange(3.0)
    for given in ([empty, three], [three, empty], [three, empty, three], [empty]):
        values = one_per_host(enumerate(given))
        assert [value.tolist() for value in values.values()] == [each.tolist() for each in given]
        assert all(values[i].shape == each.shape for i, each in enumerate(given))


def test_values_without_elements_take_no_memory():
    run_on_ranks(_without_elements, 2)


def _write_to_one(rank, world_size):
    whole = torch.arange(16 * MIB // 4, dtype=torch.float32).view(4, -1)
    value = one_per_host([("a", whole.clone())])["a"]
    assert torch.equal(value, whole)  # reads every page
    dist.barrier()
    shares = bytes_in_files("Pss")
    base._broadcast_in_place(value, value.device)  # writes where ranks differ
    own_before = bytes_in_files("Anonymous")
    dist.barrier()
    if rank == 1:
        value[0] = -1.0
    dist.barrier()
    assert (value[0, 5] == (-1.0 if rank == 1 else 5.0)).item()
    own = bytes_in_files("Anonymous")
    base._broadcast_in_place(value, value.device)
    assert torch.equal(value, whole)
    return shares, own_before, own


def test_a_host_has_one_copy_and_a_write_is_seen_by_nobody_else():
    found = run_on_ranks(_write_to_one, 2)
    assert sum(share for share, _, _ in found) < 17 * MIB
    assert max(before for _, before, _ in found) < MIB / 4
    assert found[0][2] < MIB / 4
    assert 4 * MIB <= found[1][2] < 5 * MIB


def _expanded(rank, world_size):
    base._broadcast_in_place(torch.full((1,), float(rank)).expand(4), torch.device("cpu"))


def test_what_cannot_be_written_to_is_an_error_on_every_rank():
    errors = errors_on_ranks(_expanded, 2, timeout_s=30)
    assert_errors(errors, "RuntimeError", "refers to a single memory location")


def _from_rank_0(rank, world_size):
    with torch.inference_mode():
        made_in_evaluation = torch.full((3,), float(rank))
    turned = torch.full((2, 3), float(rank)).t()
    narrow = torch.full((4,), float(rank), dtype=torch.float8_e4m3fn)
    base._BROADCAST_BYTES = 8
    for tensor in (made_in_evaluation, turned, narrow):
        base._broadcast_in_place(tensor, torch.device("cpu"))
        assert not tensor.float().any()


def test_what_differs_becomes_that_of_rank_0():
    run_on_ranks(_from_rank_0, 2)


def _refuse(*args, **kwargs):
    raise PermissionError(errno.EPERM, "Operation not permitted")


def _without(rank, world_size, what):
    os_open = os.open
    if what == "no files":
        on_host.os.memfd_create = _refuse
    if what == "no files on one rank" and rank == 1:
        on_host.os.memfd_create = _refuse
    if what == "no way to them" and rank == 1:
        on_host.os.open = _refuse
    if what == "other processes under their numbers" and rank == 1:
        on_host.os.open = lambda path, *flags: os_open("/proc/self/status", *flags)
    if what == "other hosts":
        on_host.this_host = lambda: (str(rank),)
    if what == "no Linux" and rank == 0:
        on_host.this_host = _refuse
    values = one_per_host(make_values())
    assert_values(values)
    return any(in_files(values.values()))


@pytest.mark.parametrize(
    "what",
    [
        "no files",
        "no files on one rank",
        "no way to them",
        "other processes under their numbers",
        "other hosts",
        "no Linux",
    ],
)
def test_where_it_is_refused_each_rank_keeps_a_copy(what):
    assert run_on_ranks(_without, 2, what) == [False, False]


def _two_hosts(rank, world_size):
    on_host.this_host = lambda: (str(rank // 2),)
    values = one_per_host(make_values())
    assert_values(values)
    return all(in_files([v for v in values.values() if v.numel()]))


def test_each_host_has_its_own():
    assert run_on_ranks(_two_hosts, 3) == [True, True, False]


def _no_room(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


class _Copying:
    """Stands for a tensor of a device whose copy does not fit."""

    def cpu(self):
        raise MemoryError("no room for a copy")


def _fails(rank, world_size, what):
    failing = {"write": 0, "map": 1, "copy": 1}[what]
    wholes = list(make_values())
    if what == "copy":
        on_host.os.memfd_create = _refuse
        if rank == failing:
            wholes[3] = (3, _Copying())
    if rank == failing and what != "copy":
        setattr(on_host, f"_{what}", _no_room)
    one_per_host(wholes)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("write", ("rank 0", "OSError", "No space left")),
        ("map", ("rank 1", "OSError", "No space left")),
        ("copy", ("rank 1", "MemoryError: no room for a copy")),
    ],
)
def test_what_fails_on_one_rank_is_an_error_on_all(what, words):
    ranks.assert_errors(errors_on_ranks(_fails, 2, what), "RuntimeError", *words)


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.lstm = nn.LSTM(4, 4)


def _again(rank, world_size, kind):
    torch.manual_seed(0)
    module = _Tied()
    expected = {name: p.detach().clone() for name, p in module.named_parameters()}
    objects = list(module.parameters())
    engine = ENGINES[kind](zero_stage=3, units=["Linear", "LSTM"], cpu_offload=False)
    engine.shard(module, device=torch.device("cpu"), precision=MixedPrecisionPolicy())
    write, on_host._write = on_host._write, _no_room
    with pytest.raises(RuntimeError, match=r"rank 0: OSError.*No space left"):
        engine.make_whole(module)
    on_host._write = write
    engine.make_whole(module)
    assert all(p is before for p, before in zip(module.parameters(), objects, strict=True))
    assert module.second.weight is module.first.weight
    assert all(in_files(module.parameters()))
    torch.testing.assert_close(dict(module.named_parameters()), expected, rtol=0, atol=0)
    assert module.lstm(torch.ones(1, 1, 4))[0].requires_grad  # which holds its weights twice


def test_a_module_whose_values_did_not_fit_is_made_whole_later():
    each_on_ranks(_again, 2, ["scratch", "fsdp1", "fsdp2"])
