"""The command line of the recipes: YAMLs, mistakes in one line, help, and a run on two ranks.

Names that do not exist are in ``test_recipes_choices.py``.
"""

import errno
import math
import shlex
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Qwen2Config

from lightning_fsdp.checkpoint.ranks import Ranks
from lightning_fsdp.strategies.checkpoint import read_folder
from recipes.data import TextData
from recipes.gpt2 import GPT2
from recipes.lora import QwenLora
from recipes.qwen import Qwen
from tests.support.recipe_commands import (
    REPOSITORY,
    command_line_in,
    csv_logger,
    finish_warm,
    rows_of,
    short_run,
)
from tests.support.texts import write_folder

YAMLS = sorted(path.name for path in (REPOSITORY / "recipes").glob("*.yaml"))


# LightningCLI calls names that jsonargparse has renamed.
pytestmark = pytest.mark.filterwarnings(
    "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"
)


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    return command_line_in(tmp_path, monkeypatch)


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
    kinds = {
        "recipes.gpt2.GPT2": GPT2,
        "recipes.qwen.Qwen": Qwen,
        "recipes.lora.QwenLora": QwenLora,
    }
    model_class = kinds[spec["class_path"]]
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
    command_line(short_run(write_folder(tmp_path / "corpus"), "--data.vocab_size=290"))
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
        (["--data.cache_dir=corpus/a.txt/cache"], "--data.cache_dir: [Errno 20] Not a directory"),
        (["--trainer.val_check_interval=0"], "val_check_interval: expected 1 or more, got 0."),
        (["--trainer.overfit_batches=1"], "--trainer.overfit_batches: expected none, got 1. Leave"),
        (["--model.dropout=1.5"], "dropout: expected 0 or more and less than 1, got 1.5. Correct"),
        ([f"--data.seed={2**70}"], "seed: expected -9223372036854775808 or more and less than 9"),
        (
            ["--seed_everything=-1"],
            "--seed_everything: expected 0 or more and less than",
        ),
        (
            [
                "--trainer.strategy=lightning_fsdp.ScratchFSDPStrategy",
                "--trainer.strategy.async_save=true",
            ],
            "error: ScratchFSDPStrategy: async_save=True: expected checkpoint='sharded'",
        ),
        (
            [
                "--trainer.callbacks+=lightning.pytorch.callbacks.EarlyStopping",
                "--trainer.callbacks.monitor=val/loss",
                "--trainer.callbacks.mode=least",
            ],
            "error: EarlyStopping: `mode` can be min, max, got least",
        ),
        (["--trainer.logger=lightning.pytorch.loggers.CometLogger"], "error: CometLogger: "),
        (
            ["--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint"],
            "error: --trainer: Found more than one stateful callback of type `ModelCheckpoint`.",
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
        command_line(short_run(folder, *options))
    assert str(stopped.value.code).startswith("error: ")
    assert message in str(stopped.value.code)
    assert "\n" not in str(stopped.value.code)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ckpt_path=nope.ckpt"], "--ckpt_path: expected a checkpoint that exists, got nothing"),
        (["--ckpt_path=corpus/a.txt"], "--ckpt_path: expected a checkpoint that torch loads"),
        (
            ["--ckpt_path=weights.pt"],
            "--ckpt_path: expected a checkpoint of a run, got 'weights.pt'",
        ),
        (["--ckpt_path=corpus"], "--ckpt_path: expected a file, as Lightning's own strategies rea"),
        (
            ["--ckpt_path=other.ckpt"],
            "--ckpt_path: expected a checkpoint of this model, got another, in which 'model.transf",
        ),
        (
            ["--model=recipes.lora.QwenLora", "--model.size=tiny", "--model.layers=[foo]"],
            "--model: Target modules {'foo'} not found",
        ),
        (["--trainer.val_check_interval=5000"], "--trainer: `val_check_interval` (5000) must be"),
        (
            ["--trainer.limit_train_batches=0.0001"],
            "--trainer: You requested to check 0.0001 of the `train_dataloader`",
        ),
    ],
)
def test_a_mistake_that_the_run_itself_finds_is_one_line(
    options: list[str], message: str, command_line: Any, tmp_path: Path
) -> None:
    one = ["--trainer.devices=1", "--trainer.strategy=auto", "--trainer.check_val_every_n_epoch=1"]
    weights = {"model.transformer.wte.weight": torch.zeros(2, 3)}
    torch.save(weights, tmp_path / "weights.pt")
    run = {"state_dict": weights, "pytorch-lightning_version": "2.6.0"}
    torch.save(run, tmp_path / "other.ckpt")
    with pytest.raises(SystemExit) as stopped:
        command_line(short_run(write_folder(tmp_path / "corpus"), *one, *options))
    said = str(stopped.value.code)
    assert said.startswith(f"error: {message}"), said
    assert "\n" not in said


def test_a_folder_that_is_no_checkpoint_is_one_line(
    command_line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "corpus")
    monkeypatch.setattr(pl.Trainer, "fit", lambda *_, **__: read_folder(folder))
    with pytest.raises(SystemExit) as stopped:
        command_line(short_run(folder))
    assert str(stopped.value.code).startswith(f"error: {folder}: expected a finished checkpoint")


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
    fit = short_run(write_folder(tmp_path / "corpus"), "--data.val_fraction=0")
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
        command_line(short_run(folder))
    assert f"error: {folder}/c.jsonl:3: expected JSON, got a broken line" in str(stopped.value.code)


def test_another_error_keeps_its_traceback(
    command_line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(*_: Any, **__: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(pl.Trainer, "fit", fit)
    with pytest.raises(ValueError, match="a bug"):
        command_line(short_run(write_folder(tmp_path / "corpus")))


def test_a_checkpoint_that_cannot_be_written_is_one_line(
    command_line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fit(*_: Any, **__: Any) -> None:
        Ranks().on_first("checkpoint 'step4.ckpt'", full_disk)

    monkeypatch.setattr(pl.Trainer, "fit", fit)
    with pytest.raises(SystemExit) as stopped:
        command_line(short_run(write_folder(tmp_path / "corpus")))
    said = "error: checkpoint 'step4.ckpt': [Errno 28] No space left on device"
    assert stopped.value.code == said


@pytest.mark.parametrize("place", ["trainer.logger.save_dir", "trainer.callbacks.dirpath"])
def test_a_folder_that_may_not_be_written_to_is_named_before_the_run(
    place: str, command_line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not a folder with a mode, which does not hold root back.
    monkeypatch.setattr(pl.Trainer, "fit", lambda *_, **__: pytest.fail("the run was started"))
    saver = ["--trainer.callbacks=lightning.pytorch.callbacks.ModelCheckpoint"]
    options = [*(saver if "callbacks" in place else []), f"--{place}=/proc/new"]
    with pytest.raises(SystemExit) as stopped:
        command_line(short_run(write_folder(tmp_path / "corpus"), *options))
    option, why = ".".join(place.split(".")[:2]), "nothing can be made in '/proc'"
    expected = f"error: --{option}: expected a folder, got '/proc/new' ({why}: "
    assert str(stopped.value.code).startswith(expected)


@pytest.mark.parametrize(("rank", "told"), [(0, 1), (1, 0)])
def test_ctrl_c_before_the_run_is_told_by_one_rank_without_a_traceback(
    rank: int,
    told: int,
    tmp_path: Path,
    command_line: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(data: TextData) -> None:
        monkeypatch.setattr(rank_zero_only, "rank", rank)
        raise KeyboardInterrupt

    monkeypatch.setattr(TextData, "open", interrupt)
    with pytest.raises(SystemExit) as stopped:
        command_line(short_run(write_folder(tmp_path / "corpus")))
    assert stopped.value.code == 130
    assert capsys.readouterr().err.count("interrupted; no run was going on") == told


def test_two_ranks_train_like_one_process_on_the_joined_batch(
    tmp_path: Path, command_line: Any
) -> None:
    corpus = write_folder(tmp_path / "corpus")
    steps = ["--trainer.max_steps=6", "--trainer.accumulate_grad_batches=2"]
    one = ["--trainer.devices=1", "--trainer.strategy=auto", "--data.batch_size=4"]
    command_line(short_run(corpus, *steps, *one, *csv_logger(tmp_path)))
    rows = rows_of(tmp_path / "log" / "version_0" / "metrics.csv")
    expected = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    assert len(expected) == 6
    assert expected[0] == pytest.approx(math.log(300), rel=0.05)

    name = "gpt2_zero3"
    printed = finish_warm(tmp_path / name, short_run(corpus, *steps, config=f"{name}.yaml"))
    assert "MEMBER: 2/2" in printed
    log = tmp_path / name / "runs" / name / "version_0"
    events = EventAccumulator(str(log)).Reload()
    found = [event.value for event in events.Scalars("train/loss")]
    assert found == pytest.approx(expected, abs=2e-5)
    tags = set(events.Tags()["scalars"])
    assert {
        "throughput/tokens_per_s",
        "train/lr",
        "memory/rank0_GiB",
        "memory/rank1_GiB",
    } <= tags
    assert all(event.value > 0 for event in events.Scalars("throughput/tokens_per_s"))
    saved = torch.load(log / "checkpoints" / "step6.ckpt", weights_only=True)
    assert saved["state_dict"]["model.transformer.wte.weight"].shape == (300, 128)
