import csv
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lightning_fsdp.bench.__main__ import main
from lightning_fsdp.bench.arms import Arm, Workload, choose_arms
from lightning_fsdp.bench.measure import RankMeasurement
from lightning_fsdp.bench.output import write
from lightning_fsdp.bench.report import LOSS_TOLERANCE, summarize
from lightning_fsdp.bench.report_page import format_table
from lightning_fsdp.bench.runner import Run
from lightning_fsdp.harness.environment import environment

WORKLOAD = Workload(
    config=Path("recipe.yaml"), num_ranks=2, precision="32-true", warmup_steps=1, timed_steps=3,
    observed_steps=1,
)  # fmt: skip


def arms(**changes):
    choice = {"engines": ["scratch"], "zero_stages": [3], "batch_sizes": [4], "grad_accums": [1]}
    return choose_arms(**{**choice, **changes})


def measured(arm, *, losses=(5.0, 4.0), step_s=(0.1, 0.3, 0.2), tokens=100, failure=None):
    ranks = [
        RankMeasurement(
            rank, 2, losses=list(losses), step_s=list(step_s), step_tokens=[tokens] * len(step_s),
            resting_bytes=1000, peak_bytes=3000 + rank, collectives={"send": 4.0},
            payload_bytes=8.0,
        )
        for rank in range(arm.num_processes(WORKLOAD))
    ]  # fmt: skip
    return Run(arm, 0, 9.0, Path("log.txt"), ranks=[] if failure else ranks, failure=failure)


def test_arms_are_all_combinations_with_two_references_per_batch_shape():
    chosen = arms(zero_stages=[2, 3], batch_sizes=[2, 4], grad_accums=[1, 2])
    assert len(chosen) == len(set(chosen)) == 16
    assert [arm.name for arm in chosen[:4]] == [
        "single_b2_a1", "ddp_b2_a1", "scratch_zero2_b2_a1", "scratch_zero3_b2_a1",
    ]  # fmt: skip


def test_one_process_takes_the_sequences_of_all_ranks():
    single, ddp, scratch = arms()
    for arm, batch_size in ((single, "8"), (ddp, "4"), (scratch, "4")):
        arguments = arm.recipe_arguments(WORKLOAD, Path("out"))
        assert arguments[arguments.index("--data.batch_size") + 1] == batch_size
    arguments = scratch.recipe_arguments(WORKLOAD, Path("out"))
    assert arguments[arguments.index("--trainer.strategy") + 1] == "scratch_fsdp_zero3"
    for engine in ("fsdp1", "fsdp2"):
        (*_, arm) = arms(engines=[engine], zero_stages=[2])
        arguments = arm.recipe_arguments(WORKLOAD, Path("out"))
        assert arguments[arguments.index("--trainer.strategy") + 1] == f"{engine}_zero2"


def test_tokens_per_second_is_all_tokens_over_all_time_not_a_mean_of_rates():
    arm = arms()[1]
    (row,) = summarize([arm], [measured(arm)], WORKLOAD)
    assert row.tokens_per_s == pytest.approx(2 * 300 / 0.6)
    assert row.step_ms == pytest.approx(200)
    assert row.peak_bytes == (3000, 3001)


def test_an_arm_whose_losses_differ_from_the_reference_is_wrong_not_fast():
    single, ddp, scratch = arms()
    off = measured(scratch, losses=(5.0, 4.0 + 2 * LOSS_TOLERANCE))
    rows = summarize([single, ddp, scratch], [measured(single), measured(ddp), off], WORKLOAD)
    assert [row.failure is None for row in rows] == [True, True, False]
    assert "losses differ" in rows[2].failure
    assert "scratch_zero3_b4_a1 WRONG" in format_table([asdict(row) for row in rows])


def test_a_loss_that_is_not_a_number_is_wrong():
    single, ddp, _ = arms()
    runs = [measured(single), measured(ddp, losses=(5.0, float("nan")))]
    assert summarize([single, ddp], runs, WORKLOAD)[1].failure is not None


def test_a_failed_arm_is_a_row_with_its_reason_and_the_others_come_out(tmp_path):
    single, ddp, scratch = chosen = arms()
    runs = [measured(single), measured(ddp, failure="exit code 1: boom"), measured(scratch)]
    rows = summarize(chosen, runs, WORKLOAD)
    write(tmp_path, rows, runs, {"command": "bench", **environment()})
    assert "FAILED" in (tmp_path / "report.md").read_text()
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["rows"][1]["failure"] == "exit code 1: boom"
    assert results["rows"][1]["tokens_per_s"] is None, "nothing measured is null, never 0"
    assert results["rows"][2]["tokens_per_s"] > 0
    with (tmp_path / "comparison.csv").open() as stream:
        table = list(csv.DictReader(stream))
    assert [line["arm"] for line in table] == [arm.name for arm in chosen]
    assert table[1]["tokens_per_s"] == ""


def test_an_arm_that_was_never_run_is_a_failure():
    arm = Arm(engine="ddp", zero_stage=None, batch_size=1, grad_accum=1)
    assert summarize([arm], [], WORKLOAD)[0].failure == "not run"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engines", "fsdp9"], "expected some of"),
        (["--stages", "1"], "expected 2 or 3, got 1"),
        (["--batch-sizes", "0"], "expected positive numbers, got 0"),
        (["--config", "nowhere.yaml"], "no file 'nowhere.yaml'"),
        (["--steps", "1"], "--steps: at least 2"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_a_size_that_is_named_twice_is_measured_once():
    assert arms(batch_sizes=[4, 4], grad_accums=[1, 1]) == arms()


def test_a_snapshot_is_recorded_before_anything_is_timed():
    (*_, arm) = arms()
    arguments = arm.recipe_arguments(replace(WORKLOAD, writes_snapshots=True), Path("out"))
    callbacks = json.loads(arguments[arguments.index("--trainer.callbacks") + 1])
    assert [callback["class_path"].rpartition(".")[2] for callback in callbacks] == [
        "Snapshot", "Measure",
    ]  # fmt: skip
    assert callbacks[0]["init_args"] == {"path": "out/memory_rank0.pickle", "step": 0}
