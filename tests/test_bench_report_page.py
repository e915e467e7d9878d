"""What ``report.md`` tells of arms, limits, failures and of what is missing."""

from dataclasses import replace

from lightning_fsdp.bench.records import Row
from lightning_fsdp.bench.report_page import page
from lightning_fsdp.bench.theory import Demand
from tests.support.bench_results import (
    FAILED,
    SMALL,
    arms,
    as_results,
    document_of,
    results_of,
    step_ms,
    without,
)


def section(report, title):
    return report.split(f"## {title}\n")[1].split("\n## ")[0].strip()


def test_the_report_tells_failures_limits_and_what_is_missing():
    report = page(results_of(**SMALL, failures=FAILED))
    assert section(report, "Failures") == (
        "* `scratch_zero3_b2_a1`: exit code 1: DefaultCPUAllocator: no memory (out of memory)"
    )
    missing = section(report, "What is missing")
    assert "CUDA peak, reserved: not measured for any arm." in missing
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
               f"{0.05 * whole:.3g}", "1.67", "11", "11", "9.3", "9.0"]  # fmt: skip
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


def test_calls_stand_beside_theory_without_what_it_does_not_count():
    demanded = Demand({"all_gather": 6, "reduce_scatter": 5}, 1.0)
    raw = {"send": 33.0, "all_gather": 7.0, "reduce_scatter": 5.0, "all_reduce": 3.0}
    row = Row("x", "fsdp2", 3, 1, 1, num_processes=2, collectives=raw, theory=demanded)
    counted = {"all_gather": 6.0, "reduce_scatter": 5.0}
    assert replace(row, data_collectives=counted).data_calls == counted
    assert row.data_calls == {"all_gather": 7.0, "reduce_scatter": 5.0}
    assert replace(row, theory=None).data_calls == raw
    assert replace(row, collectives=None).data_calls is None
