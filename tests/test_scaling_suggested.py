"""The record of ``benchmarks/scaling_suggested.py``: the page shows it, and it comes out again."""

import json

import pytest

from benchmarks import scaling_suggested as command
from benchmarks import update_tables
from lightning_fsdp.harness.environment import describe
from lightning_fsdp.plan.models import build

DOCUMENT = json.loads(command.OUT.read_text())
NAME = "scaling-suggested"


def test_the_page_shows_the_record():
    table = "\n".join([describe(DOCUMENT), "", *update_tables.TABLES[NAME](DOCUMENT)])
    _, shown, _ = update_tables.split(update_tables.page_of(NAME).read_text(), NAME)
    assert shown == table
    assert [row["world_size"] for row in DOCUMENT["rows"]] == list(command.WORLD_SIZES)


def test_it_is_computed_and_comes_out_again(monkeypatch):
    monkeypatch.setattr(command, "NETWORKS", command.NETWORKS[-1:])
    (row,) = command.rows(DOCUMENT["tflops"])
    expected, flat = DOCUMENT["rows"][-1], row["flat"]
    assert flat == pytest.approx(expected["flat"])
    assert len(row["proposed"]) == len(expected["proposed"])
    for found, recorded in zip(row["proposed"], expected["proposed"], strict=True):
        assert found == pytest.approx(recorded)
    assert row["proposed"][0]["share"] >= command.GOAL > flat["share"]
    # Beside flat ZeRO-3, 16 bytes of state per parameter: of 8 shards in place of 1024; or, with
    # state over all ranks, of weights alone, which are 4 of the 16.
    num_parameters = sum(p.numel() for p in build(command.CONFIG).parameters())
    likewise = [p for p in row["proposed"] if (p["zero_stage"], p["shard_size"]) == (3, 8)]
    prices = {p["state_over"]: p["peak_bytes"] - flat["peak_bytes"] for p in likewise}
    assert prices == {
        "replica": pytest.approx(16 * num_parameters * (1 / 8 - 1 / 1024), rel=0.02),
        "all": pytest.approx(4 * num_parameters / 8, rel=0.03),
    }
    assert all(p["share"] >= command.GOAL for p in likewise)


def test_a_goal_that_is_missed_is_the_exit_code(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "rows", lambda tflops: DOCUMENT["rows"])
    monkeypatch.setattr("sys.argv", ["scaling_suggested", "--out", str(tmp_path / "rows.json")])
    assert command.main() == 0
    monkeypatch.setattr(command, "GOAL", 0.99)
    assert command.main() == 1
    assert "at 1024 ranks 0.96, wanted 0.99" in capsys.readouterr().out
