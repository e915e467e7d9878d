"""The record of ``benchmarks/hosts.py``: the page shows it, and bytes are those of theory."""

import json
import os
import sys

import pytest

from benchmarks import hosts as command
from benchmarks import hosts_ranks, update_tables
from lightning_fsdp.harness.environment import describe


def test_the_page_shows_the_record_and_bytes_are_those_of_theory():
    document = json.loads(command.OUT.read_text())
    table = "\n".join([describe(document), "", *update_tables.hosts_table(document)])
    _, shown, _ = update_tables.split(update_tables.page_of("hosts").read_text(), "hosts")
    assert shown == table
    shape = hosts_ranks.Shape(document["hosts"], document["ranks"])
    assert {row["arm"] for row in document["rows"]} == set(hosts_ranks.ARMS)
    for row in document["rows"]:
        expected = hosts_ranks.theory(hosts_ranks.ARMS[row["arm"]], shape)
        assert row["theory_bytes"] == pytest.approx(expected)
        assert row["counted_bytes"] == pytest.approx(expected), row["arm"]
        # Headers, acknowledgements, agreements.
        assert 1 < row["kernel_bytes"] / expected < 1.01, row["arm"]
    losses = {row["arm"]: row["loss"] for row in document["rows"]}
    for arm, loss in losses.items():
        other = "flat_core_x4" if "x4" in arm else "flat_core"
        assert loss == pytest.approx(losses[other], abs=1e-3), arm


def test_the_page_says_what_four_micro_batches_and_replicas_take():
    rows = json.loads(command.OUT.read_text())["rows"]
    ratios = {(row["mbit_s"], row["arm"]): row["ratios"] for row in rows}
    page = " ".join(update_tables.page_of("hosts").read_text().split())

    def at_both(arm, other):
        return [f"{ratios[mbit_s, arm][other]:.2f}" for mbit_s in (1000.0, 200.0)]

    said = "(`x4`, of `x4s`) four take {} of it at 1 Gbit/s and {} at 200 Mbit/s"
    assert said.format(*at_both("hsdp_core_x4", "flat_core_x4s")) in page
    assert "(`x4l`, of flat `x4`) {} and {}.".format(
        *at_both("hsdp_core_x4l", "flat_core_x4")
    ) in page  # fmt: skip
    across, _ = at_both("hsdp_core_x4", "flat_core_x4")
    assert f"(Adding up shards, it is {across} of the latter at 1 Gbit/s" in page
    said = "the core's replicas take {} of the step at 1 Gbit/s and {} at 200 Mbit/s"
    assert said.format(*at_both("hsdp_core", "hsdp_fsdp2")) in page
    assert "and takes {} of the flat step at 1 Gbit/s and {} at 200 Mbit/s".format(
        *at_both("hsdp_core", "flat_core")
    ) in page  # fmt: skip


def test_where_there_are_no_namespaces_it_says_so_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hosts"])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert command.main() == 2
    assert capsys.readouterr().err == (
        "hosts: expected network namespaces of Linux, which only root may make, got user 1000. "
        "Run it as root.\n"
    )


@pytest.mark.parametrize("option", ["--mbit", "--ranks", "--rounds"])
def test_a_number_that_no_network_or_host_has_is_named(monkeypatch, capsys, option):
    monkeypatch.setattr(sys, "argv", ["hosts", option, "0"])
    with pytest.raises(SystemExit):
        command.main()
    assert f"argument {option}: expected " in capsys.readouterr().err
