"""In which order what moves between hosts is started and waited for, by a modelled network.

The mean over replicas of one unit is on its way when that of the unit before is waited for, so that
the line between hosts never rests; and a unit's gather between hosts is on its way before the unit
before it is whole.
"""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_fsdp import shard_model
from lightning_fsdp.simulate import transfers_on_clock
from lightning_fsdp.simulate.groups import simulated
from lightning_fsdp.simulate.network import Network

NUM_UNITS = 5
SLOW = Network(
    world_size=4, num_hosts=2, bandwidth_gb_s=1.0, latency_us=1.0, host_bandwidth_gb_s=0.01
)


@pytest.fixture
def events(monkeypatch):
    """What is started and waited for: ``("start" | "wait", kind, between hosts, number)``."""
    seen = []
    start = transfers_on_clock.ClockedTransfers.start

    def recording(self, transfer, cost):
        work, what = start(self, transfer, cost), (transfer.kind, transfer.leaves_host)
        number = sum(event[:3] == ("start", *what) for event in seen)
        seen.append(("start", *what, number))
        wait = work.wait
        work.wait = lambda *args: (seen.append(("wait", *what, number)), wait(*args))[1]
        return work

    monkeypatch.setattr(transfers_on_clock.ClockedTransfers, "start", recording)
    return seen


def _train(state_over, events):
    """Events of the second step, which knows the order of units."""
    with simulated(SLOW, clock=transfers_on_clock.Clock()):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        layers = (nn.Linear(16, 16) for _ in range(NUM_UNITS))
        model = shard_model(nn.Sequential(*layers), mesh=mesh, state_over=state_over)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            events.clear()
            model(torch.ones(2, 16, requires_grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return list(events)


@pytest.mark.parametrize(
    ("state_over", "kind"), [("replica", "all_reduce"), ("all", "reduce_scatter")]
)
def test_the_next_mean_between_hosts_starts_before_one_is_waited_for(events, state_over, kind):
    seen = _train(state_over, events)
    for number in range(NUM_UNITS - 1):
        following = seen.index(("start", kind, True, number + 1))
        assert following < seen.index(("wait", kind, True, number)), seen
    # While it is under way, the next unit's backward is, and starts a reduction in its host.
    for number in range(NUM_UNITS - 2):
        inside = seen.index(("start", "reduce_scatter", False, number + 2))
        assert inside < seen.index(("wait", kind, True, number + 1)), seen


def test_a_gather_between_hosts_starts_a_unit_ahead(events):
    seen = _train("all", events)
    for number in range(NUM_UNITS - 1):
        ahead = seen.index(("start", "all_gather", True, number + 1))
        assert ahead < seen.index(("start", "all_gather", False, number)), seen
