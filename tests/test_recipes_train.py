"""What a run of the recipes shows, and how it is stopped and goes on."""

import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lightning_fsdp import FSDP1Strategy, FSDP2Strategy, ScratchFSDPStrategy
from recipes.monitor import GracefulStop, Settings, Throughput, _engine, _stage, is_step_complete
from recipes.optimizer import OptimizerConfig
from tests.support.recipe_commands import (
    TIME_LIMIT_S,
    command_line_in,
    csv_logger,
    finish_warm,
    rows_of,
    run_cold,
    short_run,
    tiny_run,
)
from tests.support.texts import write_folder

# LightningCLI calls names that jsonargparse has renamed.
pytestmark = pytest.mark.filterwarnings(
    "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"
)


@pytest.mark.parametrize(
    ("accumulate", "num_batches", "complete"), [(1, 3, [0, 1, 2]), (2, 5, [1, 3, 4]), (4, 3, [2])]
)
def test_a_step_is_complete_after_its_last_micro_batch(
    accumulate: int, num_batches: int, complete: list[int]
) -> None:
    trainer: Any = SimpleNamespace(
        accumulate_grad_batches=accumulate, num_training_batches=num_batches
    )
    assert [i for i in range(num_batches) if is_step_complete(trainer, i)] == complete


class _Clock(pl.Callback):
    """A second per micro-batch, a hundred per validation."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def on_train_batch_start(self, *_: Any) -> None:
        self.now_s += 1.0

    def on_validation_batch_end(self, *_: Any) -> None:
        self.now_s += 100.0


def _tiny_run(tmp_path: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    write_folder(tmp_path / "corpus")
    return tiny_run(tmp_path, callbacks=list(callbacks), enable_progress_bar=False, **options)


def test_throughput_counts_tokens_over_training_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Clock()
    monkeypatch.setattr("recipes.monitor.time", clock)
    monkeypatch.setattr(
        "recipes.monitor.psutil.Process",
        lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=3 * 2**30)),
    )
    logger = CSVLogger(tmp_path, name="log", version="")
    _tiny_run(
        tmp_path,
        Throughput(),
        clock,
        logger=logger,
        max_steps=8,
        accumulate_grad_batches=2,
        val_check_interval=6,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        log_every_n_steps=4,
    )
    rows = [
        row for row in rows_of(tmp_path / "log" / "metrics.csv") if row["throughput/tokens_per_s"]
    ]
    # 2 sequences of 16 tokens a second, whatever was validated meanwhile.
    assert [float(row["throughput/tokens_per_s"]) for row in rows] == pytest.approx([32.0, 32.0])
    assert {row["memory/rank0_GiB"] for row in rows} == {"3.0"}


def test_a_run_has_a_line_of_settings_and_metrics_in_tensorboard(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="log", version="")
    options: dict[str, Any] = {"logger": logger, "max_steps": 1, "log_every_n_steps": 1}
    _tiny_run(tmp_path, Settings(), Throughput(), **options, val_check_interval=1)
    events = EventAccumulator(str(tmp_path / "log")).Reload()
    metadata = events.summary_metadata
    begun = HParamsPluginData.FromString(
        metadata["_hparams_/session_start_info"].plugin_data.content
    )
    found = dict(begun.session_start_info.hparams)
    # TensorBoard shows five, by the alphabet: the same as of `bench run`.
    assert sorted(found)[:5] == ["accumulation", "batch", "engine", "ranks", "stage"]
    assert found["engine"].string_value == "single"
    assert found["stage"].string_value == "none"
    assert found["train/model"].string_value == "GPT2"
    assert (found["batch"].number_value, found["train/seq_len"].number_value) == (2, 16)
    assert found["train/lr"].number_value == OptimizerConfig().lr
    experiment = HParamsPluginData.FromString(
        metadata["_hparams_/experiment"].plugin_data.content
    ).experiment
    columns = {info.name.tag for info in experiment.metric_infos}
    assert columns == {"train/loss", "val/loss", "throughput/tokens_per_s"}
    assert columns <= set(events.Tags()["scalars"]), "none stays empty"


@pytest.mark.parametrize("is_logged", [False, True])
def test_options_are_written_beside_logs_alone_and_again_when_a_run_goes_on(
    is_logged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    once = ["--trainer.devices=1", "--trainer.max_steps=1", "--trainer.callbacks=null"]
    name = ["--trainer.logger.version=same"] if is_logged else ["--trainer.logger=false"]
    run, folder = command_line_in(tmp_path, monkeypatch), write_folder(tmp_path / "corpus")
    for batch_size in (2, 3):
        options = ["--trainer.strategy=auto", *once, *name, f"--data.batch_size={batch_size}"]
        run(short_run(folder, *options))
    assert (tmp_path / "config.yaml").read_text() == "mine"
    logged = tmp_path / "runs" / "gpt2_zero3" / "same" / "config.yaml"
    assert not is_logged or "batch_size: 3" in logged.read_text()


def test_engine_and_stage_are_named_as_in_a_benchmark() -> None:
    for strategy, *expected in (
        (ScratchFSDPStrategy(zero_stage=2), "scratch", "2"),
        (FSDP2Strategy(), "fsdp2", "3"),
        (FSDP1Strategy(), "fsdp1", "3"),
        (DDPStrategy(), "ddp", "none"),
    ):
        assert [_engine(strategy), _stage(strategy)] == expected


def test_ctrl_c_works_as_before_after_a_run(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    during = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            during.append(signal.getsignal(signal.SIGINT))

        def on_train_end(self, *_: Any) -> None:
            assert signal.getsignal(signal.SIGINT) is before, "and not only when the Trainer ends"

    _tiny_run(tmp_path, GracefulStop(), Look(), max_steps=1, limit_val_batches=0, logger=False)
    assert during != [before]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)

    class PressTwice(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(SystemExit):  # the Trainer's answer to a KeyboardInterrupt
        _tiny_run(tmp_path, GracefulStop(), PressTwice(), max_steps=5, logger=False)
    # The Trainer leaves SIGINT ignored: it has exited.
    signal.signal(signal.SIGINT, before)
    assert not list(tmp_path.rglob("interrupted.ckpt"))


@pytest.mark.parametrize("least", [{"min_steps": 9}, {"min_epochs": 2, "max_epochs": 2}])
def test_ctrl_c_stops_before_the_least_number_of_steps(
    least: dict[str, int], tmp_path: Path
) -> None:
    class Press(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            signal.raise_signal(signal.SIGINT)

    options = {"logger": False, "limit_val_batches": 0, "max_steps": 12, **least}
    trainer = _tiny_run(tmp_path, Press(), GracefulStop(), **options)
    assert trainer.global_step == 1
    assert (tmp_path / "interrupted.ckpt").is_file()


def test_an_interrupted_run_is_saved_and_goes_on(tmp_path: Path) -> None:
    corpus = write_folder(tmp_path / "corpus")
    log = tmp_path / "log" / "version_0"
    endless = short_run(corpus, "--trainer.max_steps=100000", *csv_logger(tmp_path))
    deadline = time.monotonic() + TIME_LIMIT_S
    with run_cold(tmp_path / "first", endless) as process:
        while not (log / "metrics.csv").is_file() and time.monotonic() < deadline:
            assert process.poll() is None, (tmp_path / "first" / "output.txt").read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)  # to the first rank alone
        code = process.wait(TIME_LIMIT_S)
    printed = (tmp_path / "first" / "output.txt").read_text()
    assert code == 0, printed
    assert "Stopping after this step. Press Ctrl-C again to stop at once." in printed
    path = log / "interrupted.ckpt"
    assert f"Go on with: --ckpt_path {path}" in printed
    num_steps = torch.load(path, weights_only=True)["global_step"]
    assert f"Stopped after optimizer step {num_steps}." in printed

    more = short_run(corpus, f"--trainer.max_steps={num_steps + 2}", f"--ckpt_path={path}")
    finish_warm(tmp_path / "second", [*more, *csv_logger(tmp_path / "second")])
    rows = rows_of(tmp_path / "second" / "log" / "version_0" / "metrics.csv")
    steps = [int(row["step"]) for row in rows if row["train/loss"]]
    assert steps == [num_steps, num_steps + 1]
