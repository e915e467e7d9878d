import math

import numpy as np
import pytest

from lightning_fsdp.bench.output import PICTURES
from lightning_fsdp.bench.report_page import page
from lightning_fsdp.bench.results import kind_label
from tests.support.bench_results import (
    MIB,
    as_results,
    document_of,
    exposed_ms,
    peak_bytes,
    results_of,
    step_ms,
    timeline,
    tokens_per_s,
    workload,
)
from tests.support.pictures import FAILURES, SMALL, arms_of, words


def label_of(arm):
    return kind_label((arm.engine, arm.zero_stage))


def line_of(axes, label):
    (line,) = [line for line in axes.get_lines() if line.get_label() == label]
    return line


def bars(axes, label):
    """Row -> length, of one part of the stacked bars."""
    (container,) = [found for found in axes.containers if found.get_label() == label]
    return {round(bar.get_y() + bar.get_height() / 2): bar.get_width() for bar in container}


def end_of(axes, row):
    """Where the last part of a stacked bar ends; each begins where the one before ends."""
    end = 0.0
    for container in axes.containers:
        for bar in container:
            if round(bar.get_y() + bar.get_height() / 2) == row and bar.get_height() > 0.5:
                assert bar.get_x() == pytest.approx(end)
                end += bar.get_width()
    return end


def test_throughput_stands_at_its_batch_size_in_the_column_of_its_accumulation():
    figure = PICTURES["tokens_per_s"](results_of(**SMALL))
    assert [axes.get_title() for axes in figure.axes] == [
        "1 micro-batch per step", "2 micro-batches per step",
    ]  # fmt: skip
    for arm in arms_of():
        axes = figure.axes[arm.grad_accum - 1]
        xs, ys = line_of(axes, label_of(arm)).get_data()
        place = [round(x) for x in xs].index([1, 2].index(arm.batch_size))
        fast = tokens_per_s(arm, workload())
        assert ys[place] == pytest.approx(fast)
        assert axes.get_ylim()[1] > ys[place], "nothing is cut off"
    ticks = [[tick.get_text() for tick in axes.get_xticklabels()] for axes in figure.axes]
    # Two ways to cut a global batch of 4 have a place each.
    assert ticks == [["1\n(2)", "2\n(4)"], ["1\n(4)", "2\n(8)"]]


def test_whiskers_reach_from_the_slowest_repeat_to_the_fastest():
    figure = PICTURES["tokens_per_s"](results_of(**SMALL))
    (arm,) = [arm for arm in arms_of() if arm.name == "fsdp2_zero3_b2_a1"]
    speed = tokens_per_s(arm, workload())
    whiskers = (each.get_segments() for each in figure.axes[0].collections)
    ends = [whisker[:, 1] for of_kind in whiskers for whisker in of_kind]
    assert any(end == pytest.approx([speed / 1.1, speed]) for end in ends)


def test_memory_is_that_of_the_largest_rank_in_the_unit_of_the_axis():
    figure = PICTURES["memory"](results_of(**SMALL))
    assert [axes.get_ylabel() for axes in figure.axes[::2]] == [
        "Peak of tensors, MB", "Tensors between steps, MB", "Peak of the process (RSS), MB",
    ]  # fmt: skip
    for arm in arms_of():
        place = [1, 2].index(arm.batch_size)
        last_rank = arm.num_processes(workload()) - 1
        peaks = line_of(figure.axes[arm.grad_accum - 1], label_of(arm)).get_ydata()
        assert peaks[place] == pytest.approx((peak_bytes(arm) + last_rank * MIB) / 1e6)
        rss = line_of(figure.axes[4 + arm.grad_accum - 1], label_of(arm)).get_ydata()
        assert rss[place] == pytest.approx((700 + 20 * arm.batch_size) * MIB / 1e6)
    assert "CUDA peak, reserved: not measured for any arm." in words(figure)


def test_a_rank_without_a_figure_leaves_a_gap_and_is_named():
    results = results_of(**SMALL)
    row = next(row for row in results.rows if row.arm == "ddp_b2_a1")
    row.peak_bytes[0] = None
    figure = PICTURES["memory"](results)
    ys = line_of(figure.axes[0], "ddp").get_ydata()
    assert [math.isnan(y) for y in ys] == [False, True]
    assert "Peak of tensors: not measured for ddp_b2_a1." in words(figure)


def test_communication_shows_calls_by_kind_bytes_and_exposed_time_beside_their_limits():
    results = results_of(**SMALL)
    figure = PICTURES["communication"](results)
    calls, sent, seconds = figure.axes
    assert sent.get_xlabel() == "MB sent"
    names = [tick.get_text() for tick in calls.get_yticklabels()]
    assert names == [arm.name for arm in arms_of()]
    for row, arm in enumerate(arms_of()):
        is_alone = arm.engine == "single"
        assert bars(calls, "all_gather").get(row) == (None if is_alone else 6)
        assert bars(calls, "reduce_scatter").get(row) == (None if is_alone else 5)
        expected_mb = 0 if is_alone else 3.1 * (arm.zero_stage or 1)
        assert bars(sent, "bytes sent")[row] == pytest.approx(expected_mb)
        exposed, overlapped = (found.get_label() for found in seconds.containers)
        assert bars(seconds, exposed)[row] == pytest.approx(exposed_ms(arm))
        assert bars(seconds, overlapped)[row] == pytest.approx(2 * exposed_ms(arm))
    demanded = line_of(sent, "demanded by theory").get_xdata()
    assert demanded[2] == pytest.approx(6.0)
    assert line_of(calls, "demanded by theory").get_xdata()[1] == 11
    limits = line_of(seconds, "limit: bytes over measured bandwidth").get_xdata()
    assert limits[3] == pytest.approx(0.05 * step_ms(arms_of()[3]))


def test_the_parts_of_a_step_end_where_the_step_ends():
    figure = PICTURES["time_breakdown"](results_of(**SMALL))
    (axes,) = figure.axes
    for row, arm in enumerate(arms_of()):
        labels = ["data", "compute", "exposed communication", "optimizer", "other"]
        lengths = [bars(axes, label)[row] for label in labels]
        assert lengths[2] == pytest.approx(exposed_ms(arm))
        assert sum(lengths) == pytest.approx(step_ms(arm))
        assert end_of(axes, row) == pytest.approx(step_ms(arm))
    limits = line_of(axes, "limit: compute alone").get_xdata()
    assert limits == pytest.approx([0.6 * step_ms(arm) for arm in arms_of()])


def test_long_steps_are_written_without_an_exponent():
    results = results_of(**SMALL)
    results.rows[0].parts_ms = dict.fromkeys(results.rows[0].parts_ms, 300.0)
    assert "1,500" in words(PICTURES["time_breakdown"](results))
    results.rows[0].step_ms = 999.6
    assert "| 1,000 " in page(results)


def test_a_part_that_cannot_be_measured_is_not_drawn_as_zero():
    results = results_of(**SMALL)
    row = results.rows[1]
    row.parts_ms["exposed_ms"] = None
    (arm,) = [arm for arm in arms_of() if arm.name == row.arm]
    (axes,) = PICTURES["time_breakdown"](results).axes
    assert 1 not in bars(axes, "exposed communication")
    # Of what is left of the whole nobody knows what it is.
    assert bars(axes, "not told apart") == {1: pytest.approx(0.1 * step_ms(arm))}
    assert "Exposed communication: not measured for ddp_b1_a1." in words(
        PICTURES["communication"](results)
    )


def test_memory_at_the_peak_adds_up_to_the_peak():
    (axes,) = PICTURES["memory_at_peak"](results_of(**SMALL)).axes
    for row, arm in enumerate(arms_of()):
        assert end_of(axes, row) == pytest.approx(peak_bytes(arm) / 1e6)
        assert bars(axes, "gradients")[row] == pytest.approx(peak_bytes(arm) / 8e6)


def test_the_heat_map_has_the_mean_of_all_samples_of_all_ranks():
    figure = PICTURES["utilization"](results_of(**SMALL, failures=FAILURES))
    axes = figure.axes[0]
    values = np.ma.filled(axes.images[0].get_array(), np.nan)
    assert values.shape == (6, 4)  # kinds, batch shapes
    assert values[0] == pytest.approx([62.5] * 4)  # one rank: 60 and 65
    assert values[3] == pytest.approx([67.5, math.nan, 67.5, 67.5], nan_ok=True)
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("failed") == 3
    assert texts[3 * 4 : 4 * 4] == ["68", "failed", "68", "68"]


def test_utilization_of_one_batch_shape_is_shown_in_bars():
    results = results_of(**{**SMALL, "batch_sizes": [2], "accums": [1]}, failures=FAILURES)
    (axes,) = PICTURES["utilization"](results).axes
    assert not axes.images
    assert axes.get_xlabel() == "CPU time of a rank, percent of one core"
    assert [text.get_text() for text in axes.texts] == [
        "62",
        "68",
        "68",
        "out of memory",
        "68",
        "68",
    ]
    assert bars(axes, "cpu")[1] == pytest.approx(67.5)


def test_memory_over_time_has_a_panel_per_arm_with_the_time_line_of_rank_0():
    results = results_of(**SMALL, failures=FAILURES)
    figure = PICTURES["memory_over_time"](results)
    panels = np.reshape(figure.axes, (len(results.kinds), len(results.shapes)))
    for arm in arms_of():
        row = results.kinds.index((arm.engine, arm.zero_stage))
        axes = panels[row, results.shapes.index((arm.batch_size, arm.grad_accum))]
        (said,) = [text.get_text() for text in axes.texts]
        if arm.name in FAILURES:
            assert (said, len(axes.lines)) == ("failed", 0)
            continue
        (line,) = axes.lines
        expected = timeline(arm)
        assert line.get_xdata() == pytest.approx([100 * x / 0.2 for x, _ in expected])
        assert line.get_ydata() == pytest.approx([y / 1e6 for _, y in expected])
        assert said == f"{peak_bytes(arm) / 1e6:.3g}"
    assert [axes.get_title() for axes in panels[0]] == [
        "batch 1 x 1", "batch 2 x 1", "batch 1 x 2", "batch 2 x 2",
    ]  # fmt: skip
    assert [row[0].get_ylabel() for row in panels] == list(map(kind_label, results.kinds))
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    assert figure.axes[0].get_ylim()[0] == 0


def test_losses_are_means_over_ranks_and_micro_batches_and_a_lost_one_is_a_gap():
    document = document_of(**SMALL)
    (run, *_) = [run for run in document["runs"] if run["arm"] == "ddp_b1_a2"]
    run["ranks"][1]["losses"][2] = None  # was not a number: in the second step
    figure = PICTURES["losses"](as_results(document))
    axes = figure.axes[2]
    xs, ys = line_of(axes, "scratch ZeRO-3").get_data()
    assert list(xs) == [1, 2, 3, 4, 5]
    assert ys == pytest.approx([8.3 - 0.05 * (2 * i + 0.5) + 0.005 for i in range(5)])
    assert [math.isnan(y) for y in line_of(axes, "ddp").get_ydata()] == [False, True] + 3 * [False]


def test_an_arm_with_wrong_losses_is_nowhere_but_among_the_losses():
    results = results_of(**SMALL, failures=FAILURES)
    throughput = line_of(PICTURES["tokens_per_s"](results).axes[1], "fsdp2 ZeRO-2").get_ydata()
    assert [math.isnan(y) for y in throughput] == [True, False]
    assert len(line_of(PICTURES["losses"](results).axes[2], "fsdp2 ZeRO-2").get_ydata()) == 5


def test_failed_arms_keep_their_row_and_say_why():
    figure = PICTURES["communication"](results_of(**SMALL, failures=FAILURES))
    names = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    for axes in figure.axes:
        said = {round(text.get_position()[1]): text.get_text() for text in axes.texts}
        for arm, (kind, _) in FAILURES.items():
            assert said[names.index(arm)] == kind
    assert "Failed (out of memory): scratch_zero3_b2_a1." in words(figure)
