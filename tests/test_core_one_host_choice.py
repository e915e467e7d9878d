"""Ways between ranks of one host: refused, chosen, and nothing left behind."""

import contextlib
import gc
import logging
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_fsdp import fully_shard, shard_model
from lightning_fsdp.core import torch_internals
from lightning_fsdp.core.engine.hooks import hooks_of
from lightning_fsdp.core.ranks import lines, one_host, process_memory
from lightning_fsdp.core.ranks.groups import communicator_of, way_of
from tests.support import ranks
from tests.support.events import wait_until
from tests.support.models import TASKS
from tests.support.one_exchange import train_on_rank
from tests.support.one_host import (
    AT_ONCE_S,
    gather_on,
    new_mesh,
)
from tests.support.parity import OPTIMIZERS, assert_traces_match, batches_for
from tests.support.ranks import PLAIN, run_on_ranks

pytestmark = pytest.mark.skipif(
    ranks.active_transport == ranks.PAIRS, reason="what is tested is switched off"
)


# --- where it is not permitted, and what is left behind ---


def refused_on_one_rank(rank, world_size, road):
    log = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())
    logging.getLogger(one_host.__name__).addHandler(handler)
    logging.getLogger(one_host.__name__).setLevel(logging.INFO)
    if road == "refused" and rank == 1:

        def refuse(*args):
            raise PermissionError(1, "Operation not permitted")

        process_memory.Stretch.read = refuse
    if road == "another host":
        lines.this_host = lambda: (str(rank), "pid:[1]", "net:[1]")
    if road == "no /proc" and rank == 1:
        process_memory.Path.readlink = lambda path: (_ for _ in ()).throw(FileNotFoundError(path))
    if road == "short pipes" and rank == 1:
        lines._PIPE_BYTES = 2**30
    if road == "another /proc" and rank == 1:  # which has other processes under these numbers
        lines.Path = lambda path: SimpleNamespace(readlink=lambda: Path("1"))
    one_host.Lines, leaked = _noting_descriptors(one_host.Lines)
    gather_on(dist.group.WORLD).wait()
    return way_of(communicator_of(dist.group.WORLD)) == "direct", log, leaked, len(_threads())


def _noting_descriptors(function):
    """The same, and a list to which a call adds what it leaves open."""
    leaked = []

    def noting(*args):
        before = _descriptors()
        try:
            return function(*args)
        finally:
            leaked.extend(_descriptors() - before)

    return noting, leaked


@pytest.mark.parametrize(
    ("road", "words"),
    [
        ("memory", "read each other's memory"),
        ("refused", "in pairs: rank 1: [Errno 1] Operation not permitted"),
        ("another host", "in pairs: they are on several hosts"),
        ("no /proc", "in pairs: rank 1:"),
        ("another /proc", "in pairs: rank 0: [Errno"),
        ("short pipes", "in pairs: rank 1: pipes are short"),
    ],
)
def test_all_ranks_take_one_road_and_one_of_them_says_which(road, words):
    results = run_on_ranks(refused_on_one_rank, 3, road)
    assert {reads_memory for reads_memory, *_ in results} == {road == "memory"}
    (line,) = [line for _, log, *_ in results for line in log]
    assert line.startswith("ranks [0, 1, 2] of 3 ")
    assert words in line
    for *_, leaked, num_threads in results:
        assert num_threads == (road == "memory")
        assert road == "memory" or not leaked


# --- what the user chooses ---


def layer():
    return torch.nn.Linear(6, 5)


def way(model):
    return way_of(hooks_of(model).schedule.communicator)


def choose_and_train(rank, world_size, shape, state_over):
    mesh, traces = new_mesh(*shape), []
    for comm in ("pairs", "direct", "auto"):
        task = TASKS["mlp"]
        torch.manual_seed(0)
        model = shard_model(task.build(), mesh=mesh, comm=comm, state_over=state_over)
        assert way(model) == ("pairs" if comm == "pairs" else "direct")
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        batches = batches_for("mlp", world_size)
        traces.append(train_on_rank(model, batches, task.loss, optimizer, rank))
    for trace in traces[1:]:
        assert_traces_match(trace, traces[0], atol=0, what="comm")


@pytest.mark.parametrize(
    ("shape", "state_over"), [((2,), "replica"), ((2, 2), "replica"), ((2, 2), "all")]
)
def test_whichever_way_data_moves_the_bits_are_the_same(shape, state_over):
    run_on_ranks(choose_and_train, torch.Size(shape).numel(), shape, state_over)


def choose(rank, world_size):
    mesh = new_mesh(2)
    model = torch.nn.Sequential(layer(), torch.nn.Linear(5, 4))
    fully_shard(model[0], mesh=mesh, comm="pairs")  # each call has its own
    fully_shard(model, mesh=mesh, comm="direct")
    model(torch.ones(2, 6)).sum().backward()
    untouched = layer()
    with pytest.raises(ValueError, match=r"expected one of \('auto', .* for comm, got 'memory'"):
        fully_shard(untouched, mesh=mesh, comm="memory")
    fully_shard(layer(), mesh=(mesh := new_mesh(2, timeout_s=AT_ONCE_S)))
    with pytest.raises(RuntimeError, match=r"ranks disagree .*(?s:.)*comm='pairs'"):
        fully_shard(untouched, mesh=mesh, comm=("pairs", "auto")[rank])
    assert type(untouched.weight) is torch.nn.Parameter


def test_the_user_chooses_how_data_moves():
    run_on_ranks(choose, 2)


def open_a_group_for_several_devices(rank, world_size, backend, folder):
    """As scripts do that let torch choose a backend for each type of device."""
    dist.init_process_group(
        backend, init_method=f"file://{folder}/ranks", rank=rank, world_size=world_size
    )
    models = [fully_shard(layer()), fully_shard(layer(), mesh=new_mesh(2))]
    mesh = init_device_mesh("cpu", (1, 2))
    models.append(fully_shard(layer(), mesh=mesh, comm="direct"))
    models[0](torch.ones(2, 6)).sum().backward()
    return [way(model) for model in models]


@pytest.mark.parametrize("backend", [None, "cpu:gloo"])
def test_gloo_is_found_where_torch_or_the_user_chooses_a_backend_per_device(backend, tmp_path):
    ways = run_on_ranks(open_a_group_for_several_devices, 2, backend, tmp_path, backend=None)
    assert ways == [["direct"] * 3] * 2


@pytest.mark.parametrize(
    ("config", "device_type"),
    [("cpu:gloo,cuda:nccl", "cuda"), ("cuda:nccl", "cuda"), ("cpu:gloo,cuda:gloo", "cpu")],
)
def test_a_group_is_for_cuda_where_it_has_nccl(config, device_type, monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert torch_internals.device_type_of(None) == device_type
    assert torch_internals.backend_of(None, "cpu") == ("none" if config == "cuda:nccl" else "gloo")


def choose_where_there_is_no_choice(rank, world_size):
    for comm in ("pairs", "direct"):
        with pytest.raises(ValueError, match=f"expected gloo and at most 8 .*{comm}.*'auto'"):
            fully_shard(layer(), comm=comm)
    assert way(fully_shard(layer())) == PLAIN


def test_other_backends_have_their_own_collectives_alone():
    run_on_ranks(choose_where_there_is_no_choice, 2, backend=PLAIN)


def choose_what_one_rank_is_refused(rank, world_size, shape, state_over):
    if rank == 3:

        def refuse(*args):
            raise PermissionError(1, "Operation not permitted")

        process_memory.Stretch.read = refuse
    mesh, model = new_mesh(*shape), layer()
    with pytest.raises(
        RuntimeError, match=r"comm='direct'(?s:.)*rank \d: \[Errno 1\] Operation not"
    ):
        fully_shard(model, mesh=mesh, comm="direct", state_over=state_over)
    assert type(model.weight) is torch.nn.Parameter
    fully_shard(model, mesh=mesh, state_over=state_over)(torch.ones(2, 6)).sum().backward()
    return way(model)


@pytest.mark.parametrize(
    ("shape", "state_over", "ways"),
    [
        ((4,), "replica", ["pairs"] * 4),
        ((2, 2), "replica", ["direct"] * 2 + ["pairs"] * 2),
        ((2, 2), "all", ["direct"] * 2 + ["pairs"] * 2),
    ],
)
def test_who_insists_on_memory_that_may_not_be_read_is_told_on_all_ranks(shape, state_over, ways):
    assert run_on_ranks(choose_what_one_rank_is_refused, 4, shape, state_over) == ways


def _descriptors():
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(f"{path.name} {path.readlink()}")
    return found


def _threads():
    return [thread for thread in threading.enumerate() if thread.name == "lines"]


def make_and_destroy_groups(rank, world_size):
    gather_on(dist.group.WORLD).wait()  # it is there until the process ends
    one_host.Lines, opened = _noting_descriptors(one_host.Lines)
    groups = [dist.new_group() for _ in range(3)]
    for number, group in enumerate(groups, start=2):
        gather_on(group).wait()
        assert len(_threads()) == number
    # A pipe and the process of each rank, and the other end of its own pipe, once more to write to.
    assert len(opened) == 3 * (2 * world_size + 2)
    assert set(opened) <= _descriptors()
    dist.barrier()
    while groups:
        group = groups.pop()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        wait_until(lambda: len(_threads()) == 1 + len(groups))
    assert not set(opened) & _descriptors()


def test_nothing_is_left_of_a_group_that_was_destroyed():
    run_on_ranks(make_and_destroy_groups, 3)


def destroy_a_group_within_its_lines(rank, world_size, lock):
    """As the garbage collector does where it finds the group while a method holds a lock."""
    group = dist.new_group(timeout=timedelta(seconds=120))
    gather_on(group).wait()
    of_group = communicator_of(group).lines
    with getattr(of_group, lock) if rank == 0 else contextlib.nullcontext():
        dist.barrier()  # rank 1 posts after it
        pending = gather_on(group)
        dist.barrier()
        time.sleep(0.3)  # the thread of rank 0 is to read, and waits for the lock
        if rank == 0:
            dist.destroy_process_group(group)
            del group
    with pytest.raises(RuntimeError, match=f"expected rank {1 - rank} to take part"):
        pending.wait()
    if rank == 0:
        of_group._thread.join(AT_ONCE_S)
        assert not of_group._thread.is_alive()


@pytest.mark.parametrize("lock", ["_changed", "_reading"])
def test_a_group_may_be_destroyed_where_its_lines_hold_a_lock(lock):
    run_on_ranks(destroy_a_group_within_its_lines, 2, lock, timeout_s=20.0)
