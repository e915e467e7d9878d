"""A scaling study: its report, its picture, and the command that makes both."""

import csv
import json
from dataclasses import asdict

import pytest

from lightning_fsdp.bench.__main__ import main
from lightning_fsdp.bench.scaling import Point, write_scaling
from lightning_fsdp.harness import processes
from lightning_fsdp.harness.environment import environment
from lightning_fsdp.simulate.network import Network
from tests.support import warm


def test_a_report_names_what_failed_and_what_it_assumes(tmp_path):
    shape = {"batch_size": 4, "grad_accum": 1}
    alone = Point(
        arm="single_b4_a1", engine="single", zero_stage=None, **shape, world_size=1,
        tokens_per_s_per_rank=100.0, efficiency=1.0, step_ms=5.0,
    )  # fmt: skip
    arm = {"arm": "scratch_zero3_b4_a1", "engine": "scratch", "zero_stage": 3, **shape}
    fine = Point(
        **arm, world_size=8, tokens_per_s_per_rank=80.0, efficiency=0.8, step_ms=6.0, late_ms=1.0,
        busy_ms=2.0, calls={"all_gather": 2.0}, sent_bytes=1e6,
    )  # fmt: skip
    failed = Point(**arm, world_size=64, failure="exit code 1: boom")
    network = Network(world_size=64, bandwidth_gb_s=1e3, latency_us=0.0)
    document = {
        "command": "x",
        "workload": {"accelerator": "cpu", "precision": "32-true"},
        **environment(),
    }
    write_scaling(tmp_path, [alone, fine, failed], network, document)
    report = (tmp_path / "scaling.md").read_text()
    assert "not fused" not in report
    assert all(assumption in report for assumption in network.assumptions())
    assert "FAILED" in report
    assert "6 (bound by this machine)" in report
    with (tmp_path / "scaling.csv").open() as stream:
        assert [line["failure"] for line in csv.DictReader(stream)] == ["", "", "exit code 1: boom"]
    document["workload"]["precision"] = "bf16-mixed"
    write_scaling(tmp_path, [alone, fine, failed], network, document)
    assert "references (single, ddp) step with" in (tmp_path / "scaling.md").read_text()
    results = json.loads((tmp_path / "scaling.json").read_text())
    assert results["points"][2]["step_ms"] is None
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
    assert "scratch ZeRO-3 (failed at 64)" in (tmp_path / "scaling.svg").read_text()


def test_the_picture_of_a_scaling_study_is_drawn_again(tmp_path, capsys):
    point = Point(
        arm="scratch_zero3_b4_a1", engine="scratch", zero_stage=3, batch_size=4, grad_accum=2,
        world_size=8, tokens_per_s_per_rank=80.0, efficiency=0.8, step_ms=6.0, sent_bytes=1e6,
    )  # fmt: skip
    (tmp_path / "scaling.json").write_text(json.dumps({"points": [asdict(point)]}))
    assert main(["plot", str(tmp_path)]) == 0
    assert "scaling.png" in capsys.readouterr().out
    drawn = (tmp_path / "scaling.svg").read_text()
    assert "each rank: 4 x 2 sequences per step" in drawn
    assert "scratch ZeRO-3" in drawn
    assert "FSDP2" not in drawn
    fsdp2 = {**asdict(point), "engine": "fsdp2"}
    (tmp_path / "scaling.json").write_text(json.dumps({"points": [fsdp2]}))
    assert main(["plot", str(tmp_path)]) == 0
    assert "FSDP2 deals out rows of each parameter" in (tmp_path / "scaling.svg").read_text()


POINT = {
    "arm": "x", "engine": "ddp", "zero_stage": None, "batch_size": 1, "grad_accum": 1,
    "world_size": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected JSON, got: "),
        ("[]", "expected a scaling study, got the document (input should be an object, got [])"),
        ('{"points": []}', "expected a scaling study, got no points"),
        ('{"points": [{"arm": 1}]}', "got points[0].arm (input should be a valid string, got 1)"),
        (
            json.dumps({"points": [{**POINT, "step_ms": "5"}]}),
            'points[0, x].step_ms (input should be a valid number, got "5")',
        ),
    ],
)
def test_a_damaged_scaling_study_is_refused(text, message, tmp_path, capsys):
    (tmp_path / "scaling.json").write_text(text)
    assert main(["plot", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert f"{tmp_path}/scaling.json: expected " in told
    assert message in told


def test_a_figure_that_a_scaling_study_lacks_is_not_drawn(tmp_path):
    alone = {**POINT, "engine": "single", "world_size": 1, "step_ms": 5.0}
    (tmp_path / "scaling.json").write_text(json.dumps({"points": [alone, POINT]}))
    assert main(["plot", str(tmp_path)]) == 0


def test_the_command_runs_arms_among_simulated_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "run_command", warm.run_command)
    code = main(
        [
            *("scaling", "--ranks", "64", "--engines", "scratch", "--stages", "3"),
            *("--batch-sizes", "2", "--repeats", "1", "--steps", "2", "--warmup", "1"),
            *("--out", str(tmp_path)),
        ]
    )
    points = json.loads((tmp_path / "scaling.json").read_text())["points"]
    assert code == 0, points
    single, ddp_, sharded = points
    assert single["exposed_ms"] == single["sent_bytes"] == 0, "one rank communicates with nobody"
    assert (single["world_size"], ddp_["world_size"], sharded["world_size"]) == (1, 64, 64)
    norm = 1  # that clipping takes
    # No backward reads the positions' embedding, and that of the last norm has it from the forward.
    expected = 2 * sharded["calls"]["reduce_scatter"] - 2 + norm
    assert sharded["calls"]["all_gather"] == expected
    assert ddp_["exposed_ms"] is None
    assert sharded["exposed_ms"] <= sharded["step_ms"]
