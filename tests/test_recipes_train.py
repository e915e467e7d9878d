"""The command line of the recipes, from a YAML to a checkpoint; what it shows; how it stops."""

import csv
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Qwen2Config

from recipes.data import TextData
from recipes.gpt2 import GPT2
from recipes.monitor import GracefulStop, Throughput, is_step_complete
from recipes.qwen import Qwen
from recipes.train import main
from tests.support import warm
from tests.support.texts import write_folder

REPOSITORY = Path(__file__).resolve().parents[1]
YAMLS = sorted(path.name for path in (REPOSITORY / "recipes").glob("*.yaml"))
TIME_LIMIT_S = 200.0

# LightningCLI calls names that jsonargparse has renamed.
pytestmark = pytest.mark.filterwarnings(
    "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"
)


def _arguments(folder: Path, *more: str, config: str = "gpt2_zero3.yaml") -> list[str]:
    """A run of few tokens on the text in ``folder``."""
    return [
        "fit",
        f"--config={REPOSITORY / 'recipes' / config}",
        f"--data.path={folder}",
        "--data.vocab_size=300",
        "--data.seq_len=16",
        "--data.batch_size=2",
        "--data.val_fraction=0.1",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        "--trainer.log_every_n_steps=1",
        *more,
    ]


# --------------------------------------------------------------------------- before the run


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs ``main`` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")  # the run sets them; this restores them

    def run(arguments: list[str]) -> None:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        main()

    return run


@pytest.mark.parametrize("name", YAMLS)
def test_every_yaml_is_a_run(
    name: str, command_line: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command_line(["fit", f"--config={REPOSITORY / 'recipes' / name}", "--print_config"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    stage = "2" if "zero2" in name else "3"
    has_gpus = "accelerator: gpu" in printed
    sharded = f"zero_stage: {stage}" in printed and "checkpoint: sharded" in printed
    assert sharded if has_gpus else f"strategy: scratch_fsdp_zero{stage}" in printed
    assert f"name: {name.removesuffix('.yaml')}" in printed


@pytest.mark.parametrize("name", YAMLS)
def test_the_models_options_in_every_yaml_go_together(name: str, tmp_path: Path) -> None:
    spec = yaml.safe_load((REPOSITORY / "recipes" / name).read_text())["model"]
    model_class = {"recipes.gpt2.GPT2": GPT2, "recipes.qwen.Qwen": Qwen}[spec["class_path"]]
    options = {key: value for key, value in spec["init_args"].items() if key != "optimizer"}
    if options.get("pretrained"):
        Qwen2Config(hidden_size=8, num_hidden_layers=1).save_pretrained(tmp_path)
        options["pretrained"] = str(tmp_path)
    model_class(**options)


def test_the_model_has_as_many_tokens_as_the_data(
    command_line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {}

    def fit(trainer: pl.Trainer, model: GPT2, datamodule: TextData, **_: Any) -> None:
        seen.update(size=model.config.vocab_size, opened=datamodule.open().vocab_size)

    monkeypatch.setattr(pl.Trainer, "fit", fit)
    command_line(_arguments(write_folder(tmp_path / "corpus"), "--data.vocab_size=290"))
    assert seen == {"size": 290, "opened": 290}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.pretrained=gpt2"], "either size or pretrained, got size='nano' and pretrained="),
        (["--model.optimizer.lr=0"], "optimizer.lr: expected more than 0"),
        (
            ["--model.optimizer.betas=[1.5,0.9]"],
            "optimizer.betas: expected two of 0 or more and less than 1, got [1.5, 0.9]",
        ),
        (
            ["--trainer.accumulate_grad_batches=0"],
            "accumulate_grad_batches: expected 1 or more, got 0. Raise --trainer.accumulate",
        ),
        (["--trainer.accumulate_grad_batches=-1"], "accumulate_grad_batches: expected 1 or more"),
        (["--data.seq_len=2000"], "seq_len: expected at most the model's 1024 positions, got 2000"),
        (
            ["--data.batch_size=1000"],
            "training data: expected at least 2000 sequences of 16 tokens",
        ),
        (
            ["--trainer.strategy=ddp", "--trainer.precision=bf16-mixed"],
            "gradient_clip_val: expected none with a fused optimizer, precision bf16-mixed and the",
        ),
    ],
)
def test_a_mistake_is_one_line_before_any_process_starts(
    options: list[str],
    message: str,
    command_line: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pl.Trainer, "fit", lambda *_, **__: pytest.fail("the run was started"))
    folder = write_folder(tmp_path / "corpus")
    with pytest.raises(SystemExit) as stopped:
        command_line(_arguments(folder, *options))
    assert str(stopped.value.code).startswith("error: ")
    assert message in str(stopped.value.code)
    assert "\n" not in str(stopped.value.code)


NAMES = (
    "scratch_fsdp, scratch_fsdp_zero3, scratch_fsdp_zero2, fsdp1_zero3, fsdp1_zero2, fsdp2_zero3"
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--config=nope.yaml"],
            "--config: expected one of .*gpt2_zero3.yaml, .*got '.*nope.yaml'",
        ),
        (
            ["--model.size=nope"],
            "--model.size: expected one of nano, small, medium, large, xl, got 'nope'",
        ),
        (
            ["--model=nope"],
            "--model: expected one of recipes.gpt2.GPT2, recipes.qwen.Qwen, or .* 'nope'",
        ),
        (
            ["--trainer.strategy=nope"],
            f"--trainer.strategy: expected one of {NAMES}, .* ddp, .* 'nope'",
        ),
        (
            ["--trainer.precision=nope"],
            "--trainer.precision: expected one of .*16-mixed, .* got 'nope'",
        ),
        (
            ["--trainer.max_steps=nope"],
            'Parser key "trainer.max_steps": Expected .*int.* value: nope',
        ),
        (["--nope=1"], "unrecognized arguments: --nope=1"),
    ],
)
def test_a_name_that_does_not_exist_is_one_line_with_the_choices(
    options: list[str],
    message: str,
    command_line: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command_line(_arguments(tmp_path, *options))
    said = capsys.readouterr().err + (f"{stopped.value.code}\n" if stopped.value.code != 2 else "")
    assert re.fullmatch(f"error: {message}.*\n", said), said


@pytest.mark.parametrize("subcommand", ["", "fit", "validate"])
def test_a_help_ends_with_two_examples_whose_options_parse(
    subcommand: str,
    command_line: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        command_line([*subcommand.split(), "--help"])
    title, *examples = capsys.readouterr().out.splitlines()[-3:]
    assert title == "examples:"
    monkeypatch.chdir(REPOSITORY)
    for example in examples:
        assert example.startswith(f"  python -m recipes.train {subcommand}".rstrip() + " ")
        with pytest.raises(SystemExit) as stopped:
            command_line([*shlex.split(example)[3:], "--print_config"])
        assert stopped.value.code == 0


def test_without_validation_data_there_is_training_alone(
    command_line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    for name in ("fit", "validate"):
        monkeypatch.setattr(pl.Trainer, name, lambda *_, name=name, **__: called.append(name))
    fit = _arguments(write_folder(tmp_path / "corpus"), "--data.val_fraction=0")
    command_line(fit)
    with pytest.raises(SystemExit) as stopped:
        command_line(["validate", *fit[1:]])
    assert str(stopped.value.code).startswith("error: val_fraction: expected more than 0 to valid")
    assert called == ["fit"]


def test_a_broken_line_of_the_corpus_is_named(command_line: Any, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "corpus")
    with (folder / "c.jsonl").open("a") as file:
        file.write('{"text": "cut o')
    with pytest.raises(SystemExit) as stopped:
        command_line(_arguments(folder))
    assert f"error: {folder}/c.jsonl:3: expected JSON, got a broken line" in str(stopped.value.code)


def test_another_error_keeps_its_traceback(
    command_line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(*_: Any, **__: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(pl.Trainer, "fit", fit)
    with pytest.raises(ValueError, match="a bug"):
        command_line(_arguments(write_folder(tmp_path / "corpus")))


# --------------------------------------------------------------------------------- the monitor


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
    data = TextData(
        path=write_folder(tmp_path / "corpus"),
        vocab_size=300,
        seq_len=16,
        batch_size=2,
        cache_dir=tmp_path / "cache",
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=list(callbacks),
        **options,
    )
    trainer.fit(GPT2(size="nano", vocab_size=300), data)
    return trainer


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
    rows = [row for row in _rows(tmp_path / "log" / "metrics.csv") if row["tokens/s"]]
    # 2 sequences of 16 tokens a second, whatever was validated meanwhile.
    assert [float(row["tokens/s"]) for row in rows] == pytest.approx([32.0, 32.0])
    assert {row["memory/rank0_GiB"] for row in rows} == {"3.0"}


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


# ------------------------------------------------------------------------- runs on two ranks


def _mind_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def _run(folder: Path, arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """``python -m recipes.train`` in ``folder``; its processes end with the block."""
    folder.mkdir(exist_ok=True)
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "recipes.train", *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # A runner that was started in the background ignores Ctrl-C, and passes that on.
            preexec_fn=_mind_interrupts,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _finish(folder: Path, arguments: list[str]) -> str:
    """Run to the end; returns what it printed."""
    with _run(folder, arguments) as process:
        code = process.wait(TIME_LIMIT_S)
    printed = (folder / "output.txt").read_text()
    assert code == 0, printed
    return printed


def _finish_warm(folder: Path, arguments: list[str]) -> str:
    """As ``_finish``, on two ranks that have torch already."""
    folder.mkdir()
    log = folder / "output.txt"
    command = [sys.executable, "-m", "recipes.train", *arguments, "--trainer.devices", "2"]
    failure = warm.run_command(command, log=log, timeout_s=TIME_LIMIT_S, cwd=folder)
    assert failure is None, log.read_text()
    return log.read_text()


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def _csv_logger(folder: Path) -> list[str]:
    return [
        "--trainer.logger=lightning.pytorch.loggers.CSVLogger",
        f"--trainer.logger.save_dir={folder}",
        "--trainer.logger.name=log",
        "--trainer.logger.flush_logs_every_n_steps=1",
    ]


def test_two_ranks_train_like_one_process_on_the_joined_batch(
    tmp_path: Path, command_line: Any
) -> None:
    corpus = write_folder(tmp_path / "corpus")
    steps = ["--trainer.max_steps=6", "--trainer.accumulate_grad_batches=2"]
    one = ["--trainer.devices=1", "--trainer.strategy=auto", "--data.batch_size=4"]
    command_line(_arguments(corpus, *steps, *one, *_csv_logger(tmp_path)))
    rows = _rows(tmp_path / "log" / "version_0" / "metrics.csv")
    expected = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    assert len(expected) == 6
    assert expected[0] == pytest.approx(math.log(300), rel=0.05)

    for name, finish in (("gpt2_zero3", _finish), ("gpt2_zero2", _finish_warm)):
        printed = finish(tmp_path / name, _arguments(corpus, *steps, config=f"{name}.yaml"))
        assert "MEMBER: 2/2" in printed
        log = tmp_path / name / "runs" / name / "version_0"
        events = EventAccumulator(str(log)).Reload()
        found = [event.value for event in events.Scalars("train/loss")]
        assert found == pytest.approx(expected, abs=2e-5), name
        tags = set(events.Tags()["scalars"])
        assert {"tokens/s", "train/lr", "memory/rank0_GiB", "memory/rank1_GiB"} <= tags
        assert all(event.value > 0 for event in events.Scalars("tokens/s"))
        saved = torch.load(log / "checkpoints" / "step6.ckpt", weights_only=True)
        assert saved["state_dict"]["model.transformer.wte.weight"].shape == (300, 128)


def test_an_interrupted_run_is_saved_and_goes_on(tmp_path: Path) -> None:
    corpus = write_folder(tmp_path / "corpus")
    log = tmp_path / "log" / "version_0"
    endless = _arguments(corpus, "--trainer.max_steps=100000", *_csv_logger(tmp_path))
    deadline = time.monotonic() + TIME_LIMIT_S
    with _run(tmp_path / "first", endless) as process:
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

    more = _arguments(corpus, f"--trainer.max_steps={num_steps + 2}", f"--ckpt_path={path}")
    _finish_warm(tmp_path / "second", [*more, *_csv_logger(tmp_path / "second")])
    rows = _rows(tmp_path / "second" / "log" / "version_0" / "metrics.csv")
    steps = [int(row["step"]) for row in rows if row["train/loss"]]
    assert steps == [num_steps, num_steps + 1]
