"""A name that does not exist, in a recipe's options or its config: one line, the choices."""

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from jsonargparse import ArgumentParser

from lightning_fsdp import ScratchFSDPStrategy
from recipes.data import TextData
from recipes.gpt2 import GPT2
from recipes.lora import QwenLora, SaveAdapters
from recipes.qwen import Qwen
from recipes.sample import SampleText
from tests.support.recipe_commands import REPOSITORY, command_line_in, short_run
from tests.support.texts import write_folder

# LightningCLI calls names that jsonargparse has renamed.
pytestmark = pytest.mark.filterwarnings(
    "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"
)


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    return command_line_in(tmp_path, monkeypatch)


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
            "--model: expected one of recipes.gpt2.GPT2, recipes.lora.QwenLora, .* 'nope'",
        ),
        (["--model=recipes.gpt2.GPT3"], "--model: expected one of recipes.gpt2.GPT2, .*GPT3'"),
        (["--model=recipes.data.TextData"], "--model: expected one of recipes.gpt2.GPT2, .* got"),
        (
            ["--model.los=plain"],
            "--model.los of recipes.gpt2.GPT2: expected one of loss, .* got 'los'",
        ),
        (["--model.optimizer.lrr=1"], "--model.optimizer.lrr of .*: expected one of lr, betas, "),
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
            "--trainer.max_steps: expected int, got 'nope'",
        ),
        (["--trainer.gradient_clip_val=x"], "--trainer.gradient_clip_val: expected int or float, "),
        (["--model.optimizer.betas=[0]"], "--model.optimizer.betas: expected tuple with 2 "),
        (
            ["--trainer.strategy=lightning_fsdp.FSDP2Strategy", "--trainer.strategy.timeout=5"],
            '--trainer.strategy.timeout: expected string with form "h:m:s", got ',
        ),
        (["--config=."], "--config: expected one of .*gpt2_zero3.yaml, .*got '"),
        (
            ["--trainer.callbacks=recipes.monitor.GracefulStop", "--trainer.callbacks.x=1"],
            "--trainer.callbacks.x of .*: expected none, as it has no options, got 'x'",
        ),
        (
            ["--trainer.strategy=FSDP2Strateg"],
            f"--trainer.strategy: expected one of lightning_fsdp.FSDP2Strategy, .*, {NAMES}, ",
        ),
        (
            ["--trainer.strategy.class_path=lightning_fsdp.FSDP3Strategy"],
            "--trainer.strategy: expected one of .*lightning_fsdp.FSDP2Strategy, .* got 'lightning",
        ),
        (
            ["--trainer.strategy=lightning_fsdp.FSDP2Strategy", "--trainer.strategy.chekpoint=x"],
            "--trainer.strategy.chekpoint of .*FSDP2Strategy: expected one of checkpoint, ",
        ),
        (
            ["--trainer.strategy=lightning_fsdp.FSDP2Strategy", "--trainer.strategy.zero_stage=5"],
            "--trainer.strategy.zero_stage: expected one of 2, 3, got '5'",
        ),
        (
            [
                "--trainer.strategy=lightning_fsdp.FSDP2Strategy",
                "--trainer.strategy.checkpoint_io=nope",
            ],
            "--trainer.strategy.checkpoint_io: expected one of .*TorchCheckpointIO, .* got 'nope'",
        ),
        (
            ["--trainer.strategy.checkpoint=full"],
            "--trainer.strategy.checkpoint: an option of a class; --trainer.strategy: expected ",
        ),
        (
            ["--trainer.callbacks+=lightning_fsdp.MemryProbe"],
            "--trainer.callbacks: expected one of lightning_fsdp.MemoryProbe, lightning_fsdp.Gr",
        ),
        (
            ["--trainer.callbacks+=lightning.pytorch.callbacks.ModelChekpoint"],
            "--trainer.callbacks: expected one of lightning.pytorch.callbacks.ModelCheckpoint, ",
        ),
        (
            ["--trainer.callbacks+=SampleText", "--trainer.callbacks.num_token=3"],
            "--trainer.callbacks.num_token of recipes.sample.SampleText: expected one of num_tok",
        ),
        (["--trainer.logger=CSVLoger"], "--trainer.logger: expected one of .*loggers.CSVLogger, "),
        (
            ["--trainer.max_stepz=1"],
            "--trainer.max_stepz: expected one of max_steps, .*'max_stepz'",
        ),
        (
            ["--trainer.max_step=1"],  # a part of an option, which would undo the whole one
            "--trainer.max_step: expected one of max_steps, .*'max_step'",
        ),
        (
            ["--data.batchsize=1"],
            "--data.batchsize: expected one of batch_size, .* got 'batchsize'",
        ),
        (["--confg=1"], "--confg: expected one of config, .*model, .* got 'confg'"),
        (["--trainer.accelerator=nope"], "--trainer: .* Available names are: .*cpu"),
        (["--trainer.profiler=nope"], "--trainer: .*'simple', 'advanced'"),
        (
            ["--trainer.strategy=lightning_fsdp.FSDP2Strategy", "--trainer.strategy.shard_size=3"],
            "--trainer: shard_size: expected a divisor of the 2 ranks of the run, got 3",
        ),
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
        command_line(short_run(tmp_path, *options))
    said = capsys.readouterr().err + (f"{stopped.value.code}\n" if stopped.value.code != 2 else "")
    assert re.fullmatch(f"error: {message}.*\n", said), said


def test_a_command_without_a_model_names_the_recipes(
    command_line: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command_line(["fit", "--data.vocab_size=300"])
    assert (
        "error: --model: expected one, got none. Give --config a recipe ("
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "chosen", ["lightning_fsdp.FSDP2Strategy", "lightning.pytorch.strategies.DDPStrategy"]
)
def test_the_path_of_a_strategy_is_enough(
    chosen: str, command_line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[type] = []
    monkeypatch.setattr(pl.Trainer, "fit", lambda run, *_, **__: found.append(type(run.strategy)))
    command_line(short_run(write_folder(tmp_path / "corpus"), f"--trainer.strategy={chosen}"))
    assert [cls.__name__ for cls in found] == [chosen.rpartition(".")[2]]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("trainer:", "trainr:", "--trainr: expected one of trainer, .* got 'trainr'"),
        ("max_steps:", "max_stepz:", "--trainer.max_stepz: expected one of max_steps, "),
        ("batch_size:", "batchsize:", "--data.batchsize: expected one of batch_size, "),
        ("size:", "sise:", "--model.sise of recipes.gpt2.GPT2: expected one of size, "),
        ("lr:", "lrr:", "--model.optimizer.lrr of recipes.gpt2.GPT2: expected one of lr, "),
        (
            "gpt2.GPT2",
            "gpt2.GPT",
            "--model: expected one of recipes.gpt2.GPT2, .*'recipes.gpt2.GPT'",
        ),
        ("SampleText", "SampelText", "--trainer.callbacks: expected one of recipes.sample.SampleT"),
    ],
)
def test_a_name_in_a_config_that_does_not_exist_is_one_line_with_the_choices(
    before: str,
    after: str,
    message: str,
    command_line: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = (REPOSITORY / "recipes" / "gpt2_zero3.yaml").read_text()
    (tmp_path / "wrong.yaml").write_text(config.replace(before, after, 1))
    with pytest.raises(SystemExit):
        command_line(["fit", "--config=wrong.yaml"])
    assert re.fullmatch(f"error: {message}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "trainer:\n  max_steps: 1\nmodel: a: b\n",
            r", line 3: expected YAML, got: mapping values",
        ),
        ("trainer:\n  max_steps: 1\n devices: 2\n", r", line 3: expected YAML, got: expected "),
        ("trainer:\n\tmax_steps: 1\n", r", line 2: expected YAML, got: found character "),
        ("- 1\n", r": expected options, such as `trainer:`, got '\[1\]'"),
        ("a: \0\n", r": expected YAML, got: special characters are not allowed\."),
        ("a: \xff\n", r": expected YAML, got: invalid start byte\."),
    ],
)
@pytest.mark.parametrize("option", [["--config=wrong.yaml"], ["--config", "wrong.yaml"]])
def test_a_config_that_is_broken_is_one_line_with_the_place(
    text: str,
    message: str,
    option: list[str],
    command_line: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "wrong.yaml").write_text(text, encoding="latin-1")
    with pytest.raises(SystemExit) as stopped:
        command_line(["fit", *option])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert re.fullmatch(f"error: wrong.yaml{message}.* Correct it.\n", said), said


@pytest.mark.parametrize(
    "cls", [GPT2, Qwen, QwenLora, TextData, SampleText, SaveAdapters, ScratchFSDPStrategy]
)
def test_the_help_of_an_option_is_a_phrase_that_stands_alone(cls: type) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(cls)
    own = [action for action in parser._actions[1:] if action.help]
    assert own or cls is SaveAdapters
    for action in own:
        says = " ".join(action.help.split())
        assert len(says.split()) > 2, f"{action.dest}: {says}"
        begins = r"(Of|To|That|Such|So|With|Where|In|On|As|For|From|Before|At|Into|By) "
        assert re.match(begins, says) is None, f"{action.dest}: {says}"
