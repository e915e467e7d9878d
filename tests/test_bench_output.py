import csv
import json
import math
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from lightning_fsdp.bench import documents, output, run
from lightning_fsdp.bench.__main__ import main
from lightning_fsdp.bench.output import PICTURES
from lightning_fsdp.bench.records import Run
from lightning_fsdp.bench.results import read
from lightning_fsdp.bench.scaling import Point
from lightning_fsdp.harness.environment import environment
from tests.support.bench_results import (
    SMALL,
    arms,
    document_of,
    folder_of,
    step_ms,
    tokens_per_s,
    workload,
)
from tests.test_bench_report import made, measured


@pytest.fixture
def no_pictures(monkeypatch):
    """Tests of the rest need not wait for them."""
    monkeypatch.setattr(output, "PICTURES", {})


def test_a_folder_is_redrawn_from_its_results_alone(tmp_path, capsys):
    folder_of(document_of(**SMALL), tmp_path)
    assert main(["plot", str(tmp_path)]) == 0
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    assert drawn == {f"{name}.{suffix}" for name in PICTURES for suffix in ("png", "svg")}
    links = (tmp_path / "report.md").read_text().split("](")[1:]
    assert links
    for link in links:
        assert (tmp_path / link.split(")")[0]).is_file()
    with (tmp_path / "comparison.csv").open() as stream:
        table = list(csv.DictReader(stream))
    assert [line["arm"] for line in table] == [arm.name for arm in arms()]
    assert float(table[2]["tokens_per_s"]) == pytest.approx(tokens_per_s(arms()[2], workload()))
    assert json.loads(table[2]["parts_ms"])["whole_ms"] == pytest.approx(step_ms(arms()[2]))
    assert "report.md" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "expected results.json or scaling.json of the benchmark, got none"),
        ("{", "expected JSON, got: "),
        ("[]", "lightning_fsdp.bench`, got the document (input should be an object, got []"),
        ('{"rows": [{"arm": "ddp"}]}', "got command (field required)"),
    ],
)
def test_a_folder_without_results_is_named(text, message, tmp_path, capsys):
    if text is not None:
        (tmp_path / "results.json").write_text(text)
    assert main(["plot", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert message in told
    assert str(tmp_path) in told


@pytest.mark.parametrize("name", ["results.json", "scaling.json"])
def test_what_is_no_file_is_named(name, tmp_path, capsys):
    (tmp_path / name).mkdir()
    assert main(["plot", str(tmp_path)]) == 1
    assert f"{name}: expected JSON, got: [Errno 21] Is a directory" in capsys.readouterr().err


def study(path):
    shape = {"engine": "scratch", "zero_stage": 3, "batch_size": 4, "grad_accum": 1}
    point = Point(
        arm="scratch_zero3_b4_a1", **shape, world_size=8, tokens_per_s_per_rank=80.0, step_ms=6.0
    )
    (path / "scaling.json").write_text(json.dumps({"points": [asdict(point)]}))


def test_all_that_lies_in_a_folder_is_redrawn_and_named(tmp_path, capsys, no_pictures):
    folder_of(document_of(**SMALL), tmp_path)
    study(tmp_path)
    (tmp_path / "largest_batch.json").write_text("{}")
    assert main(["plot", str(tmp_path)]) == 0
    for name in ("report.md", "comparison.csv", "tensorboard", "scaling.png", "scaling.svg"):
        assert (tmp_path / name).exists(), name
    made = "report.md, comparison.csv, plots/, tensorboard/"
    assert capsys.readouterr().out.splitlines() == [
        f"Written to {tmp_path}/ from results.json: {made}",
        f"Written to {tmp_path}/ from scaling.json: scaling.png, .svg",
        "Nothing is made of largest_batch.json; its table is largest_batch.md.",
    ]


def test_what_is_damaged_does_not_stop_what_is_not(tmp_path, capsys):
    (tmp_path / "results.json").write_text("{")
    study(tmp_path)
    assert main(["plot", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert f"error: {tmp_path}/results.json: expected JSON" in told.err
    assert "results.json" not in told.out
    assert (tmp_path / "scaling.png").exists()


def test_the_files_of_other_benchmarks_are_refused_by_name(tmp_path, capsys):
    (tmp_path / "largest_batch.json").write_text("{}")
    assert main(["plot", str(tmp_path)]) == 1
    assert "got only largest_batch.json, of which there is no picture" in capsys.readouterr().err
    optimizers = {"command": "optimizer", **environment(), "failures": {}, "arms": {}}
    (tmp_path / "results.json").write_text(json.dumps(optimizers))
    assert main(["plot", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"error: {tmp_path}/results.json: expected the results of `python -m ")
    assert told.endswith(
        "got those of `make bench-optimizer`: its picture is memory.png. Name another.\n"
    )


def test_results_are_json_that_any_reader_takes(tmp_path, no_pictures):
    runs = [measured(arm, losses=(5.0, math.nan)) for arm in arms()]
    rows = run.summarize(arms(), runs, workload())
    output.write(tmp_path, made(rows, runs))

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    text = (tmp_path / "results.json").read_text()
    document = json.loads(text, parse_constant=refuse)
    assert document["runs"][0]["ranks"][0]["losses"] == [5.0, None]
    assert document["rows"][1]["payload_bytes"] > 0
    assert not re.findall(r'"[a-z_]*bytes": ?\d+\.0', text), "bytes are whole numbers"
    assert document["rows"][0]["failure"] == "a loss is not a finite number"


def test_results_are_there_before_anything_is_drawn(tmp_path, monkeypatch):
    def fail(_):
        raise RuntimeError("no pictures today")

    monkeypatch.setattr(output, "PICTURES", {"tokens_per_s": fail})
    runs = [measured(arm) for arm in arms()]
    rows = run.summarize(arms(), runs, workload())
    with pytest.raises(RuntimeError, match="no pictures today"):
        output.write(tmp_path, made(rows, runs))
    assert len(read(tmp_path).arms) == 3
    assert "scratch_zero3_b2_a1" in (tmp_path / "report.md").read_text()


def test_total_failure_is_told_by_table_report_and_exit_code(
    tmp_path, monkeypatch, capsys, no_pictures
):
    def run_arm(arm, workload, *, repeat, out, timeout_s):
        return Run(arm.name, repeat, 1.0, out / "log.txt", failure="exit code 1: boom")

    monkeypatch.setattr(run, "run_arm", run_arm)
    config = tmp_path / "recipe.yaml"
    config.touch()
    given = ["--recipe", str(config), "--engines", "scratch", "--stages", "3", "--repeats", "1"]
    assert main([*given, "--out", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert told.out.count("FAILED") == 3
    assert told.err.count("boom") == 3
    report = (tmp_path / "report.md").read_text()
    assert report.count("exit code 1: boom") >= 3
    assert all(row.tokens_per_s is None for row in read(tmp_path).rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is told without CUDA")
def test_a_snapshot_without_cuda_is_refused_by_name(tmp_path, capsys):
    config = tmp_path / "recipe.yaml"
    config.touch()
    with pytest.raises(SystemExit) as raised:
        main(["--snapshot", "--recipe", str(config)])
    assert raised.value.code == 2
    assert "--snapshot records CUDA's memory" in capsys.readouterr().err


def test_an_interrupt_while_results_are_written_leaves_those_that_were_there(tmp_path, monkeypatch):
    path, write_bytes = tmp_path / "new" / "results.json", Path.write_bytes
    documents.write(path, {"date": 1})

    def interrupted(self, data):
        write_bytes(self, data[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        documents.write(path, {"date": 2})
    assert json.loads(path.read_text()) == {"date": 1}
