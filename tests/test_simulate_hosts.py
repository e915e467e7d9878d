"""Ranks on hosts with a slow network between them, by a clock that only counts.

host 0    ranks 0, 1      a column: ranks 0, 2 or 1, 3
host 1    ranks 2, 3      a row: the ranks of a host
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_fsdp.core.torch_internals import all_gather_single
from lightning_fsdp.simulate.groups import simulated
from lightning_fsdp.simulate.network import Network
from lightning_fsdp.simulate.transfers_on_clock import Clock

HOSTS = Network(
    world_size=4, bandwidth_gb_s=10.0, latency_us=0.0, num_hosts=2, host_bandwidth_gb_s=1.0
)
LINE = replace(HOSTS, shares_line=True)
NBYTES = 4 * 10**6


@contextmanager
def on_hosts(network):
    clock = Clock()
    with simulated(network, clock=clock) as usage:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        yield clock, usage, mesh


@pytest.mark.parametrize(
    ("network", "kind", "group", "ms"),
    [
        # Three quarters pass the slowest rank of a ring: by its own link, or by the host's line.
        (HOSTS, "all_gather", (4, 2), 3.0),
        (LINE, "all_gather", (4, 2), 1.5),
        # Columns, of which there are two at a time: each its share of the line.
        (HOSTS, "all_reduce", (2, 1), 4.0),
        (LINE, "all_reduce", (2, 1), 4.0),
        # In pairs half of everything leaves a rank for the other host.
        (HOSTS, "all_to_all", (4, 2), 2.0),
        (LINE, "all_to_all", (4, 2), 2.0),
        (LINE, "send", (2, 1), 4.0),
        (LINE, "recv", (2, 1), 0.0),
        # Within a host.
        (LINE, "all_gather", (2, 2), 0.2),
        (HOSTS, "all_to_all", (2, 2), 0.2),
    ],
)
def test_a_line_is_shared_by_what_crosses_it_at_a_time(network, kind, group, ms):
    assert network.cost(kind, NBYTES, *group).duration_s == pytest.approx(1e-3 * ms)


def test_a_group_knows_its_hosts():
    whole, shard = torch.zeros(NBYTES // 4), torch.zeros(NBYTES // 4)
    for group, seconds in ((None, 3e-3), (1, 0.2e-3)):
        with on_hosts(HOSTS) as (clock, _, mesh):
            ranks = dist.group.WORLD if group is None else mesh.get_group(group)
            all_gather_single(whole, shard[: len(shard) // ranks.size()], group=ranks)
            assert clock.now_s == pytest.approx(seconds)
    with on_hosts(HOSTS) as (clock, usage, mesh):
        dist.all_reduce(shard, group=mesh.get_group(0))
        assert clock.now_s == usage.waited_s == pytest.approx(4e-3)
        assert shard.count_nonzero() == 0
    with on_hosts(HOSTS) as (clock, usage, _):
        works = [dist.irecv(shard, src=2), dist.isend(shard, dst=2), dist.isend(shard, dst=1)]
        assert [work.is_completed() for work in works] == [True, False, False]
        works[2].wait()
        assert clock.now_s == pytest.approx(0.4e-3), "over another link"
        works[1].wait()
        assert clock.now_s == pytest.approx(4e-3)
        assert usage.sent_bytes == 2 * NBYTES


def test_what_leaves_a_host_does_not_hold_up_what_stays():
    whole, shard = torch.zeros(NBYTES // 4), torch.zeros(NBYTES // 8)
    with on_hosts(HOSTS) as (clock, usage, mesh):
        slow = dist.all_reduce(whole, group=mesh.get_group(0), async_op=True)
        all_gather_single(whole, shard, group=mesh.get_group(1))
        assert clock.now_s == pytest.approx(0.2e-3)
        clock.now_s += 3e-3  # who computes meanwhile
        slow.wait()
        assert clock.now_s == pytest.approx(4e-3)
        assert usage.waited_s == pytest.approx(1e-3)
        assert slow.is_completed()
