"""The comparison as a command: a real run, what it does about trouble, and engines that are broken.

One test has the command start its ranks; in the others they are forked from what has torch.
"""

import json

import pytest

from lightning_fsdp.compare.__main__ import main
from lightning_fsdp.compare.cases import DTYPES, ENGINES
from lightning_fsdp.compare.rows import ROWS
from lightning_fsdp.harness import processes
from tests.support import warm

BROKEN = "tests.support.broken_engines:"

# What each broken engine must turn red at W=2; everything else must stay green.
_READ_REDUCED = {"after-forward", "synced", "unsynced", "before-step", "on-reduced", "apart"}
RED = {
    "OwnShardRepeated": set(ROWS) - {"on-local"},
    "NoDivision": {*_READ_REDUCED, "after-step", "reduced-once"},
    # A test that looks once can notice nothing.
    "StaleGradient": {*_READ_REDUCED, "on-local", "reduced-once"} - {"after-forward"},
}


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.setattr(processes, "run_command", warm.run_command)


def compare(out, *arguments):
    """Exit code and ``report.json``."""
    code = main([*arguments, "--out", str(out)])
    return code, json.loads((out / "report.json").read_text())


@pytest.mark.quick
def test_every_cell_of_one_configuration_is_right(tmp_path, capsys, forked):
    code, report = compare(
        tmp_path,
        *("--engines", "scratch", "fsdp1", "fsdp2", "--stages", "3", "--dtypes", "fp32"),
        *("--models", "mlp", "--ranks", "2", "--width", "6", "--depth", "2"),
    )
    assert report["problems"] == []
    assert code == 0
    cells = {(cell["engine"], cell["row"]): cell for cell in report["cells"]}
    assert len(cells) == 3 * len(ROWS)
    for (engine, row), cell in cells.items():
        is_refused = row == "reduced-once" and engine != "scratch"
        assert cell["status"] == ("failed" if is_refused else "passed"), cell
        assert cell["right"] == (0 if is_refused else cell["total"])
        assert cell["ulps"] == (None if is_refused else 0), "exact at W=2, and looked at"
    assert all(control["complaint"] for control in report["controls"][1:])
    printed = capsys.readouterr().out
    assert (tmp_path / "report.md").read_text() in printed
    assert "Nothing unexpected." in printed


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.touch()
    with pytest.raises(SystemExit) as raised:
        main(["--out", str(taken)])
    assert raised.value.code == 2
    expected = f"error: argument --out: expected a folder, got the file {str(taken)!r}"
    assert expected in capsys.readouterr().err


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("num_ranks", "model", "stages", "dtypes"),
    [("1", "mlp", ["2"], ["bf16"]), ("2", "transformer", ["2"], ["bf16-fp32"])],
)
def test_what_is_recorded_is_so_on_one_rank_and_on_two(
    tmp_path, forked, num_ranks, model, stages, dtypes
):
    """Part of what ``make compare`` judges, by the record that users have.

    Another test here reads the MLP on two ranks, at stage 3 in fp32, and a broken engine the
    transformer at stage 3. The rest is left to that command.
    """
    assert set(dtypes) <= set(DTYPES)
    code, report = compare(
        tmp_path,
        *("--ranks", num_ranks, "--models", model, "--stages", *stages, "--dtypes", *dtypes),
    )
    assert report["problems"] == []
    assert code == 0
    assert len(report["cells"]) == len(ENGINES) * len(stages) * len(dtypes) * len(ROWS)


def test_a_verdict_other_than_the_recorded_one_is_an_exit_code(tmp_path):
    (tmp_path / "nothing.json").write_text(json.dumps({"2.13": []}))
    code, report = compare(
        tmp_path,
        *("--engines", "fsdp2", "--stages", "3", "--dtypes", "fp32", "--models", "mlp"),
        *("--ranks", "1", "--tests", "initial", "reduced-once"),
        *("--expected", str(tmp_path / "nothing.json")),
    )
    assert code == 1
    (problem,) = report["problems"]
    assert "micro-batches reduced once: failed at W=1: rank 0: micro-batch 0: Grad" in problem


def test_trouble_on_one_rank_is_said_and_the_rest_goes_on(tmp_path, forked):
    code, report = compare(
        tmp_path,
        *("--engines", BROKEN + "Trouble", "--models", "mlp"),
        *("--ranks", "2", "--tests", "initial", "synced", "--timeout", "6"),
    )
    assert code == 1
    cells = {(cell["zero_stage"], cell["dtype"], cell["row"]): cell for cell in report["cells"]}
    killed, raised = cells[2, "fp32", "initial"], cells[2, "bf16", "initial"]
    assert killed["status"] == raised["status"] == "crashed"
    assert "rank 1 left (killed by signal 9)" in killed["reason"]
    assert raised["reason"] == "rank 1: ValueError: only here", "not its echo on rank 0"
    assert cells[2, "bf16-fp32", "initial"]["status"] == "crashed", "a hang"
    assert cells[2, "fp32", "synced"]["reason"] == "not reached: 'initial' crashed"
    refused = cells[3, "fp32", "initial"]
    assert refused["status"] == "failed", "all ranks agree, and go on together"
    assert "NotImplementedError: nowhere" in refused["reason"]
    for dtype in ("bf16", "bf16-fp32"):
        for row in ("initial", "synced"):
            assert cells[3, dtype, row]["status"] == "passed"


def test_an_engine_that_this_torch_lacks_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "fsdp2", "nowhere.at.all:Engine")
    code, report = compare(tmp_path, "--engines", "fsdp2", "--ranks", "2", "--tests", "initial")
    assert code == 1
    assert {cell["status"] for cell in report["cells"]} == {"skipped"}
    assert "nowhere" in report["engines"]["fsdp2"]
    assert any(
        "engine missing: No module named 'nowhere'" in problem for problem in report["problems"]
    )


def test_missing_gpus_are_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    code, report = compare(tmp_path, "--device", "cuda", "--ranks", "2", "--tests", "initial")
    assert code == 1
    assert {cell["status"] for cell in report["cells"]} == {"skipped"}
    assert "W=2 needs 2 GPUs, this machine has 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("engine", "model"),
    [("OwnShardRepeated", "transformer"), ("NoDivision", "mlp"), ("StaleGradient", "mlp")],
)
def test_a_broken_engine_turns_every_row_red_that_should_be(tmp_path, forked, engine, model):
    code, report = compare(
        tmp_path,
        *("--engines", BROKEN + engine, "--dtypes", "fp32", "--stages", "3"),
        *("--ranks", "2", "--models", model),
    )
    assert code == 1
    assert {cell["status"] for cell in report["cells"]} <= {"passed", "failed"}
    assert {cell["row"] for cell in report["cells"] if cell["status"] == "failed"} == RED[engine]
