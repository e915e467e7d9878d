"""Runs of the command of the recipes on ranks of a group, and what they logged."""

import csv
import functools
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from jsonargparse._deprecated import JsonargparseDeprecationWarning

from recipes.train import main
from tests.support.trainer import on_trainer_ranks

REPOSITORY = Path(__file__).resolve().parents[2]

VOCAB_SIZE = 300

ONE_PROCESS = ["--trainer.strategy=auto", "--data.batch_size=4"]


def arguments_of(num_ranks: int, config: str, options: list[str]) -> list[str]:
    return [
        "fit",
        f"--config={REPOSITORY / 'recipes' / config}.yaml",
        "--data.path=corpus",
        f"--data.vocab_size={VOCAB_SIZE}",
        "--data.seq_len=16",
        "--data.batch_size=2",
        "--data.val_fraction=0.3",  # 50 sequences: ranks leave out what does not divide
        f"--trainer.devices={num_ranks}",
        "--trainer.max_steps=4",
        "--trainer.val_check_interval=2",
        "--trainer.num_sanity_val_steps=0",
        "--trainer.log_every_n_steps=1",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        "--trainer.callbacks=[]",
        "--trainer.enable_checkpointing=false",
        "--trainer.logger=lightning.pytorch.loggers.CSVLogger",
        "--trainer.logger.save_dir=.",
        *options,
    ]


def run_command(
    rank: int, world_size: int, folder: Path, config: str, runs: dict[str, list[str]]
) -> list[int]:
    """``python -m recipes.train`` on this rank, once per run.

    Args:
        rank: Of this process.
        world_size: Ranks of each run.
        folder: To run in.
        config: Name of a YAML.
        runs: Name -> options.

    Returns:
        How many blocks each compiled.
    """
    warnings.simplefilter("ignore", JsonargparseDeprecationWarning)  # LightningCLI's own use of it
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not")  # dynamo's
    warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")  # likewise
    os.chdir(folder)
    num_compiled = [0]
    # Machine code is what tests/test_strategy_unit_calls.py compiles to.
    compile_plainly = functools.partial(torch.compile, backend="aot_eager")

    def compile_counted(*args: Any, **kwargs: Any) -> Any:
        num_compiled[-1] += 1
        return compile_plainly(*args, **kwargs)

    torch.compile = compile_counted  # type: ignore[assignment]
    for name, options in runs.items():
        logger = [f"--trainer.logger.name={name}", "--trainer.logger.version=v"]
        sys.argv = ["train.py", *arguments_of(world_size, config, [*options, *logger])]
        try:
            main()
        except BaseException as error:
            error.add_note(f"in the run {name!r}: {options}")
            raise
        num_compiled.append(0)
    return num_compiled[:-1]


def logged_by_each(
    folder: Path, world_size: int, config: str, runs: list[list[str]]
) -> list[tuple[dict[str, list[float]], int]]:
    """What runs, each with options, logged by name, and how many blocks each compiled on a rank."""
    num_before = len(list(folder.glob("run*")))
    named = {f"run{number}": options for number, options in enumerate(runs, num_before)}
    (num_compiled, *_) = on_trainer_ranks(
        run_command, world_size, folder, config, named, timeout_s=280
    )
    found = []
    for name, number in zip(named, num_compiled, strict=True):
        logged: dict[str, list[float]] = {}
        with (folder / name / "v" / "metrics.csv").open() as file:
            for row in csv.DictReader(file):
                for key, value in row.items():
                    if value:
                        logged.setdefault(key, []).append(float(value))
        found.append((logged, number))
    return found


def logged_by(
    folder: Path, world_size: int, config: str, options: list[str]
) -> tuple[dict[str, list[float]], int]:
    """Of one run."""
    return logged_by_each(folder, world_size, config, [options])[0]
