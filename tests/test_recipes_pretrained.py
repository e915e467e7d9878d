"""Models that exist already: read, or refused by name; and data that does not fit a model."""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
from jsonargparse._deprecated import JsonargparseDeprecationWarning
from safetensors.torch import save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config

from recipes.errors import RecipeError
from recipes.gpt2 import GPT2
from recipes.train import main
from tests.support.recipe_models import (
    TINY,
    VOCAB_SIZE,
    make_nano_smaller,
    quiet_trainer,
    text_data,
)
from tests.support.recipe_runs import arguments_of
from tests.support.texts import write_folder
from tests.support.trainer import on_trainer_ranks


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    make_nano_smaller(monkeypatch)


def _save_pretrained(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    config = GPT2Config(vocab_size=VOCAB_SIZE, n_positions=32, **TINY)
    model = GPT2LMHeadModel(config).to(dtype)
    model.save_pretrained(folder)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pretrained_weights_come_from_a_folder_in_the_dtype_of_the_run(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    saved = _save_pretrained(tmp_path, dtype)
    module = GPT2(pretrained=str(tmp_path))
    module.configure_model()
    assert isinstance(module.model, GPT2LMHeadModel)
    loaded = module.model.state_dict()
    assert loaded.keys() == saved.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, saved[name].float()), name
    assert module.max_seq_len == 32
    assert all(child.training for child in module.modules())
    assert module.model.lm_head.weight is module.model.transformer.wte.weight


def test_what_is_not_pretrained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"pretrained: expected a folder with .*--model\.pretrai"):
        GPT2(pretrained=str(tmp_path))
    Qwen2Config().save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"pretrained: .* \(a model of type 'qwen2'\)"):
        GPT2(pretrained=str(tmp_path))
    GPT2Config(vocab_size=VOCAB_SIZE, **TINY).save_pretrained(tmp_path)
    module = GPT2(pretrained=str(tmp_path))
    with pytest.raises(RecipeError, match=r"pretrained: expected a folder with config.json and we"):
        module.configure_model()
    with pytest.raises(RecipeError, match=r"pretrained: .*config\.json' \(a file\)"):
        GPT2(pretrained=str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("field", "message"),
    [({"n_layer": "abc"}, "'n_layer' expected int, got str"), ({"dtype": "what"}, "'what'")],
)
def test_a_config_with_a_field_of_a_wrong_type_is_refused(
    tmp_path: Path, field: dict[str, str], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"} | field))
    with pytest.raises(RecipeError, match=f"pretrained: expected .*{tmp_path}.*{message}"):
        GPT2(pretrained=str(tmp_path))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_a_file_of_weights_that_was_cut_off_is_refused(
    tmp_path: Path, name: str, share: float
) -> None:
    saved = _save_pretrained(tmp_path, torch.float32)
    if name == "pytorch_model.bin":
        (tmp_path / "model.safetensors").unlink()
        torch.save(saved, tmp_path / name)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: int(share * len(content))])
    why = "SafetensorError: " if name == "model.safetensors" else ""
    message = rf"pretrained: expected .*'{tmp_path}' \({why}.*, or copy or download its files again"
    with pytest.raises(RecipeError, match=message):
        GPT2(pretrained=str(tmp_path)).configure_model()


def test_weights_for_which_the_model_has_no_place_are_refused(tmp_path: Path) -> None:
    _save_pretrained(tmp_path, torch.float32)
    GPT2Config(vocab_size=VOCAB_SIZE, n_positions=32, **TINY | {"n_layer": 1}).save_pretrained(
        tmp_path
    )
    # A layer has 12; transformers takes c_attn.bias for the old buffer attn.bias.
    message = r"got 11 without one in '.*': transformer\.h\.1\.attn\.c_attn\.weight, .*, \.\.\.\. C"
    with pytest.raises(RecipeError, match=message):
        GPT2(pretrained=str(tmp_path)).configure_model()


@pytest.mark.parametrize("prefix", ["transformer.", ""], ids=["saved today", "as on the hub"])
def test_buffers_and_tied_heads_of_old_files_are_no_left_over_weights(
    tmp_path: Path, prefix: str
) -> None:
    saved = _save_pretrained(tmp_path, torch.float32)
    stored = {name.replace("transformer.", prefix): t.clone() for name, t in saved.items()}
    if not prefix:
        del stored["lm_head.weight"]
    for layer in range(TINY["n_layer"]):
        stored[f"{prefix}h.{layer}.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
        stored[f"{prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    module = GPT2(pretrained=str(tmp_path))
    module.configure_model()
    assert module.model is not None
    for name, tensor in module.model.state_dict().items():
        assert torch.equal(tensor, saved[name]), name


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ({}, "Give one of them"),
        ({"size": "nano", "pretrained": "gpt2"}, "Set the other one to null"),
    ],
)
def test_a_model_is_either_new_or_pretrained(options: dict[str, Any], cure: str) -> None:
    expected = "GPT2: expected either size or pretrained, got size="
    with pytest.raises(RecipeError, match=rf"{expected}.* {cure}\."):
        GPT2(**options)


def test_data_that_does_not_fit_the_model_is_refused(tiny: None, tmp_path: Path) -> None:
    folder, cache = write_folder(tmp_path / "corpus"), tmp_path / "cache"
    data = text_data(folder, cache, seq_len=33)
    data.open()
    with pytest.raises(RecipeError, match=r"at most the model's 32 positions, got 33\. Lower"):
        GPT2(size="nano", vocab_size=VOCAB_SIZE, max_seq_len=32).require_fitting(data)
    with pytest.raises(
        RecipeError, match=r"at least the tokenizer's 300, got 299\. Set --data\.vo"
    ):
        GPT2(size="nano", vocab_size=299).require_fitting(data)
    _save_pretrained(tmp_path / "model", torch.float32)
    pretrained = GPT2(pretrained=str(tmp_path / "model"))
    with pytest.raises(RecipeError, match=r"at most the model's 32"):
        pretrained.require_fitting(data)
    data = text_data(folder, cache)
    data.open()
    with pytest.raises(RecipeError, match=r"trained on the corpus\. Add --data\.tokenizer .*model"):
        pretrained.require_fitting(data)


def test_the_trainer_meets_the_refusal_as_well(tiny: None, tmp_path: Path) -> None:
    data = text_data(write_folder(tmp_path / "corpus"), tmp_path / "cache")
    with pytest.raises(RecipeError, match="vocab_size: expected at least the tokenizer's 300"):
        quiet_trainer(tmp_path, max_steps=1).fit(GPT2(size="nano", vocab_size=299), data)


def _refuse(module: GPT2) -> NoReturn:
    raise RecipeError.at("pretrained", "weights", "none", "Add them.")


def _without_weights(rank: int, world_size: int, folder: Path, which: str) -> object:
    """With what the command ends where ranks have no weights."""
    warnings.simplefilter("ignore", JsonargparseDeprecationWarning)  # LightningCLI's own use of it
    os.chdir(folder)
    sys.argv = ["train.py", *arguments_of(world_size, "gpt2_zero3", [])]
    build = _refuse if which == "all" or rank == 1 else GPT2.build
    with mock.patch.object(GPT2, "build", build), pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.parametrize(("which", "shown_by"), [("all", 0), ("one", 1)])
def test_a_mistake_in_the_model_is_shown_by_one_rank_and_ends_all(
    which: str, shown_by: int, tmp_path: Path
) -> None:
    write_folder(tmp_path / "corpus")
    codes = on_trainer_ranks(_without_weights, 2, tmp_path, which)
    assert str(codes[shown_by]).endswith("pretrained: expected weights, got none. Add them.")
    assert codes[1 - shown_by] == 1
