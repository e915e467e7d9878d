"""From cells to verdicts, ratios, surprises and the exit code."""

import json
import re

import pytest

from lightning_fsdp.compare.__main__ import main
from lightning_fsdp.compare.cases import Case, choose_cases, load_engine
from lightning_fsdp.compare.controls import Control
from lightning_fsdp.compare.models import Sizes
from lightning_fsdp.compare.report import describe_environment, format_report, make_report, write
from lightning_fsdp.compare.runner import Cell, Setup, skip_cases
from lightning_fsdp.compare.verdicts import (
    compare,
    expectation,
    ratios_of,
    surprises,
    verdict_of,
    works,
)


def case(engine, **changes):
    return Case(**{"engine": engine, "zero_stage": 3, "dtype": "fp32", "model": "mlp", **changes})


def cell(engine, world_size=2, status="passed", row="synced", right=None, total=10, **changes):
    right = (total if status == "passed" else 0) if right is None else right
    reason = "" if status == "passed" else "rank 0: inlet.bias: missing"
    return Cell(
        case=case(engine, **changes), world_size=world_size, row=row, status=status, right=right,
        total=total, reason=reason,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (True, True, "both work"),
        (True, False, "regression"),
        (False, True, "improvement"),
        (False, False, "both fail"),
    ],
)
def test_a_verdict_is_about_two_engines(before, after, verdict):
    assert verdict_of(before, after) == verdict


@pytest.mark.parametrize("bad", ["failed", "crashed"])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_verdict_is_over_all_numbers_of_ranks(at, bad):
    cells = [cell("fsdp1", size) for size in (1, 2, 4)]
    cells += [cell("fsdp2", size, bad if size == at else "passed") for size in (1, 2, 4)]
    (comparison,) = compare(cells, [])
    assert (comparison.before, comparison.after) == ("fsdp1", "fsdp2")
    assert (comparison.verdict, comparison.expected) == ("regression", "both work")


def test_the_scratch_core_is_compared_with_each():
    cells = [cell("scratch"), cell("fsdp1", status="failed"), cell("fsdp2")]
    verdicts = {(c.before, c.after): c.verdict for c in compare(cells, [])}
    assert verdicts == {
        ("fsdp1", "fsdp2"): "improvement",
        ("fsdp1", "scratch"): "improvement",
        ("fsdp2", "scratch"): "both work",
    }


def test_what_could_not_be_run_neither_works_nor_fails():
    assert works([cell("fsdp1"), cell("fsdp1", 4, "skipped")]) is True
    assert works([cell("fsdp1", 4, "skipped")]) is None
    cells = [cell("fsdp1"), cell("fsdp2", status="skipped")]
    assert compare(cells, [])[0].verdict == "not run"


def test_ratios_count_items_and_a_crash_counts_none():
    cells = [
        cell("fsdp1", row="initial"),
        cell("fsdp1", row="after-step", status="failed", right=5),
        cell("fsdp1", row="synced", status="crashed"),
        cell("fsdp1", row="unsynced", status="skipped"),
    ]
    ratios = ratios_of(cells)
    assert (ratios.parameters, ratios.gradients, ratios.micro_batches) == (0.75, 0.0, None)


def test_only_all_is_shown_as_100_per_cent_and_only_none_as_0():
    for right, shown in ((2000, 100), (1997, 99), (1500, 75), (3, 1), (0, 0)):
        text = format_report(_report([cell("fsdp1", right=right, total=2000)]))
        (row,) = re.findall(r"^\| fsdp1 .*\|$", text, re.MULTILINE)
        assert row.split("|")[6].strip() == str(shown), right


KNOWN = [{"engine": "fsdp2", "row": "synced", "dtype": "bf16", "why": "for this test"}]


def test_what_is_recorded_not_to_work_is_no_surprise_and_everything_else_is():
    assert surprises([cell("fsdp2", status="failed", dtype="bf16")], KNOWN) == []
    (other,) = surprises([cell("fsdp2", status="failed")], KNOWN)
    assert "fsdp2_zero3_fp32_mlp, gradients with sync: failed at W=2" in other
    (repaired,) = surprises([cell("fsdp2", dtype="bf16")], KNOWN)
    assert repaired.endswith("works at W=2, but is recorded not to")


def test_what_is_recorded_at_one_number_of_ranks_is_expected_at_no_other():
    known = [{"engine": "fsdp2", "row": "synced", "world_size": 1}]
    cells = [cell("fsdp2", 1, "failed"), cell("fsdp2", 2), cell("fsdp1", 1), cell("fsdp1", 2)]
    assert surprises(cells, known) == []
    (comparison,) = compare(cells, known)
    assert comparison.verdict == comparison.expected == "regression"
    (other,) = surprises([cell("fsdp2", 2, "failed")], known)
    assert "failed at W=2" in other


def test_a_crash_is_always_a_surprise():
    (crash,) = surprises([cell("fsdp2", status="crashed", dtype="bf16")], KNOWN)
    assert "crashed at W=2" in crash


def test_expectations_are_those_of_the_newest_version_that_is_not_newer(tmp_path):
    path = tmp_path / "expected.json"
    path.write_text(json.dumps({"2.13": KNOWN, "2.9": [], "2.20": []}))
    for version, chosen in (
        *(("2.13.0+cpu", "2.13"), ("2.14.1", "2.13"), ("2.12", "2.9")),
        *(("2.8", "2.9"), ("3.0", "2.20")),
    ):
        assert expectation(version, path)[0] == chosen
    assert expectation("2.13", path)[1] == KNOWN


def _report(cells, controls=()):
    document = describe_environment(["scratch"], "compare")
    return make_report(document, cells, controls, expected=("2.13", KNOWN), seconds=1.0)


def test_a_control_that_the_judge_missed_is_a_problem():
    (problem,) = _report([cell("fsdp1")], [Control("one NaN", False, None)]).problems
    assert "negative control 'one NaN'" in problem
    assert not _report([cell("fsdp1")], [Control("one NaN", False, "not finite")]).problems


def test_too_few_devices_are_a_problem_and_the_rest_is_reported(tmp_path):
    setup = Setup(rows=["synced"], device="cuda", timeout_s=1, out=tmp_path)
    skipped = skip_cases([case("fsdp1")], 4, setup, "W=4 needs 4 GPUs, this machine has 1")
    report = _report([cell("fsdp1"), *skipped])
    assert report.problems == ["1 tests not run: W=4 needs 4 GPUs, this machine has 1"]
    text = format_report(report)
    assert "1 passed, 1 skipped" in text
    assert "1/1" in text


def test_the_files_hold_the_same_as_the_table(tmp_path):
    cells = [cell("fsdp1"), cell("fsdp1", 4), cell("fsdp2"), cell("fsdp2", 4, "failed")]
    report = _report(cells)
    write(report, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| gradients with sync | 1/1   | 0/1   | regression" in text
    assert "rank 0: inlet.bias: missing" in text
    document = json.loads((tmp_path / "report.json").read_text())
    assert [c["status"] for c in document["cells"]] == ["passed"] * 3 + ["failed"]
    assert [v["verdict"] for v in document["verdicts"]] == ["regression"]
    assert [r["gradients"] for r in document["ratios"]] == [1.0, 1.0, 1.0, 0.0]
    assert document["problems"] == list(report.problems) != []
    logs = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert logs == [
        *("fsdp1_zero3_fp32_mlp_w2.txt", "fsdp1_zero3_fp32_mlp_w4.txt"),
        *("fsdp2_zero3_fp32_mlp_w2.txt", "fsdp2_zero3_fp32_mlp_w4.txt"),
    ]
    assert "failed, 0 of 10" in (tmp_path / "logs" / logs[-1]).read_text()


def test_cases_are_all_combinations_of_their_own_names():
    cases = choose_cases(
        engines=["scratch", "fsdp1", "scratch"], zero_stages=[2, 3], dtypes=["fp32", "bf16"],
        models=["mlp", "transformer"], sizes=Sizes(),
    )  # fmt: skip
    assert len(cases) == len({c.name for c in cases}) == 16


def test_what_is_no_engine_is_refused():
    with pytest.raises(TypeError, match="expected a subclass of Engine"):
        load_engine("pathlib:Path")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engines", "fsdp9"], "or module:Class, got 'fsdp9'"),
        (["--engines", ":Engine"], "or module:Class, got ':Engine'"),
        (["--engines", "mine.engine:"], "or module:Class, got 'mine.engine:'"),
        (["--engines", "mine.engine:X"], "'mine.engine:X': missing: No module named 'mine'"),
        (["--engines", "scratch", "pathlib:Path"], "expected a subclass of Engine, got <class"),
        (["--stages", "1"], "argument --stages: invalid choice: 1"),
        (["--dtypes", "fp8"], "argument --dtypes: invalid choice: 'fp8'"),
        (["--models", "gpt"], "argument --models: invalid choice: 'gpt'"),
        (["--ranks", "0"], "argument --ranks: expected 1 or more, got '0'"),
        (["--width", "0"], "argument --width: expected 1 or more, got '0'"),
        (["--expected", "nowhere.json"], "no file 'nowhere.json'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


ENTRY = '{"2.13": [{"engine": "fsdp1", "row": "synced"'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"2.13": [', "Expecting value: line 1"),
        ("{}", "expected lists by version of torch, such as"),
        ('["2.13"]', "expected lists by version of torch, such as"),
        ('{"new": []}', "'new': expected a version such as '2.13' with a list"),
        ('{"2.13": {}}', "'2.13': expected a version such as '2.13' with a list"),
        ('{"2.13": [{"engine": "fsdp1"}]}', "expected an object with 'engine' and 'row'"),
        (f'{ENTRY}, "dtyp": "bf16"}}]}}', "expected some of engine, row, .*, got 'dtyp'"),
        (f'{ENTRY}, "dtype": "bf17"}}]}}', "dtype: expected one of fp32, .*, got 'bf17'"),
    ],
)
def test_a_file_without_expectations_is_named_before_anything_runs(
    text, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("lightning_fsdp.compare.__main__.run_cases", pytest.fail)
    path = tmp_path / "expected.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as raised:
        main(["--expected", str(path), "--out", str(tmp_path / "out")])
    assert raised.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.search(f"error: --expected: '{path}': .*{message}", said), said


def test_a_test_that_is_named_twice_is_run_once(tmp_path, monkeypatch):
    """The second time its ranks would read how it ended the first time."""
    run = []

    def note(cases, world_size, setup):
        run.extend(setup.rows)
        return []

    monkeypatch.setattr("lightning_fsdp.compare.__main__.run_cases", note)
    tests = ["synced", "initial", "synced"]
    main(["--engines", "scratch", "--ranks", "1", "--tests", *tests, "--out", str(tmp_path)])
    assert run == ["synced", "initial"]
