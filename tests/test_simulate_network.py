"""What a collective costs on a simulated network, and which networks there are."""

import pytest
import torch
import torch.distributed as dist

from lightning_fsdp.bench.__main__ import main
from lightning_fsdp.simulate.groups import simulated
from lightning_fsdp.simulate.network import Network, networks_of

# -- the model ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "steps", "sent_bytes"),
    [
        ("all_gather", 7, 7000),
        ("reduce_scatter", 7, 7000),
        ("all_to_all", 7, 7000),
        ("all_reduce", 14, 14_000),
        ("broadcast", 3, 8000),
    ],
)
def test_a_collective_costs_its_steps_and_what_it_sends(kind, steps, sent_bytes):
    network = Network(world_size=8, bandwidth_gb_s=2.0, latency_us=5.0)
    cost = network.cost(kind, 8000, 8)
    assert cost.sent_bytes == sent_bytes
    assert cost.duration_s == pytest.approx(steps * 5e-6 + sent_bytes / 2e9)
    assert network.cost(kind, 8000, 1).duration_s == 0, "one rank sends nothing"


def test_rows_in_different_numbers_take_all_bytes_of_a_row():
    with simulated(Network(world_size=3, bandwidth_gb_s=1e9, latency_us=0.0)) as usage:
        received, rows = torch.empty(8, 5), torch.ones(6, 5)
        dist.all_to_all_single(received, rows, [0, 3, 5], [0, 4, 2])
        assert usage.sent_bytes == rows[0].nbytes * 8
        dist.all_to_all_single(received, rows, [0, 3, 5])  # each rank gets as many
        assert usage.sent_bytes == rows[0].nbytes * 16
        assert received.tolist() == [[1] * 5] * 6 + [[0] * 5] * 2


def test_a_ring_is_as_fast_as_its_slowest_link():
    network = Network(
        world_size=16, bandwidth_gb_s=100, latency_us=0, num_hosts=2, host_bandwidth_gb_s=10
    )
    assert network.slowest_gb_s(8) == 100
    assert network.slowest_gb_s(16) == 10
    assert "8 ranks per host, 10 GB/s" in network.assumptions()[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 0}, "expected 1 or more ranks, got 0"),
        ({"bandwidth_gb_s": 0.0}, "expected more than 0 GB/s"),
        ({"num_hosts": 2, "host_bandwidth_gb_s": -1.0}, "bandwidth between hosts: expected more"),
        ({"latency_us": -1.0}, "expected 0 us or more, got -1.0"),
        ({"host_share": 2.0}, "expected 0 to 1, got 2.0"),
        ({"num_hosts": 3}, "expected a divisor of the 8 ranks, got 3"),
    ],
)
def test_a_network_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Network(**{"world_size": 8, "bandwidth_gb_s": 1.0, "latency_us": 1.0, **change})


# -- the command -------------------------------------------------------------------------------


def test_smaller_worlds_keep_the_ranks_per_host():
    links = {"bandwidth_gb_s": 1.0, "latency_us": 1.0}
    networks = networks_of([1024, 2, 64], num_hosts=128, **links)
    assert [(n.world_size, n.num_hosts) for n in networks] == [(2, 1), (64, 8), (1024, 128)]


def test_a_world_that_leaves_a_host_half_empty_is_refused():
    with pytest.raises(ValueError, match=r"hosts of 8 ranks.*got 12 ranks, which leave one"):
        networks_of([12, 64], num_hosts=8, bandwidth_gb_s=1.0, latency_us=1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["8", "--hosts", "3"], "hosts: expected a divisor of the 8 ranks, got 3"),
        (["1", "8"], "expected 2 or more ranks, got 1"),
        (["12", "16", "--hosts", "2"], "expected hosts of 8 ranks"),
    ],
)
def test_ranks_that_cannot_be_simulated_are_refused_by_the_command(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(["scaling", "--ranks", *arguments])
    assert f"--ranks, --hosts: {message}" in capsys.readouterr().err
