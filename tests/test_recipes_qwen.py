"""Qwen2.5 of the recipes: its shapes, its loss, and weights that exist, under every engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, Qwen2Config, Qwen2ForCausalLM

from recipes import qwen
from recipes.errors import RecipeError
from recipes.qwen import Qwen
from tests.support.recipe_models import (
    assert_fused_attention_sees_no_later_token,
    compile_eagerly,
    loss_and_gradients,
)
from tests.support.trainer import SHARDED, make_trainer, on_trainer_ranks, seeded

VOCAB_SIZE = 61
SEQ_LEN = 12
TINY = {
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the size tiny smaller still."""
    monkeypatch.setitem(qwen.SHAPES, "tiny", (3, 24, 4, 2, 36))


def _built(**options: Any) -> Qwen:
    module = seeded(lambda: Qwen(size="tiny", vocab_size=VOCAB_SIZE, **options))
    seeded(module.configure_model)
    return module


def _batch(rows: int = 3, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    window = torch.randint(0, VOCAB_SIZE, (rows, SEQ_LEN + 1), generator=generator)
    return {"input_ids": window[:, :-1], "labels": window[:, 1:]}


# --------------------------------------------------------------------------------------- model

PUBLISHED: dict[Any, dict[str, Any]] = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    | {"num_attention_heads": 14, "num_parameters": 494_032_768},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    | {"num_attention_heads": 12, "num_parameters": 1_543_714_304},
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_a_size_is_the_published_one(size: Any) -> None:
    expected = dict(PUBLISHED[size])
    num_parameters = expected.pop("num_parameters")
    module = Qwen(size=size)
    expected |= {"vocab_size": 151_936, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}
    expected |= {"max_position_embeddings": 32_768, "tie_word_embeddings": True}
    expected |= {"hidden_act": "silu", "attention_dropout": 0.0, "use_sliding_window": False}
    assert expected.items() <= module.config.to_dict().items()
    assert module.config.rope_parameters["rope_theta"] == 1e6
    with torch.device("meta"):
        module.configure_model()
    assert sum(parameter.numel() for parameter in module.parameters()) == num_parameters


def test_the_tiny_size_has_the_parameters_of_the_table() -> None:
    for vocab_size, expected in ((151_936, 20.2), (4096, 1.3)):
        module = Qwen(size="tiny", vocab_size=vocab_size)
        with torch.device("meta"):
            module.configure_model()
        num_parameters = sum(parameter.numel() for parameter in module.parameters())
        assert round(num_parameters / 1e6, 1) == expected


def test_head_and_embedding_are_one_parameter(tiny: None) -> None:
    module = _built()
    assert isinstance(module.model, Qwen2ForCausalLM)
    assert module.model.lm_head.weight is module.model.model.embed_tokens.weight
    assert len(module.blocks()) == 3


def test_the_loss_is_that_of_transformers_on_the_whole_window(tiny: None) -> None:
    module, batch = _built(), _batch()
    window = torch.cat([batch["input_ids"], batch["labels"][:, -1:]], dim=1)
    assert isinstance(module.model, Qwen2ForCausalLM)
    expected = module.model(input_ids=window, labels=window).loss
    torch.testing.assert_close(module.loss(batch), expected, rtol=1e-6, atol=1e-6)


def test_attention_is_the_fused_one_and_sees_no_later_token(tiny: None) -> None:
    assert_fused_attention_sees_no_later_token(_built(), _batch())


def test_checkpointed_blocks_are_computed_twice_and_change_no_value(tiny: None) -> None:
    num_calls = 0

    def count(*_: Any) -> None:
        nonlocal num_calls
        num_calls += 1

    plain, checkpointed = _built(), _built(activation_checkpointing=True)
    for block in checkpointed.blocks():
        block.get_submodule("mlp").register_forward_pre_hook(count)
    expected, found = (
        loss_and_gradients(plain, _batch()),
        loss_and_gradients(checkpointed, _batch()),
    )
    assert num_calls == 2 * 3
    assert len(expected) == len(found) > 30
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert list(checkpointed.state_dict()) == list(plain.state_dict())


def test_each_block_is_compiled_and_nothing_else(
    tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compile_eagerly(monkeypatch)
    module = _built(compile_blocks=True, activation_checkpointing=True)
    assert [id(block) for block in compiled] == [id(block) for block in module.blocks()]
    expected, found = loss_and_gradients(_built(), _batch()), loss_and_gradients(module, _batch())
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


# ---------------------------------------------------------------------------------- pretrained


def _save_pretrained(folder: Path, dtype: torch.dtype = torch.float32) -> Qwen2ForCausalLM:
    config = Qwen2Config(vocab_size=VOCAB_SIZE, tie_word_embeddings=True, **TINY)
    model = seeded(lambda: Qwen2ForCausalLM(config)).to(dtype)
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pretrained_weights_come_from_a_folder_in_the_dtype_of_the_run(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    saved = _save_pretrained(tmp_path, dtype).state_dict()
    module = Qwen(pretrained=str(tmp_path))
    module.configure_model()
    assert isinstance(module.model, Qwen2ForCausalLM)
    loaded = module.model.state_dict()
    assert loaded.keys() == saved.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, saved[name].float()), name
    assert all(child.training for child in module.modules())
    assert module.model.lm_head.weight is module.model.model.embed_tokens.weight


def _evaluate_pretrained(
    rank: int, world_size: int, folder: Path, strategy: str
) -> tuple[float, list[str]]:
    """The loss of this rank's sequences, and the names that were trained on."""
    module = Qwen(pretrained=str(folder))
    batch = _batch(seed=rank)
    rows = [{name: value[row] for name, value in batch.items()} for row in range(3)]
    trainer = make_trainer(strategy, folder, use_distributed_sampler=False)
    (found,) = trainer.validate(
        module, torch.utils.data.DataLoader(rows, batch_size=3), verbose=False
    )
    return found["val/loss"], [name for name, _ in module.named_parameters()]


@pytest.mark.parametrize("strategy", ["ddp", *SHARDED])
def test_every_engine_starts_from_pretrained_weights(strategy: str, tmp_path: Path) -> None:
    model = _save_pretrained(tmp_path)
    module = Qwen(pretrained=str(tmp_path))
    module.model = model
    expected = sum(module.loss(_batch(seed=rank)).item() for rank in (0, 1)) / 2
    for loss, names in on_trainer_ranks(_evaluate_pretrained, 2, tmp_path, strategy):
        assert loss == pytest.approx(expected, abs=1e-6)
        assert names == [f"model.{name}" for name, _ in model.named_parameters()]


def test_what_is_not_pretrained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"pretrained: expected a folder with .*--model\.pretrai"):
        Qwen(pretrained=str(tmp_path))
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"pretrained: .* \(a model of type 'gpt2'\)"):
        Qwen(pretrained=str(tmp_path))
    with pytest.raises(RecipeError, match="Qwen: expected either size or pretrained, got size="):
        Qwen()


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    model = _save_pretrained(tmp_path)
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    state = model.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(RecipeError, match=r"\(no weights for model\.layers\.1\.mlp\.up_proj\.wei"):
        Qwen(pretrained=str(tmp_path)).configure_model()


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    _save_pretrained(tmp_path)
    module = Qwen(pretrained=str(tmp_path))
    module.config.intermediate_size = 40
    with pytest.raises(RecipeError, match=r"pretrained: expected a folder with config.json and we"):
        module.configure_model()
