"""Results as TensorBoard's runs."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from lightning_fsdp.bench import output
from lightning_fsdp.bench.output import PICTURES
from tests.support.bench_results import (
    FAILED,
    SMALL,
    arms,
    document_of,
    folder_of,
    step_ms,
    tokens_per_s,
    without,
    workload,
)


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
    monkeypatch.setattr(output, "PICTURES", {"losses": PICTURES["losses"]})
    output.derive(
        folder_of(
            document_of(**SMALL, failures={"ddp_b2_a1": FAILED["scratch_zero3_b2_a1"]}), tmp_path
        )
    )
    board = tmp_path / "tensorboard"
    runs = {"single_b2_a1", "ddp_b2_a1", "scratch_zero3_b2_a1", "pictures"}
    assert {run.name for run in board.iterdir()} == runs
    arm = arms()[2]
    reader = events(board / "scratch_zero3_b2_a1")
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
    failed = events(board / "ddp_b2_a1")
    assert "result/tokens_per_s" in metrics_of(failed), "any run may be asked for the columns"
    assert metrics_of(failed) == metrics_of(reader)
    assert failed.Tags()["scalars"] == [], "nothing measured is no scalar, never 0"
    assert hparams(failed)["trouble"] == "out of memory"
    assert "stage" in sorted(hparams(failed))[:5], "TensorBoard shows five, by the alphabet"
    assert events(board / "pictures").Tags()["images"] == ["pictures/losses"]


def test_redrawing_leaves_no_run_of_an_arm_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "PICTURES", {})  # not to wait for them
    output.derive(folder_of(document_of(**SMALL), tmp_path))
    output.derive(folder_of(without(document_of(**SMALL), "ddp_b2_a1"), tmp_path))
    assert not (tmp_path / "tensorboard" / "ddp_b2_a1").exists()
    assert len(events(tmp_path / "tensorboard" / "single_b2_a1").Scalars("train/loss")) == 5
