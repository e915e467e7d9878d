"""What a plan says of time: exact for what can be worked out by hand, and against real hosts."""

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import hosts as hosts_command
from benchmarks import hosts_ranks
from lightning_fsdp.plan import dry_run as dry_run_module
from lightning_fsdp.plan.dry_run import Run, dry_run, dry_runs
from lightning_fsdp.plan.models import build, config_of
from lightning_fsdp.plan.pace import Pace
from lightning_fsdp.simulate.network import Network
from tests.support.planned import BATCH, SEQ_LEN, folder_with

FREE = Network(world_size=8, bandwidth_gb_s=1e9, latency_us=0.0)
OPTIONS = {"world_size": 8, "batch_size": BATCH, "seq_len": SEQ_LEN, "precision": "32-true"}


def timed(config, network=FREE, flops_per_s=1e9, **options):
    return dry_run(config, Run(**{**OPTIONS, **options}), Pace(network, flops_per_s))


@pytest.fixture
def config(tmp_path):
    return config_of(str(folder_with("gpt2", tmp_path, n_layer=2)))


def test_a_step_sends_each_weight_twice_and_its_gradient_once_though_the_head_is_the_embedding(
    tmp_path,
):
    """Embedding and head are one weight: gathered for the forward's start, and kept at its end."""
    config = config_of(str(folder_with("qwen", tmp_path)))
    numel = sum(parameter.numel() for parameter in build(config).parameters())
    assert timed(config).timing.sent_bytes == pytest.approx(7 / 8 * 4 * 3 * numel, rel=1e-3)


def test_a_step_without_a_network_computes_what_torch_counts(tmp_path):
    config = config_of(str(folder_with("gpt2", tmp_path)))
    config._attn_implementation = "eager"  # torch does not count its own on CPU
    model = build(config)
    tokens = torch.zeros(BATCH, SEQ_LEN, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens).logits.sum().backward()
    expected_s = counter.get_total_flops() / 1e9
    for options in ({}, {"loss": "plain"}, {"zero_stage": 2}):
        timing = timed(config, **options).timing
        assert timing.compute_s == pytest.approx(expected_s)
        assert timing.step_s == pytest.approx(timing.compute_s)
    recomputed_s = timed(config, activation_checkpointing=True).timing.compute_s
    assert 1.2 < recomputed_s / expected_s < 4 / 3
    config._attn_implementation = "sdpa"
    assert timed(config).timing.compute_s == pytest.approx(expected_s, rel=0.02)


def test_chunks_of_the_loss_that_are_left_out_take_their_time(config):
    sizes = {"batch_size": 40, "seq_len": SEQ_LEN}  # 10 chunks, of which two are looked at
    chunked, plain = (timed(config, loss=loss, **sizes).timing for loss in ("chunked", "plain"))
    assert chunked.compute_s == pytest.approx(plain.compute_s, rel=1e-6)


def test_optimizers_take_no_time_whatever_of_them_a_rank_does(config):
    adamw, muon = (timed(config, optimizer=name) for name in ("adamw", "muon"))
    assert muon.owners[0].work > 0
    assert muon.timing.compute_s == adamw.timing.compute_s


def test_micro_batches_that_are_left_out_take_their_time_and_no_memory(config, monkeypatch):
    slow = Network(world_size=8, bandwidth_gb_s=0.01, latency_us=10.0)
    options = {"grad_accum": 6, "network": slow, "shard_size": 4}
    found = timed(config, **options)
    monkeypatch.setattr(dry_run_module, "_MICRO_BATCHES", 6)
    expected = timed(config, **options)
    assert found.phases == expected.phases
    for name, value in vars(expected.timing).items():
        assert getattr(found.timing, name) == pytest.approx(value, rel=1e-9), name
    assert expected.timing.waited_s > 0.1 * expected.timing.step_s


def test_sizes_that_are_planned_one_after_another_are_planned_as_each_alone(config):
    slow = Network(world_size=8, bandwidth_gb_s=0.01, latency_us=10.0)
    run = Run(**OPTIONS, shard_size=4, state_over="all", activation_checkpointing=True)
    sizes = [(4, 2), (2, 4), (8, 1)]
    with dry_runs(config, run, Pace(slow, 1e9)) as plan_of:
        found = [plan_of(*each) for each in sizes]
    for plan in found:
        alone = dry_run(config, plan.run, Pace(slow, 1e9))
        assert replace(plan, timing=None) == replace(alone, timing=None)
        assert vars(plan.timing) == pytest.approx(vars(alone.timing), rel=1e-9)
    assert [(plan.run.batch_size, plan.run.grad_accum) for plan in found] == sizes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"zero_stage": 2, "grad_accum": 2},
        {"shard_size": 2, "backend": "gloo"},
        {"precision": "bf16-mixed", "optimizer": "muon", "activation_checkpointing": True},
    ],
    ids=str,
)
def test_a_network_does_not_change_the_memory(config, options):
    with_network = timed(config, **options)
    without = dry_run(config, Run(**{**OPTIONS, **options}))
    assert with_network.peak_bytes == without.peak_bytes
    assert without.timing is None


def test_state_over_all_ranks_sends_what_theory_says_and_gathers_it_once_per_step(config):
    hosts = {"world_size": 8, "num_hosts": 4, "bandwidth_gb_s": 1e9, "latency_us": 0.0}
    network, precision = Network(**hosts, host_bandwidth_gb_s=1e-3), "bf16-mixed"
    options = {"network": network, "shard_size": 2, "precision": precision, "flops_per_s": 1e15}
    one_host = Network(world_size=2, bandwidth_gb_s=1e9, latency_us=0.0)
    row = timed(config, one_host, world_size=2, precision=precision).timing.sent_bytes
    part = sum(parameter.numel() for parameter in build(config).parameters()) / 2  # of a host
    crosses = part * 3 / 4 * (2 + 4)  # of four hosts: weights in bf16, gradients in fp32
    for micro_batches in (1, 3):
        timing = timed(config, state_over="all", grad_accum=micro_batches, **options).timing
        if micro_batches == 1:
            assert timing.sent_bytes == pytest.approx(row + crosses, rel=1e-3)
        # Nothing but the lines between hosts takes time, and they never rest.
        assert timing.step_s == pytest.approx(crosses / 1e6, rel=0.01)
    replicas = timed(config, **options).timing
    assert replicas.step_s == pytest.approx(part * 3 / 4 * 2 * 4 / 1e6, rel=0.01)


# -- against two real hosts ------------------------------------------------------------------------

FRAMES = 1448 / 1514  # of a line's bits are data: the rest are headers of Ethernet, IP and TCP
ARMS = {
    "flat_core": {},
    "hsdp_core": {"shard_size": 2},
    "flat_core_x4": {"grad_accum": 4},
    "hsdp_core_x4": {"shard_size": 2, "grad_accum": 4},
}


def _line(mbit_s, num_ranks=2):
    """Of ``benchmarks/hosts.py``; what memory and gloo take within a host matters little."""
    return Network(
        world_size=4, bandwidth_gb_s=4.0, latency_us=50.0, num_hosts=2,
        host_bandwidth_gb_s=mbit_s / 8e3 / num_ranks * FRAMES, shares_line=True,
    )  # fmt: skip


def _predicted(network, flops_per_s, **options):
    config = hosts_ranks.build_model().config
    run = {"world_size": 4, "batch_size": hosts_ranks.BATCH, "seq_len": hosts_ranks.SEQ}
    run |= {"precision": "32-true", "backend": "gloo", "loss": "plain"}
    return dry_run(config, Run(**run, **options), Pace(network, flops_per_s)).timing


def test_the_measured_steps_of_two_hosts_are_predicted():
    """From one figure of them: how long a micro-batch computes, as replicas hide no transfer."""
    rows = json.loads(hosts_command.OUT.read_text())["rows"]
    measured = {(row["mbit_s"], row["arm"]): row["median_s"] for row in rows}
    times = [measured[1000.0, arm] for arm in ("hsdp_core", "hsdp_core_x4")]
    micro_batch_s = (times[1] - times[0]) / (hosts_ranks.MICRO_BATCHES - 1)
    flops_per_s = _predicted(_line(1000), 1.0).compute_s / micro_batch_s
    for mbit_s in (1000.0, 200.0):
        network = _line(mbit_s)
        predicted = {a: _predicted(network, flops_per_s, **o).step_s for a, o in ARMS.items()}
        for arm, step_s in predicted.items():
            assert step_s == pytest.approx(measured[mbit_s, arm], rel=0.15), (mbit_s, arm)
        # By micro-batch, the order of what was measured.
        per = {arm: 4 if arm.endswith("x4") else 1 for arm in ARMS}
        orders = [
            sorted(ARMS, key=lambda arm: of[arm] / per[arm])
            for of in (predicted, {arm: measured[mbit_s, arm] for arm in ARMS})
        ]
        assert orders[0] == orders[1]


def test_a_ring_over_two_hosts_has_the_whole_line():
    """As torch's FSDP2 over gloo, at the rate at which nothing but bytes counts."""
    document = json.loads(hosts_command.OUT.read_text())
    row = next(r for r in document["rows"] if (r["mbit_s"], r["arm"]) == (200.0, "flat_fsdp2"))
    for network, is_right in (
        (_line(200.0), True),
        (replace(_line(200.0), shares_line=False), False),
    ):
        predicted_s = row["theory_bytes"] / (network.slowest_gb_s(4) * 1e9)
        assert (abs(predicted_s / row["median_s"] - 1) < 0.15) == is_right


def test_a_column_that_is_taken_for_neighbours_would_be_noticed(monkeypatch):
    right_s = _predicted(_line(200.0), 1e10, shard_size=2).step_s
    monkeypatch.setattr(Network, "per_host", lambda self, ranks: min(len(ranks), 2))
    assert _predicted(_line(200.0), 1e10, shard_size=2).step_s < 0.5 * right_s
