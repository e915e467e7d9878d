"""What a recipe is told on its command line, on two ranks: by the values of one process."""

import csv
import functools
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse._deprecated import JsonargparseDeprecationWarning
from tokenizers import Tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from lightning_fsdp.checkpoint.convert import convert
from recipes.tokenizer import END_OF_TEXT
from recipes.train import main
from tests.support.inductor import needs_inductor
from tests.support.texts import write_folder
from tests.support.trainer import SHARDED, on_trainer_ranks

REPOSITORY = Path(__file__).resolve().parents[1]
VOCAB_SIZE = 300

ONE_PROCESS = ["--trainer.strategy=auto", "--data.batch_size=4"]
SHARDED_CHECKPOINTS = [
    "--trainer.strategy=lightning_fsdp.ScratchFSDPStrategy",
    "--trainer.strategy.checkpoint=sharded",
]


def _arguments(num_ranks: int, config: str, options: list[str]) -> list[str]:
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


def _run(
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
    compile_plainly = torch.compile

    def compile_counted(*args: Any, **kwargs: Any) -> Any:
        num_compiled[-1] += 1
        return compile_plainly(*args, **kwargs)

    torch.compile = compile_counted  # type: ignore[assignment]
    for name, options in runs.items():
        logger = [f"--trainer.logger.name={name}", "--trainer.logger.version=v"]
        sys.argv = ["train.py", *_arguments(world_size, config, [*options, *logger])]
        try:
            main()
        except BaseException as error:
            error.add_note(f"in the run {name!r}: {options}")
            raise
        num_compiled.append(0)
    return num_compiled[:-1]


def _logged_by_each(
    folder: Path, world_size: int, config: str, runs: list[list[str]]
) -> list[tuple[dict[str, list[float]], int]]:
    """What runs, each with options, logged by name, and how many blocks each compiled on a rank."""
    num_before = len(list(folder.glob("run*")))
    named = {f"run{number}": options for number, options in enumerate(runs, num_before)}
    (num_compiled, *_) = on_trainer_ranks(_run, world_size, folder, config, named, timeout_s=280)
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


def _logged(
    folder: Path, world_size: int, config: str, options: list[str]
) -> tuple[dict[str, list[float]], int]:
    """Of one run."""
    return _logged_by_each(folder, world_size, config, [options])[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a corpus."""
    write_folder(tmp_path / "corpus")
    return tmp_path


Alone = Callable[..., tuple[dict[str, list[float]], int]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """What one process does with a YAML and options, on the corpus that every test has."""
    folder = tmp_path_factory.mktemp("alone")
    write_folder(folder / "corpus")

    @functools.cache
    def run(config: str, *options: str) -> tuple[dict[str, list[float]], int]:
        return _logged(folder, 1, config, [*options, *ONE_PROCESS])

    return run


# What is asked of two ranks; what of the single process; and whether that trains otherwise than
# the recipe does.
FEATURES: dict[str, tuple[list[str], list[str], bool]] = {
    "as it is": ([], [], False),
    "accumulation": (*[["--trainer.accumulate_grad_batches=2"]] * 2, True),
    "clipping": (*[["--trainer.gradient_clip_val=0.01"]] * 2, True),
    "schedule": (
        *[["--model.optimizer.warmup_ratio=0.6", "--model.optimizer.final_lr_ratio=0.3"]] * 2,
        True,
    ),
    "activation checkpointing": (["--model.activation_checkpointing=true"], [], False),
    "plain AdamW": (["--model.optimizer.fused=false"], [], False),
    "ZeRO-2": (["--trainer.strategy=scratch_fsdp_zero2"], [], False),
}


@pytest.fixture(scope="module")
def on_two_ranks(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], dict[str, dict[str, list[float]]]]:
    """What two ranks logged with a YAML, by feature; the same two for one after another."""

    @functools.cache
    def run(config: str) -> dict[str, dict[str, list[float]]]:
        folder = tmp_path_factory.mktemp(config)
        write_folder(folder / "corpus")
        runs = [options for options, *_ in FEATURES.values()]
        found = [logged for logged, _ in _logged_by_each(folder, 2, config, runs)]
        return dict(zip(FEATURES, found, strict=True))

    return run


@pytest.mark.parametrize("config", ["qwen_zero3", "gpt2_zero3"])
@pytest.mark.parametrize("feature", FEATURES)
def test_two_ranks_do_what_one_process_does(
    feature: str,
    config: str,
    alone: Alone,
    on_two_ranks: Callable[[str], dict[str, dict[str, list[float]]]],
) -> None:
    _, of_one, trains_otherwise = FEATURES[feature]
    expected, _ = alone(config, *of_one)
    found = on_two_ranks(config)[feature]
    assert len(expected["train/loss"]) == 4
    assert len(expected["val/perplexity"]) >= 2
    for name in ("train/loss", "val/loss"):
        assert found[name] == pytest.approx(expected[name], abs=2e-5), name
    assert found["val/perplexity"] == pytest.approx(expected["val/perplexity"], rel=5e-5)
    assert found["val/perplexity"] == pytest.approx(
        [math.exp(loss) for loss in found["val/loss"]], rel=1e-5
    )
    assert found["train/lr"] == expected["train/lr"]
    if trains_otherwise:
        plain, _ = alone(config)
        assert plain["val/loss"] != pytest.approx(expected["val/loss"], abs=1e-4)


@pytest.mark.parametrize("config", ["qwen_zero3", "qwen_zero2", "gpt2_zero3"])
def test_bf16_computes_in_bf16_and_keeps_weights_in_fp32(
    config: str, folder: Path, alone: Alone
) -> None:
    expected, _ = alone(config)
    saving = ["--trainer.enable_checkpointing=true", "--trainer.default_root_dir=saved"]
    found, _ = _logged(folder, 2, config, ["--trainer.precision=bf16-mixed", *saving])
    assert found["train/loss"] == pytest.approx(expected["train/loss"], rel=0.005)
    assert found["train/loss"] != pytest.approx(expected["train/loss"], abs=2e-5)
    (path,) = folder.rglob("*.ckpt")
    saved = torch.load(path, weights_only=True)
    (state,) = saved["optimizer_states"]
    moments = [each[name] for each in state["state"].values() for name in ("exp_avg", "exp_avg_sq")]
    assert {tensor.dtype for tensor in [*saved["state_dict"].values(), *moments]} == {torch.float32}


@needs_inductor
@pytest.mark.parametrize("config", ["qwen_zero3", "qwen_zero2"])
def test_compiled_blocks_train_the_same(config: str, folder: Path, alone: Alone) -> None:
    expected, num_compiled = alone(config)
    assert num_compiled == 0
    options = ["--model.compile_blocks=true", "--model.activation_checkpointing=true"]
    found, num_compiled = _logged(folder, 2, config, options)
    assert num_compiled == 4
    assert found["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-4)
    assert found["val/loss"] == pytest.approx(expected["val/loss"], abs=1e-4)


def _sharded_run(folder: Path, *options: str) -> dict[str, list[float]]:
    """A run that saves its slices after two and after four steps."""
    keep = (
        '[{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": '
        '"saved", "filename": "step{step}", "auto_insert_metric_name": false, '
        '"every_n_train_steps": 2, "save_top_k": -1, "save_last": "link"}}]'
    )
    logged, _ = _logged(
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


# -- from weights that exist -----------------------------------------------------------------------


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


@pytest.mark.parametrize("family", ["qwen", "gpt2"])
def test_every_engine_trains_a_model_from_a_folder(family: str, folder: Path) -> None:
    _write_model(folder / "model", folder / "corpus", family)
    options = ["--model.size=null", "--model.pretrained=model", "--data.tokenizer=model"]
    expected, _ = _logged(folder, 1, f"{family}_zero3", [*options, *ONE_PROCESS])
    runs = [[*options, f"--trainer.strategy={strategy}"] for strategy in SHARDED]
    by_strategy = _logged_by_each(folder, 2, f"{family}_zero3", runs)
    for strategy, (found, _) in zip(SHARDED, by_strategy, strict=True):
        for name in ("train/loss", "val/loss"):
            assert found[name] == pytest.approx(expected[name], abs=2e-5), strategy


def test_a_name_on_the_hub_is_looked_up_there(folder: Path) -> None:
    """In the cache of the hub: what was downloaded once is found without a network."""
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
    hub = {"HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    finished = subprocess.run(
        [sys.executable, "-m", "recipes.train", *_arguments(2, "qwen_zero3", options)],
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
    expected, _ = _logged(folder, 1, "qwen_zero3", [*options, *ONE_PROCESS])
    with (folder / "log" / "v" / "metrics.csv").open() as file:
        found = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert found == pytest.approx(expected["train/loss"], abs=2e-5)
