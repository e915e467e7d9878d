"""Short runs of the recipes by their command, and what they wrote."""

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from recipes.data import TextData
from recipes.gpt2 import GPT2
from tests.support import warm

REPOSITORY = Path(__file__).resolve().parents[2]

TIME_LIMIT_S = 200.0


def short_run(folder: Path, *more: str, config: str = "gpt2_zero3.yaml") -> list[str]:
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


def tiny_run(folder: Path, ckpt_path: Path | None = None, **options: Any) -> pl.Trainer:
    """A Trainer that has trained the smallest GPT-2 on the text in ``folder / "corpus"``."""
    data = TextData(
        path=folder / "corpus",
        vocab_size=300,
        seq_len=16,
        batch_size=2,
        cache_dir=folder / "cache",
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(GPT2(size="nano", vocab_size=300), data, ckpt_path=ckpt_path)
    return trainer


def command_line_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """Runs ``recipes.train`` in this process, in ``folder``."""
    from recipes.train import main

    monkeypatch.chdir(folder)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")  # the run sets them; this restores them

    def run(arguments: list[str]) -> None:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        main()

    return run


def mind_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def run_cold(folder: Path, arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
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
            preexec_fn=mind_interrupts,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def finish_warm(folder: Path, arguments: list[str]) -> str:
    """Run to the end on two ranks that have torch already; returns what it printed."""
    folder.mkdir()
    log = folder / "output.txt"
    command = [sys.executable, "-m", "recipes.train", *arguments, "--trainer.devices", "2"]
    failure = warm.run_command(command, log=log, timeout_s=TIME_LIMIT_S, cwd=folder)
    assert failure is None, log.read_text()
    return log.read_text()


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def csv_logger(folder: Path) -> list[str]:
    return [
        "--trainer.logger=lightning.pytorch.loggers.CSVLogger",
        f"--trainer.logger.save_dir={folder}",
        "--trainer.logger.name=log",
        "--trainer.logger.flush_logs_every_n_steps=1",
    ]
