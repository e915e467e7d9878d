"""The command of the recipes with sharded checkpoints, and with models of a folder or the hub."""

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from lightning_fsdp.checkpoint.convert import convert
from recipes.tokenizer import END_OF_TEXT
from tests.support.recipe_runs import (
    ONE_PROCESS,
    REPOSITORY,
    VOCAB_SIZE,
    arguments_of,
    logged_by,
    logged_by_each,
)
from tests.support.texts import write_folder
from tests.support.trainer import SHARDED

SHARDED_CHECKPOINTS = [
    "--trainer.strategy=lightning_fsdp.ScratchFSDPStrategy",
    "--trainer.strategy.checkpoint=sharded",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a corpus."""
    write_folder(tmp_path / "corpus")
    return tmp_path


def _sharded_run(folder: Path, *options: str) -> dict[str, list[float]]:
    """A run that saves its slices after two and after four steps."""
    keep = (
        '[{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": '
        '"saved", "filename": "step{step}", "auto_insert_metric_name": false, '
        '"every_n_train_steps": 2, "save_top_k": -1, "save_last": "link"}}]'
    )
    logged, _ = logged_by(
        folder,
        2,
        "qwen_zero3",
        [
            *SHARDED_CHECKPOINTS,
            "--trainer.enable_checkpointing=true",
            f"--trainer.callbacks={keep}",
            *options,
        ],
    )
    return logged


def _weights(path: Path, as_file: Path) -> dict[str, torch.Tensor]:
    convert(path, as_file, to="full")
    state: dict[str, torch.Tensor] = torch.load(as_file, weights_only=True)["state_dict"]
    return state


def test_a_run_with_sharded_checkpoints_goes_on_bit_for_bit(folder: Path) -> None:
    whole = _sharded_run(folder)
    (folder / "saved").rename(folder / "whole")
    assert (folder / "whole" / "step2.ckpt").is_dir()
    # As if the run had been stopped after its third step: what `last` leads to is step 2.
    (folder / "saved").mkdir()
    (folder / "whole" / "step2.ckpt").rename(folder / "saved" / "step2.ckpt")
    (folder / "saved" / "last.ckpt").symlink_to("step2.ckpt")
    rest = _sharded_run(folder, "--ckpt_path=last")
    assert rest["train/loss"] == whole["train/loss"][2:]
    assert rest["val/loss"] == whole["val/loss"][-1:]
    expected = _weights(folder / "whole" / "step4.ckpt", folder / "whole.ckpt")
    found = _weights(folder / "saved" / "step4.ckpt", folder / "rest.ckpt")
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    links = {path.resolve().name for path in (folder / "saved").glob("last*.ckpt")}
    assert "step4.ckpt" in links


def _write_model(folder: Path, corpus: Path, family: str) -> Any:
    """A checkpoint as one finds them: configuration, safetensors in bf16, tokenizer."""
    from recipes.corpus import open_corpus
    from recipes.tokenizer import train_tokenizer

    tokenizer: Tokenizer = train_tokenizer(open_corpus(corpus).pieces(), VOCAB_SIZE)
    assert tokenizer.token_to_id(END_OF_TEXT) is not None
    torch.manual_seed(1)
    model: Any
    if family == "qwen":
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=VOCAB_SIZE + 4,  # padded, as published embeddings are
                hidden_size=24,
                intermediate_size=36,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
                tie_word_embeddings=True,
            )
        )
    else:
        config = GPT2Config(vocab_size=VOCAB_SIZE, n_positions=64, n_embd=24, n_layer=2, n_head=2)
        model = GPT2LMHeadModel(config)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="30KB")
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


# Each family under each engine: at which stage is nothing to the weights of a folder.
@pytest.mark.parametrize(
    ("family", "strategies"), [("qwen", SHARDED[::2]), ("gpt2", SHARDED[1::2])]
)
def test_every_engine_trains_a_model_from_a_folder(
    family: str, strategies: tuple[str, ...], folder: Path
) -> None:
    _write_model(folder / "model", folder / "corpus", family)
    options = ["--model.size=null", "--model.pretrained=model", "--data.tokenizer=model"]
    expected, _ = logged_by(folder, 1, f"{family}_zero3", [*options, *ONE_PROCESS])
    runs = [[*options, f"--trainer.strategy={strategy}"] for strategy in strategies]
    by_strategy = logged_by_each(folder, 2, f"{family}_zero3", runs)
    for strategy, (found, _) in zip(strategies, by_strategy, strict=True):
        for name in ("train/loss", "val/loss"):
            assert found[name] == pytest.approx(expected[name], abs=2e-5), strategy


def test_a_name_on_the_hub_is_looked_up_there(folder: Path) -> None:
    """In the cache of the hub: what was downloaded once is found without a network.

    By one process, as each rank looks for itself; a new one, as the cache is chosen at the import.
    """
    _write_model(folder / "model", folder / "corpus", "qwen")
    cached = folder / "hub" / "models--someone--tiny"
    (cached / "snapshots").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123abc")
    (folder / "model").rename(cached / "snapshots" / "0123abc")
    names = [
        "--model.size=null",
        "--model.pretrained=someone/tiny",
        "--data.tokenizer=someone/tiny",
    ]
    options = [*names, "--trainer.logger.name=log", "--trainer.logger.version=v"]
    options.append("--data.batch_size=4")
    hub = {"HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    finished = subprocess.run(
        [sys.executable, "-m", "recipes.train", *arguments_of(1, "qwen_zero3", options)],
        cwd=folder,
        env=os.environ | hub | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    (folder / "model").symlink_to(cached / "snapshots" / "0123abc")
    options = ["--model.size=null", "--model.pretrained=model", "--data.tokenizer=model"]
    expected, _ = logged_by(folder, 1, "qwen_zero3", [*options, *ONE_PROCESS])
    with (folder / "log" / "v" / "metrics.csv").open() as file:
        found = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert found == pytest.approx(expected["train/loss"], abs=2e-5)
