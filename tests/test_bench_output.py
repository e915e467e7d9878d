import csv
import functools
import json
import math
import operator
import re
from dataclasses import asdict, replace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from lightning_fsdp.bench import modes, output, plots, tensorboard
from lightning_fsdp.bench.__main__ import main
from lightning_fsdp.bench.arms import choose_arms
from lightning_fsdp.bench.plots import PICTURES
from lightning_fsdp.bench.records import Row, Run
from lightning_fsdp.bench.report_page import page
from lightning_fsdp.bench.results import read
from lightning_fsdp.bench.scaling import Point
from lightning_fsdp.bench.theory import Demand
from lightning_fsdp.harness.environment import environment
from tests.support.bench_results import (
    as_results,
    document_of,
    results_of,
    step_ms,
    tokens_per_s,
    without,
    workload,
)
from tests.test_bench_report import made, measured

SMALL = {"engines": ["scratch"], "stages": [3], "batch_sizes": [2], "accums": [1]}
FAILED = {"scratch_zero3_b2_a1": ("out of memory", "exit code 1: DefaultCPUAllocator: no memory")}


def arms():
    return choose_arms(engines=["scratch"], zero_stages=[3], batch_sizes=[2], grad_accums=[1])


def folder_of(document, path):
    (path / "results.json").write_text(json.dumps(document))
    return path


@pytest.fixture
def no_pictures(monkeypatch):
    """Tests of the rest need not wait for them."""
    monkeypatch.setattr(plots, "PICTURES", {})


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
    assert "results.json: expected the results of" in capsys.readouterr().err


def test_results_are_json_that_any_reader_takes(tmp_path, no_pictures):
    runs = [measured(arm, losses=(5.0, math.nan)) for arm in arms()]
    rows = modes.summarize(arms(), runs, workload())
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

    monkeypatch.setattr(plots, "PICTURES", {"tokens_per_s": fail})
    runs = [measured(arm) for arm in arms()]
    rows = modes.summarize(arms(), runs, workload())
    with pytest.raises(RuntimeError, match="no pictures today"):
        output.write(tmp_path, made(rows, runs))
    assert len(read(tmp_path).arms) == 3
    assert "scratch_zero3_b2_a1" in (tmp_path / "report.md").read_text()


def test_total_failure_is_told_by_table_report_and_exit_code(
    tmp_path, monkeypatch, capsys, no_pictures
):
    def run_arm(arm, workload, *, repeat, out, timeout_s):
        return Run(arm.name, repeat, 1.0, out / "log.txt", failure="exit code 1: boom")

    monkeypatch.setattr(modes, "run_arm", run_arm)
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


def section(report, title):
    return report.split(f"## {title}\n")[1].split("\n## ")[0].strip()


def test_the_report_tells_failures_limits_and_what_is_missing():
    report = page(results_of(**SMALL, failures=FAILED))
    assert section(report, "Failures") == (
        "* `scratch_zero3_b2_a1`: exit code 1: DefaultCPUAllocator: no memory (out of memory)"
    )
    missing = section(report, "What is missing")
    assert "CUDA memory: not measured for any arm." in missing
    assert "Failed (out of memory): scratch_zero3_b2_a1." in missing
    assert "Utilization" not in missing
    assert "scratch_zero3" not in section(report, "Distance to the limits")


def test_the_report_says_how_far_each_arm_is_from_its_limits():
    report = page(results_of(**SMALL))
    (line,) = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in section(report, "Distance to the limits").splitlines()
        if "scratch_zero3" in line
    ]
    whole = step_ms(arms()[2])
    figures = [f"{whole:.3g}", f"{0.6 * whole:.3g}", f"{0.1 * whole:.3g}",
               f"{0.05 * whole:.3g}", "1.67", "11", "11", "17.4", "16.5"]  # fmt: skip
    assert line == ["scratch_zero3_b2_a1", *figures]


def test_the_report_tells_where_references_are_not_fused():
    results = results_of(**SMALL)
    assert "not fused" not in page(results)
    results.workload["precision"] = "bf16-mixed"
    assert "references (single, ddp) step with an optimizer that is not fused" in page(results)


def test_mfu_comes_with_its_formula_and_the_assumed_peak():
    told = section(page(results_of(**SMALL)), "Model FLOPs utilization")
    assert "FLOPs per token x tokens/s of all ranks / (assumed peak FLOP/s of a rank" in told
    assert "2e+11 FLOP/s per rank" in told
    assert "31.00" in told
    without_peak = section(page(results_of(**SMALL, is_old=True)), "Model FLOPs utilization")
    assert "without an assumed peak there is no MFU" in without_peak


def test_what_was_not_measured_is_a_question_mark_never_zero():
    report = page(results_of(**SMALL, is_old=True))
    assert "Nothing." not in report
    for title in ("Where a step's time goes (rank 0)", "Distance to the limits"):
        cells = section(report, title).splitlines()[-5 if "time" in title else -6].split("|")
        assert "?" in cells[3].strip()
        assert "0" not in {cell.strip() for cell in cells[2:5]}


def test_arms_that_are_not_in_the_folder_are_named():
    sweep = as_results(
        without(document_of(engines=["scratch"]), "scratch_zero2_b4_a2", "ddp_b1_a1")
    )
    expected = "* Not in these results: ddp at 1 x 1, scratch ZeRO-2 at 4 x 2."
    assert expected in page(sweep).splitlines()


def events(folder):
    reader = EventAccumulator(str(folder), size_guidance={"images": 0})
    reader.Reload()
    return reader


def hparams(reader):
    start = reader.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    info = plugin_data_pb2.HParamsPluginData.FromString(start).session_start_info
    return {name: value.string_value or value.number_value for name, value in info.hparams.items()}


def metrics_of(reader):
    content = reader.SummaryMetadata("_hparams_/experiment").plugin_data.content
    info = plugin_data_pb2.HParamsPluginData.FromString(content).experiment
    return {metric.name.tag for metric in info.metric_infos}


def test_tensorboard_has_a_run_per_arm_with_scalars_and_hparams(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "PICTURES", {"losses": PICTURES["losses"]})
    output.derive(
        folder_of(
            document_of(**SMALL, failures={"ddp_b2_a1": FAILED["scratch_zero3_b2_a1"]}), tmp_path
        )
    )
    board = tmp_path / "tensorboard"
    runs = {"single_b2", "ddp_b2", "scratch-3_b2", "pictures"}
    assert {run.name for run in board.iterdir()} == runs
    arm = arms()[2]
    reader = events(board / "scratch-3_b2")
    losses = reader.Scalars("train/loss")
    assert [event.step for event in losses] == list(range(5))
    assert [event.value for event in losses] == pytest.approx(
        [8.305 - 0.05 * step for step in range(5)]
    )
    assert reader.Scalars("throughput/step_ms")[0].value == pytest.approx(step_ms(arm))
    speeds, speed = reader.Scalars("throughput/tokens_per_s"), tokens_per_s(arm, workload())
    assert [event.step for event in speeds] == [1, 2, 3]  # after a warm-up step
    assert speeds[2].value == pytest.approx(speed)
    assert reader.Scalars("result/tokens_per_s")[0].value == pytest.approx(speed)
    assert reader.Scalars("result/parts/exposed_ms")[0].value == pytest.approx(0.1 * step_ms(arm))
    assert "result/cuda_peak_reserved_bytes" not in reader.Tags()["scalars"]
    assert hparams(reader) == {
        "engine": "scratch", "stage": "3", "batch": 2, "accumulation": 1, "ranks": 2,
    }  # fmt: skip
    failed = events(board / "ddp_b2")
    assert "result/tokens_per_s" in metrics_of(failed), "any run may be asked for the columns"
    assert metrics_of(failed) == metrics_of(reader)
    assert failed.Tags()["scalars"] == [], "nothing measured is no scalar, never 0"
    assert hparams(failed)["trouble"] == "out of memory"
    assert "stage" in sorted(hparams(failed))[:5], "TensorBoard shows five, by the alphabet"
    assert events(board / "pictures").Tags()["images"] == ["losses"]


def test_redrawing_leaves_no_run_of_an_arm_that_is_gone(tmp_path, no_pictures):
    output.derive(folder_of(document_of(**SMALL), tmp_path))
    output.derive(folder_of(without(document_of(**SMALL), "ddp_b2_a1"), tmp_path))
    assert not (tmp_path / "tensorboard" / "ddp_b2").exists()
    assert len(events(tmp_path / "tensorboard" / "single_b2").Scalars("train/loss")) == 5


def test_runs_have_short_names_that_tell_all_arms_apart():
    results = results_of()
    names = [tensorboard.run_name(arm) for arm in results.arms]
    assert len(set(names)) == len(names)
    assert names[-1] == "fsdp2-3_b4_a2"


def test_values_of_rows_that_are_not_numbers_count_as_not_measured():
    document = document_of(**SMALL)
    document["rows"][2]["mfu"] = math.inf
    assert as_results(document).arms[2].figures.mfu is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is told without CUDA")
def test_a_snapshot_without_cuda_is_refused_by_name(tmp_path, capsys):
    config = tmp_path / "recipe.yaml"
    config.touch()
    with pytest.raises(SystemExit) as raised:
        main(["--snapshot", "--recipe", str(config)])
    assert raised.value.code == 2
    assert "--snapshot records CUDA's memory" in capsys.readouterr().err


RANK = ("runs", 1, "ranks", 0)
OF_RANK = r"runs[1, single_b2_a1].ranks[0]"
MISSING = object()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("rows",), [1], "rows[0] (input should be an object, got 1)"),
        (("rows",), None, "rows (input should be a valid array, got null)"),
        (
            ("rows", 1, "batch_size"),
            "4",
            'rows[1, ddp_b2_a1].batch_size (input should be a valid integer, got "4")',
        ),
        (("rows", 1, "grad_accum"), 0, "rows[1, ddp_b2_a1].grad_accum (at least 1, got 0)"),
        (
            ("rows", 1, "engine"),
            3,
            "rows[1, ddp_b2_a1].engine (input should be a valid string, got 3)",
        ),
        (
            ("rows", 1, "tokens_per_s"),
            "x",
            'rows[1, ddp_b2_a1].tokens_per_s (input should be a valid number, got "x")',
        ),
        (
            ("rows", 1, "mfu"),
            True,
            "rows[1, ddp_b2_a1].mfu (input should be a valid number, got true)",
        ),
        (("rows", 1, "peak_bytes"), [1, "x"], "rows[1, ddp_b2_a1].peak_bytes[1] (input"),
        (
            ("rows", 1, "theory", "payload_bytes"),
            [],
            "theory.payload_bytes (input should be a valid number, got [])",
        ),
        (
            ("rows", 1, "collectives"),
            [],
            "rows[1, ddp_b2_a1].collectives (input should be an object, got [])",
        ),
        (("command",), MISSING, "got command (field required)"),
        (("date",), None, "got date (input should be a valid string, got null)"),
        (("machine",), None, "got machine (input should be an object, got null)"),
        (("versions",), {}, "got versions.torch (field required)"),
        (("workload",), None, "got workload (input should be an object, got null)"),
        (("runs",), None, "got runs (input should be a valid array, got null)"),
        (("runs", 0, "arm"), MISSING, "got runs[0].arm (field required)"),
        (("runs", 1, "ranks"), None, "runs[1, single_b2_a1].ranks (input should be a valid array"),
        ((*RANK, "losses"), MISSING, f"{OF_RANK}.losses (field required)"),
        ((*RANK, "losses"), None, f"{OF_RANK}.losses (input should be a valid array, got null)"),
        ((*RANK, "step_s"), None, f"{OF_RANK}.step_s (input should be a valid array, got null)"),
        (
            (*RANK, "step_s"),
            [None] * 3,
            f"{OF_RANK}.step_s[0] (input should be a valid number, got null)",
        ),
        (
            (*RANK, "step_s"),
            [0.1, 0.0, 0.1],
            f"{OF_RANK}.step_s[1] (a finite time of more than 0 seconds, got 0.0)",
        ),
        (
            (*RANK, "step_s"),
            [0.1],
            "single_b2_a1] (step_s and step_tokens of all ranks are equally many, got [1, 3])",
        ),
        (
            (*RANK, "step_tokens"),
            None,
            f"{OF_RANK}.step_tokens (input should be a valid array, got null)",
        ),
        (
            (*RANK, "timeline"),
            [[0, None]],
            f"{OF_RANK}.timeline[0][1] (input should be a valid integer, got null)",
        ),
        ((*RANK, "timeline"), [[0]], f"{OF_RANK}.timeline[0][1] (field required)"),
    ],
)
def test_damaged_results_are_refused_with_the_place_of_the_damage(
    place, value, message, tmp_path, capsys
):
    results = document_of(**SMALL)
    *outer, name = place
    of = functools.reduce(operator.getitem, outer, results)
    if value is MISSING:
        del of[name]
    else:
        of[name] = value
    assert output.redraw(folder_of(results, tmp_path)) == 1
    told = capsys.readouterr().err
    start = f"error: {tmp_path}/results.json: expected the results of `python -m lightning_fsdp."
    assert told.startswith(start)
    assert message in told
    assert "Measure again, or name another folder." in told


def test_results_without_timed_steps_are_refused(tmp_path, capsys):
    results = document_of(**SMALL)
    for rank in results["runs"][2]["ranks"]:
        rank.update(step_s=[], step_tokens=[])
    assert output.redraw(folder_of(results, tmp_path)) == 1
    expected = "runs[2, ddp_b2_a1].ranks[0].step_s (without a timed step)"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("is_old", [False, True])
def test_results_of_old_and_new_versions_are_whole(is_old, tmp_path):
    failures = {**FAILED, "ddp_b2_a1": ("wrong losses", "losses differ")}
    results = document_of(**SMALL, failures=failures, is_old=is_old)
    assert len(read(folder_of(results, tmp_path)).arms) == 3
    for run in results["runs"]:
        for rank in run["ranks"]:
            rank["units"] = [[793088, "inner", 0]]
    assert len(read(folder_of(results, tmp_path)).arms) == 3
    for name in ("runs", "workload"):
        del results[name]
    assert len(read(folder_of(results, tmp_path)).arms) == 3


def test_ranks_with_different_numbers_of_losses_are_wrong_and_everything_comes_out(
    tmp_path, no_pictures
):
    document = document_of(**SMALL)
    run = next(run for run in document["runs"] if run["arm"] == "ddp_b2_a1")
    del run["ranks"][0]["losses"][-2:]
    assert len(as_results(document).arms[1].step_losses) == 3
    output.derive(folder_of(document, tmp_path))


def test_calls_stand_beside_theory_without_what_it_does_not_count():
    demanded = Demand({"all_gather": 6, "reduce_scatter": 5}, 1.0)
    raw = {"send": 33.0, "all_gather": 7.0, "reduce_scatter": 5.0, "all_reduce": 3.0}
    row = Row("x", "fsdp2", 3, 1, 1, num_processes=2, collectives=raw, theory=demanded)
    counted = {"all_gather": 6.0, "reduce_scatter": 5.0}
    assert replace(row, data_collectives=counted).data_calls == counted
    assert row.data_calls == {"all_gather": 7.0, "reduce_scatter": 5.0}
    assert replace(row, theory=None).data_calls == raw
    assert replace(row, collectives=None).data_calls is None
