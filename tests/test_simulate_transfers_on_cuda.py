"""The simulated network on CUDA: its order and its times on a device that keeps only a clock.

What needs a device itself comes last, and is skipped without one.
"""

import gc
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_fsdp import ZERO3, shard_model
from lightning_fsdp.core.torch_internals import all_gather_single
from lightning_fsdp.simulate import transfers_on_cuda
from lightning_fsdp.simulate.groups import find_usage, simulated
from lightning_fsdp.simulate.network import Network
from lightning_fsdp.simulate.transfer import Transfer, Usage
from lightning_fsdp.simulate.transfers_on_cuda import CudaTransfers, Pace

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NETWORK = Network(world_size=2, bandwidth_gb_s=1e-3, latency_us=0.0)  # 1 s per MB that is sent
NBYTES = 2 * 10**6  # 1 s
PACE = Pace(cycles_per_s=1000.0, bytes_per_s=10 * NBYTES)  # a copy takes 0.1 s


class Clock:
    """What ``torch.cuda`` offers, for a device on which only time passes."""

    def __init__(self):
        self.main = self.current = self.Stream("device")
        self.copy_s = 0.1

    class Stream:
        def __init__(self, device, priority=0):
            self.now_s = 0.0

        def wait_stream(self, other):
            self.now_s = max(self.now_s, other.now_s)

        def wait_event(self, event):
            self.now_s = max(self.now_s, event.at_s)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            self.at_s = stream.now_s

        def elapsed_time(self, other):
            return 1e3 * (other.at_s - self.at_s)

        def query(self):
            return True

    def current_stream(self, device):
        return self.current

    def default_stream(self, device):
        return self.main

    def synchronize(self, device):
        pass

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def work(self, seconds):
        self.current.now_s += seconds

    def copy(self):
        self.work(self.copy_s)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(transfers_on_cuda, "cuda", clock)
    spin = SimpleNamespace(spin=lambda cycles: clock.work(cycles / PACE.cycles_per_s))
    monkeypatch.setattr(transfers_on_cuda, "torch_internals", spin)
    return clock


@pytest.fixture
def transfers(clock):
    return CudaTransfers(Usage(), torch.device("cuda", 0), PACE)


def start(transfers, *transfer):
    transfer = Transfer(*transfer)
    return transfers.start(transfer, transfers.usage.count(transfer, NETWORK))


def gather(transfers, clock):
    return start(transfers, "all_gather", NBYTES, 2, clock.copy, [])


def test_a_transfer_takes_its_modelled_time_with_the_copy_in_it(transfers, clock):
    clock.work(0.5)
    gather(transfers, clock).wait()
    assert clock.main.now_s == pytest.approx(1.5)
    transfers.settle()
    assert transfers.usage.waited_s == pytest.approx(1.0)
    assert transfers.usage.busy_s == pytest.approx(1.0)
    assert transfers.usage.late_s == pytest.approx(0.0)
    assert transfers.usage.calls == {"all_gather": 1}


@pytest.mark.parametrize(
    ("kind", "copy_s"), [("reduce_scatter", 0.05), ("broadcast", None), ("all_reduce", None)]
)
def test_a_transfer_takes_its_modelled_time_when_little_is_copied(transfers, clock, kind, copy_s):
    clock.copy_s = copy_s
    move = None if copy_s is None else clock.copy
    start(transfers, kind, NBYTES, 2, move, []).wait()
    assert clock.main.now_s == pytest.approx(NETWORK.cost(kind, NBYTES, 2).duration_s)


def test_what_computes_meanwhile_is_not_waited_for(transfers, clock):
    work = gather(transfers, clock)
    clock.work(0.75)
    work.wait()
    assert clock.main.now_s == pytest.approx(1.0)
    transfers.settle()
    assert transfers.usage.waited_s == pytest.approx(0.25)
    transfers.settle()
    assert transfers.usage.waited_s == pytest.approx(0.25), "counted once"


def test_transfers_go_one_after_another(transfers, clock):
    works = [gather(transfers, clock) for _ in range(3)]
    works[0].wait()
    assert clock.main.now_s == pytest.approx(1.0)
    works[2].wait()
    assert clock.main.now_s == pytest.approx(3.0)


def test_a_transfer_begins_after_what_was_queued_before_it(transfers, clock):
    clock.work(5.0)
    gather(transfers, clock).wait()
    assert clock.main.now_s == pytest.approx(6.0)
    transfers.settle()
    assert transfers.usage.waited_s == pytest.approx(1.0)


def test_a_wait_of_another_stream_is_unknown_and_not_zero(transfers, clock):
    work = gather(transfers, clock)
    other = clock.Stream("device")
    with clock.stream(other):
        work.wait()
    assert other.now_s == pytest.approx(1.0)
    assert clock.main.now_s == 0.0
    assert not transfers.usage.sees_waits


def test_a_copy_that_takes_longer_than_the_network_is_late(transfers, clock):
    clock.copy_s = 1.4  # behind it the kernel spins for 0.9 s
    gather(transfers, clock).wait()
    transfers.settle()
    assert transfers.usage.late_s == pytest.approx(1.3)


def test_tensors_are_kept_until_the_wait(transfers, clock):
    kept = torch.ones(1)
    work = start(transfers, "all_gather", NBYTES, 2, kept.zero_, [kept])
    gone = weakref.ref(kept)
    del kept
    gc.collect()
    assert gone() is not None
    work.wait()
    gc.collect()
    assert gone() is None


# -- on a device -------------------------------------------------------------------------------

FAST = Network(world_size=8, bandwidth_gb_s=1e3, latency_us=0.0)
SLOW = Network(world_size=2, bandwidth_gb_s=1.0, latency_us=0.0)


@needs_cuda
def test_on_a_device_other_ranks_hold_what_this_one_holds():
    with simulated(FAST, "cuda"):
        whole = torch.zeros(8 * 5, device="cuda")
        whole[:5] = torch.arange(5.0)
        all_gather_single(whole, whole[:5])
        assert whole.tolist() == list(range(5)) * 8
        dist.all_reduce(whole)
        assert whole[:5].tolist() == [0, 8, 16, 24, 32]


@needs_cuda
def test_on_a_device_a_transfer_takes_its_time():
    with simulated(SLOW, "cuda"):
        whole = torch.zeros(5 * 10**7, device="cuda")  # 200 MB, of which half is sent: 0.1 s
        all_gather_single(whole, whole[: whole.numel() // 2])
        before = find_usage()
        all_gather_single(whole, whole[: whole.numel() // 2])
        used = find_usage().per_step_since(before, 1)
    assert used["busy_s"] == pytest.approx(0.1)
    assert used["waited_s"] == pytest.approx(0.1, rel=0.1)


def engine_of(name, model, mesh):
    if name == "scratch":
        return shard_model(model, ZERO3, mesh=mesh, units=lambda module: module in list(model))
    if name == "ddp":
        return DistributedDataParallel(model, device_ids=[0])
    for layer in model:
        torch_fully_shard(layer, mesh=mesh)
    return torch_fully_shard(model, mesh=mesh)


@needs_cuda
@pytest.mark.parametrize("name", ["scratch", "fsdp2", "ddp"])
def test_on_a_device_every_engine_trains_among_simulated_ranks(name):
    torch.cuda.set_device(0)
    with simulated(FAST, "cuda"):
        mesh = init_device_mesh("cuda", (FAST.world_size,))
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))).cuda()
        model = engine_of(name, model, mesh)
        for _ in range(2):
            before = find_usage()
            model(torch.ones(2, 64, device="cuda")).sum().backward()
            used = find_usage().per_step_since(before, 1)
    if name == "ddp":
        assert used["calls"]["all_reduce"] >= 1
    else:
        # The core keeps the block whose backward comes first.
        assert used["calls"] == {"all_gather": 5 if name == "scratch" else 6, "reduce_scatter": 3}
