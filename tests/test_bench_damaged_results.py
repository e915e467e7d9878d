"""Results that are damaged, of older versions, or lack figures."""

import functools
import math
import operator

import pytest

from lightning_fsdp.bench import output
from lightning_fsdp.bench.results import read
from tests.support.bench_results import (
    FAILED,
    SMALL,
    as_results,
    document_of,
    folder_of,
)


def test_values_of_rows_that_are_not_numbers_count_as_not_measured():
    document = document_of(**SMALL)
    document["rows"][2]["mfu"] = math.inf
    assert as_results(document).arms[2].mfu is None


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
        (
            ("rows", 1, "grad_accum"),
            0,
            "rows[1, ddp_b2_a1].grad_accum (input should be greater than or equal to 1, got 0)",
        ),
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
            f"{OF_RANK}.step_s[1] (input should be greater than 0, got 0.0)",
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
    expected = "runs[2, ddp_b2_a1].ranks[0].step_s (list should have at least 1 item"
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
    tmp_path, monkeypatch
):
    monkeypatch.setattr(output, "PICTURES", {})  # not to wait for them
    document = document_of(**SMALL)
    run = next(run for run in document["runs"] if run["arm"] == "ddp_b2_a1")
    del run["ranks"][0]["losses"][-2:]
    assert len(as_results(document).arms[1].step_losses) == 3
    output.derive(folder_of(document, tmp_path))
