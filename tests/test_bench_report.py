import csv
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_fsdp.bench import output
from lightning_fsdp.bench.arms import Workload, choose_arms
from lightning_fsdp.bench.limits import Limits, measure_limits
from lightning_fsdp.bench.output import write
from lightning_fsdp.bench.parts import Parts
from lightning_fsdp.bench.records import RankMeasurement, Run
from lightning_fsdp.bench.report import LOSS_TOLERANCE, summarize
from lightning_fsdp.bench.report_page import format_table
from lightning_fsdp.bench.results import Results
from lightning_fsdp.bench.theory import UnitFacts
from lightning_fsdp.harness import processes
from lightning_fsdp.harness.environment import environment
from tests.support import warm

WORKLOAD = Workload(
    config=Path("recipe.yaml"), num_ranks=2, accelerator="cpu", precision="32-true",
    warmup_steps=1, timed_steps=3,
    profiled_steps=1, observed_steps=1,
)  # fmt: skip


def arms(**changes):
    choice = {"engines": ["scratch"], "zero_stages": [3], "batch_sizes": [4], "grad_accums": [1]}
    return choose_arms(**{**choice, **changes})


UNITS = [UnitFacts(1000, "inner", 1, 0), UnitFacts(3000, "first", 1, 1)]
LIMITS = Limits(
    unit_bytes=1000, gather_bytes_per_s=5e4, reduce_bytes_per_s=2e4, pair_bytes_per_s=None,
    flops_per_s=1e6,
)  # fmt: skip


COUNTED = {
    "payload_bytes": 8.0, "collective_bytes": {"send": 8.0}, "flops_per_token": 10.0,
    "units": UNITS,
}  # fmt: skip


def measured(
    arm, *, losses=(5.0, 4.0), step_s=(0.1, 0.3, 0.2), tokens=100, failure=None, **changes
):
    ranks = [
        RankMeasurement(
            rank, 2, losses=list(losses), step_s=list(step_s), step_tokens=[tokens] * len(step_s),
            resting_bytes=1000, peak_bytes=3000 + rank, collectives={"send": 4.0},
            **{**COUNTED, **changes},
        )
        for rank in range(arm.num_processes(WORKLOAD))
    ]  # fmt: skip
    return Run(arm.name, 0, 9.0, Path("log.txt"), ranks=[] if failure else ranks, failure=failure)


def made(rows, runs):
    return Results(command="bench", **environment(), rows=rows, runs=runs)


def test_arms_are_all_combinations_with_two_references_per_batch_shape():
    chosen = arms(zero_stages=[2, 3], batch_sizes=[2, 4], grad_accums=[1, 2])
    assert len(chosen) == len(set(chosen)) == 16
    assert [arm.name for arm in chosen[:4]] == [
        "single_b2_a1", "ddp_b2_a1", "scratch_zero2_b2_a1", "scratch_zero3_b2_a1",
    ]  # fmt: skip


def test_quartiles_of_two_steps_are_no_faster_and_no_slower_than_both():
    single = arms()[0]
    (row,) = summarize([single], [measured(single, step_s=(0.1, 0.2))], WORKLOAD)
    quartiles = row.step_ms_q1, row.step_ms, row.step_ms_q3
    assert quartiles == pytest.approx((100, 150, 200))


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


def test_nothing_that_a_recipe_says_of_its_length_its_place_or_its_beginning_holds():
    arm = arms()[2]
    work = replace(WORKLOAD, overrides=("--trainer.num_nodes", "8"))  # of a simulated world
    arguments = arm.recipe_arguments(work, Path("out"))
    said = {a: b for a, b in itertools.pairwise(arguments) if a.startswith("--")}
    assert said["--trainer.max_steps"] == str(WORKLOAD.total_steps)
    assert said["--trainer.max_epochs"] == "-1"
    for name in ("--trainer.max_time", "--trainer.limit_train_batches", "--ckpt_path"):
        assert said[name] == "null"
    assert (said["--trainer.fast_dev_run"], said["--trainer.overfit_batches"]) == ("false", "0")
    nodes = [b for a, b in itertools.pairwise(arguments) if a == "--trainer.num_nodes"]
    assert nodes == ["1", "8"], "the last one counts"


def test_references_in_mixed_precision_have_an_optimizer_that_lightning_clips():
    def is_unfused(arm, precision):
        arguments = arm.recipe_arguments(replace(WORKLOAD, precision=precision), Path("out"))
        return "--model.optimizer.fused false" in " ".join(arguments)

    assert [is_unfused(arm, "bf16-mixed") for arm in arms()] == [True, True, False]
    for precision in ("32-true", "bf16-true"):
        assert not any(is_unfused(arm, precision) for arm in arms())


def test_half_precision_may_leave_the_reference_by_more_and_not_by_anything():
    for precision in ("bf16-mixed", "bf16-true", "16-mixed"):
        for gap, kind in ((5 * LOSS_TOLERANCE, None), (0.1, "wrong losses")):
            _, ddp, scratch = arms()
            runs = [measured(ddp), measured(scratch, losses=(5.0, 4.0 + gap))]
            rows = summarize([ddp, scratch], runs, replace(WORKLOAD, precision=precision))
            assert rows[1].failure_kind == kind


def test_a_step_that_stalls_moves_no_median():
    arm = arms()[1]
    (row,) = summarize([arm], [measured(arm, step_s=(0.1, 5.0, 0.2))], WORKLOAD)
    assert row.tokens_per_s == pytest.approx(2 * 100 / 0.2), "of both ranks"
    assert row.step_ms == pytest.approx(200)
    assert row.peak_bytes == [3000, 3001]


def test_an_arm_whose_losses_differ_from_the_reference_is_wrong_not_fast():
    single, ddp, scratch = arms()
    off = measured(scratch, losses=(5.0, 4.0 + 2 * LOSS_TOLERANCE))
    rows = summarize([single, ddp, scratch], [measured(single), measured(ddp), off], WORKLOAD)
    assert [row.failure is None for row in rows] == [True, True, False]
    assert "losses differ" in rows[2].failure
    assert "scratch_zero3_b4_a1 WRONG" in format_table(rows)


@pytest.mark.parametrize(
    ("precision", "factor", "kind"),
    [
        ("32-true", 1.0005, None),
        ("32-true", 2.0, "wrong gradients"),
        ("32-true", float("nan"), "wrong gradients"),
        ("bf16-mixed", 1.02, None),
        ("bf16-mixed", 0.5, "wrong gradients"),
    ],
)
def test_an_arm_whose_gradients_have_another_norm_is_wrong(precision, factor, kind):
    single, ddp, scratch = arms()
    runs = [measured(single, grad_norm=3.0), measured(ddp), measured(scratch, grad_norm=3 * factor)]
    rows = summarize([single, ddp, scratch], runs, replace(WORKLOAD, precision=precision))
    assert [row.failure_kind for row in rows] == [None, None, kind]
    assert rows[2].loss_gap == 0, "the losses are those of the reference"


def test_late_in_a_run_rounding_may_have_grown():
    single, _, scratch = arms()
    expected = [5.0 - 0.1 * i for i in range(10)]
    for at, gap, kind in (
        (9, 2 * LOSS_TOLERANCE, None),
        (9, 20 * LOSS_TOLERANCE, "wrong losses"),
        (5, 2 * LOSS_TOLERANCE, "wrong losses"),
    ):
        losses = [loss + gap * (i == at) for i, loss in enumerate(expected)]
        runs = [measured(single, losses=expected), measured(scratch, losses=losses)]
        assert summarize([single, scratch], runs, WORKLOAD)[1].failure_kind == kind, (at, gap)


def test_a_loss_that_is_not_a_number_is_wrong():
    single, ddp, _ = arms()
    runs = [measured(single), measured(ddp, losses=(5.0, float("nan")))]
    assert summarize([single, ddp], runs, WORKLOAD)[1].failure_kind == "wrong losses"
    (row,) = summarize([single], [measured(single, losses=(5.0, float("nan")))], WORKLOAD)
    assert row.failure == "a loss is not a finite number", "the reference is judged as well"


def test_missing_losses_are_wrong_and_do_not_stop_the_report():
    single, ddp, scratch = arms()
    runs = [measured(single), measured(ddp, losses=(5.0,)), measured(scratch)]
    runs[2].ranks[1].losses = [5.0]
    rows = summarize([single, ddp, scratch], runs, WORKLOAD)
    assert [row.failure_kind for row in rows] == [None, "wrong losses", "wrong losses"]
    assert "numbers of losses differ: 1, 2" in rows[1].failure
    assert "scratch_zero3_b4_a1 WRONG" in format_table(rows)


def test_parts_are_medians_and_null_where_a_step_has_none():
    arm = arms()[1]
    steps = [Parts(compute_s=0.1 * k, exposed_s=0.01 if k else None, whole_s=0.2) for k in range(3)]
    (row,) = summarize([arm], [measured(arm, parts=steps)], WORKLOAD)
    measured_ms = {name: ms for name, ms in row.parts_ms.items() if ms is not None}
    assert measured_ms == {"compute_ms": pytest.approx(100), "whole_ms": pytest.approx(200)}
    assert row.parts_ms["exposed_ms"] is None
    (row,) = summarize([arm], [measured(arm)], WORKLOAD)
    assert (row.parts_ms, row.host_ms, row.utilization_percent) == (None, None, None)
    assert row.cuda_peak_allocated_bytes == row.peak_rss_bytes == [None, None]


def test_utilization_is_the_mean_of_what_was_sampled():
    arm = arms()[1]
    samples = [(0.1, 20.0), (0.2, 90.0), (0.3, 70.0)]
    run = measured(arm, utilization=samples, utilization_of="cpu")
    (row,) = summarize([arm], [run], WORKLOAD)
    assert (row.utilization_percent, row.utilization_of) == (60.0, "cpu")


def test_model_flops_utilization_is_of_all_processes_peaks():
    arm = arms()[1]
    (row,) = summarize([arm], [measured(arm)], WORKLOAD, peak_flops=2e4)
    assert row.mfu == pytest.approx(10 * row.tokens_per_s / (2 * 2e4))
    assert summarize([arm], [measured(arm)], WORKLOAD)[0].mfu is None


def test_each_arm_is_compared_with_what_the_machine_allows():
    chosen = arms()
    runs = [measured(arm) for arm in chosen]
    rows = summarize(chosen, runs, WORKLOAD, limits=LIMITS)
    assert [row.compute_limit_ms for row in rows] == pytest.approx([200, 100, 100])
    # Half of the bytes leave a rank: of DDP all twice, of ZeRO-3 the inner unit thrice, the first
    # one twice.
    sent = [0, 4000, 0.5 * (3 * 1000 + 2 * 3000)]
    assert [row.theory.sent_bytes for row in rows] == sent
    expected = [nbytes / 5e4 * 1e3 for nbytes in sent]
    assert [row.communication_limit_ms for row in rows] == pytest.approx(expected)
    assert rows[2].times_limit == pytest.approx(200 / 100)
    unlimited = summarize(chosen, runs, WORKLOAD)
    assert [row.communication_limit_ms for row in unlimited] == [0, None, None]
    assert [row.times_limit for row in unlimited] == [1, None, None]
    alone = summarize(chosen[1:], runs[1:], WORKLOAD, limits=LIMITS)
    assert [row.compute_limit_ms for row in alone] == [None, None]
    assert [row.times_limit for row in alone] == [None, None]
    assert rows[2].theory.payload_bytes == sent[2]
    on_cuda = summarize(chosen, runs, replace(WORKLOAD, accelerator="cuda"), limits=LIMITS)[2]
    assert on_cuda.theory.sent_bytes == sent[2]
    assert on_cuda.theory.payload_bytes == (3 * 1000 + 2 * 3000 - 4000) / 2 + 4000
    mixed = summarize(chosen, runs, replace(WORKLOAD, precision="bf16-mixed"))
    gathered = (3 * 1000 + 2 * 3000 - 4000) / 2
    assert [row.theory.sent_bytes for row in mixed] == [0, 4000, 0.5 * (gathered + 4000)]


def test_the_table_shows_what_a_rank_sends_by_whichever_collectives():
    _, ddp, scratch = chosen = arms()
    gathered = {"all_gather": 1e6, "reduce_scatter": 4e6}
    runs = [
        measured(ddp, payload_bytes=5e6, collective_bytes=gathered),
        measured(scratch, payload_bytes=3e6, collective_bytes={"send": 3e6}),
    ]
    rows = summarize(chosen[1:], runs, WORKLOAD)
    assert [row.sent_bytes for row in rows] == [3e6, 3e6]
    rows.append(replace(rows[1], sent_bytes=None))
    title, _, *lines = (line.split("|")[1:-1] for line in format_table(rows).splitlines())
    place = [name.strip() for name in title].index("MB sent per step")
    assert [line[place].strip() for line in lines] == ["3.0", "3.0", "?"]


def test_nothing_is_said_to_be_sent_where_nobody_has_counted():
    chosen = arms()
    runs = [measured(arm, collective_bytes=None, units=None) for arm in chosen]
    rows = summarize(chosen, runs, WORKLOAD, limits=LIMITS)
    assert [row.sent_bytes for row in rows] == [None, None, None]
    assert [row.communication_limit_ms for row in rows] == [0, None, None]


def test_a_failed_arm_is_a_row_with_its_reason_and_the_others_come_out(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "PICTURES", {})  # not to wait for them
    single, ddp, scratch = chosen = arms()
    runs = [measured(single), measured(ddp, failure="exit code 1: boom"), measured(scratch)]
    rows = summarize(chosen, runs, WORKLOAD)
    write(tmp_path, made(rows, runs))
    report = (tmp_path / "report.md").read_text()
    assert "FAILED" in report
    assert "WRONG" not in report, "nothing is known of what it would have trained"
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["versions"] == environment()["versions"]
    assert results["rows"][1]["failure"] == "exit code 1: boom"
    assert results["rows"][1]["tokens_per_s"] is None, "nothing measured is null, never 0"
    assert results["rows"][2]["tokens_per_s"] > 0
    with (tmp_path / "comparison.csv").open() as stream:
        table = list(csv.DictReader(stream))
    assert [line["arm"] for line in table] == [arm.name for arm in chosen]
    assert table[1]["tokens_per_s"] == ""


def test_bandwidth_is_measured_between_as_many_processes(tmp_path, monkeypatch):
    units = [UnitFacts(2**15, "inner"), UnitFacts(3 * 2**15, "first")]
    runs = [Run("fsdp2"), Run("ddp", ranks=[RankMeasurement(0, 2, [], [], [], units=units)])]
    limits = measure_limits(WORKLOAD, runs, tmp_path)
    assert limits.unit_bytes == 2**16
    ways = limits.gather_bytes_per_s, limits.reduce_bytes_per_s, limits.pair_bytes_per_s
    assert limits.bytes_per_s == max(ways) > 0
    assert limits.flops_per_s > 0
    monkeypatch.setattr(processes, "run_command", warm.run_command)
    assert (
        measure_limits(replace(WORKLOAD, precision="31-true", num_ranks=1), runs, tmp_path) is None
    )
    assert "KeyError: '31'" in (tmp_path / "log.txt").read_text()
    assert not (tmp_path / "limits.json").exists(), "nor that of before"


def test_a_size_that_is_named_twice_is_measured_once():
    assert arms(batch_sizes=[4, 4], grad_accums=[1, 1]) == arms()


def test_an_arm_tells_its_callback_what_to_write():
    (*_, arm) = arms()
    for asked in ({}, {"writes_snapshots": True}, {"writes_traces": True}):
        arguments = arm.recipe_arguments(replace(WORKLOAD, **asked), Path("out"))
        (callback,) = json.loads(arguments[arguments.index("--trainer.callbacks") + 1])
        assert callback["class_path"] == "lightning_fsdp.bench.measure.Measure"
        given = callback["init_args"]
        assert given["out"] == "out"
        assert given["writes_snapshots"] == ("writes_snapshots" in asked)
        assert given["writes_traces"] == ("writes_traces" in asked)
