"""The command of the recipes on two ranks: what one process does, in bf16 and compiled as well."""

import functools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.recipe_runs import ONE_PROCESS, logged_by, logged_by_each
from tests.support.texts import write_folder


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
        return logged_by(folder, 1, config, [*options, *ONE_PROCESS])

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
# What a recipe does by itself with each model; what the Trainer and the optimizer do, with one.
OF_CONFIG = {
    "qwen_zero3": ["as it is", "activation checkpointing", "accumulation", "schedule"],
    "gpt2_zero3": ["as it is", "activation checkpointing", "clipping", "plain AdamW", "ZeRO-2"],
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
        features = OF_CONFIG[config]
        runs = [FEATURES[feature][0] for feature in features]
        found = [logged for logged, _ in logged_by_each(folder, 2, config, runs)]
        return dict(zip(features, found, strict=True))

    return run


@pytest.mark.parametrize(
    ("config", "feature"), [(config, each) for config in OF_CONFIG for each in OF_CONFIG[config]]
)
def test_two_ranks_do_what_one_process_does(
    config: str,
    feature: str,
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


@pytest.mark.parametrize("config", ["qwen_zero2", "gpt2_zero3"])
def test_bf16_computes_in_bf16_and_keeps_weights_in_fp32(
    config: str, folder: Path, alone: Alone
) -> None:
    expected, _ = alone(config.replace("zero2", "zero3"))  # one process has no stages
    saving = ["--trainer.enable_checkpointing=true", "--trainer.default_root_dir=saved"]
    found, _ = logged_by(folder, 2, config, ["--trainer.precision=bf16-mixed", *saving])
    assert found["train/loss"] == pytest.approx(expected["train/loss"], rel=0.005)
    assert found["train/loss"] != pytest.approx(expected["train/loss"], abs=2e-5)
    (path,) = folder.rglob("*.ckpt")
    saved = torch.load(path, weights_only=True)
    (state,) = saved["optimizer_states"]
    moments = [each[name] for each in state["state"].values() for name in ("exp_avg", "exp_avg_sq")]
    assert {tensor.dtype for tensor in [*saved["state_dict"].values(), *moments]} == {torch.float32}


@pytest.mark.parametrize("config", ["qwen_zero3"])
def test_compiled_blocks_train_the_same(config: str, folder: Path, alone: Alone) -> None:
    whole_batches = "--trainer.limit_val_batches=2"  # a smaller one would be compiled anew
    expected, num_compiled = alone(config, whole_batches)
    assert num_compiled == 0
    options = ["--model.compile_blocks=true", "--model.activation_checkpointing=true"]
    found, num_compiled = logged_by(folder, 2, config, [*options, whole_batches])
    assert num_compiled == 4
    assert found["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-4)
    assert found["val/loss"] == pytest.approx(expected["val/loss"], abs=1e-4)
