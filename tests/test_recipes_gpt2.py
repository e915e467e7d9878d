"""GPT-2 of the recipes: its sizes, its loss, checkpointed and compiled blocks."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

from recipes.causal_lm import _checkpointed
from recipes.gpt2 import GPT2
from tests.support.recipe_models import (
    SEQ_LEN,
    VOCAB_SIZE,
    assert_fused_attention_sees_no_later_token,
    built_gpt2,
    compile_eagerly,
    loss_and_gradients,
    make_nano_smaller,
    quiet_trainer,
    text_data,
)
from tests.support.texts import write_folder
from tests.support.trainer import SHARDED, on_trainer_ranks


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    make_nano_smaller(monkeypatch)


def token_window(rows: int = 3, seq_len: int = SEQ_LEN, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    window = torch.randint(0, VOCAB_SIZE, (rows, seq_len + 1), generator=generator)
    return {"input_ids": window[:, :-1], "labels": window[:, 1:]}


@pytest.mark.parametrize(
    ("size", "num_parameters"),
    [
        ("small", 124_439_808),
        ("medium", 354_823_168),
        ("large", 774_030_080),
        ("xl", 1_557_611_200),
    ],
)
def test_a_size_has_the_parameters_of_the_paper(size: Any, num_parameters: int) -> None:
    module = GPT2(size=size)
    with torch.device("meta"):
        module.configure_model()
    assert sum(parameter.numel() for parameter in module.parameters()) == num_parameters


def test_head_and_embedding_are_one_parameter(tiny: None) -> None:
    module = built_gpt2()
    assert isinstance(module.model, GPT2LMHeadModel)
    tied = module.model.lm_head.weight
    assert tied is module.model.transformer.wte.weight
    assert sum(parameter is tied for parameter in module.parameters()) == 1
    module.loss(token_window()).backward()
    embedded = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    embedded[token_window()["input_ids"].unique()] = True
    assert tied.grad is not None
    assert tied.grad[~embedded].abs().sum() > 0, "the head's gradient reaches unseen tokens"


def test_building_twice_keeps_the_model(tiny: None) -> None:
    module = built_gpt2()
    before = module.model
    module.configure_model()
    assert module.model is before


def test_a_model_that_is_not_built_is_refused(tiny: None) -> None:
    with pytest.raises(
        RuntimeError, match=r"GPT2: expected a model that is built, got none\. Call"
    ):
        GPT2(size="nano")(token_window()["input_ids"])


def test_the_loss_is_that_of_transformers_on_the_whole_window(tiny: None) -> None:
    module, batch = built_gpt2(), token_window()
    window = torch.cat([batch["input_ids"], batch["labels"][:, -1:]], dim=1)
    assert isinstance(module.model, GPT2LMHeadModel)
    expected = module.model(input_ids=window, labels=window).loss
    torch.testing.assert_close(module.loss(batch), expected, rtol=1e-6, atol=1e-6)
    assert math.isclose(module.loss(batch).item(), math.log(VOCAB_SIZE), rel_tol=0.05)


def test_attention_is_the_fused_one_and_sees_no_later_token(tiny: None) -> None:
    assert_fused_attention_sees_no_later_token(built_gpt2(), token_window())


def _saved_bytes(module: GPT2) -> int:
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module.loss(token_window(rows=8))
    return sum(saved.values())


def test_activation_checkpointing_saves_memory_and_changes_no_value(tiny: None) -> None:
    torch.manual_seed(1)
    plain = built_gpt2()
    torch.manual_seed(1)
    checkpointed = built_gpt2(activation_checkpointing=True)
    expected, found = (
        loss_and_gradients(plain, token_window()),
        loss_and_gradients(checkpointed, token_window()),
    )
    assert len(expected) == len(found) > 20
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert _saved_bytes(checkpointed) < 0.6 * _saved_bytes(plain)
    assert list(checkpointed.state_dict()) == list(plain.state_dict())


def test_checkpointed_blocks_draw_the_same_dropout_again(tiny: None) -> None:
    def run(**options: Any) -> list[Tensor]:
        torch.manual_seed(1)
        module = built_gpt2(dropout=0.3, **options)
        torch.manual_seed(2)
        return loss_and_gradients(module, token_window())

    expected, found = run(), run(activation_checkpointing=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_each_block_is_compiled_and_nothing_else(
    tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compile_eagerly(monkeypatch)
    torch.manual_seed(1)
    plain = built_gpt2()
    torch.manual_seed(1)
    module = built_gpt2(compile_blocks=True, activation_checkpointing=True)
    assert isinstance(module.model, GPT2LMHeadModel)
    assert [id(block) for block in compiled] == [id(block) for block in module.model.transformer.h]
    expected, found = (
        loss_and_gradients(plain, token_window()),
        loss_and_gradients(module, token_window()),
    )
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def _train_sharded(
    rank: int, world_size: int, folder: Path, strategy: str, is_checkpointed: bool
) -> tuple[dict[str, Tensor], int]:
    """Whole weights after three steps, and how often a block's attention was computed."""
    num_calls = 0

    def count(*_: Any) -> None:
        nonlocal num_calls
        num_calls += 1

    torch.manual_seed(5)
    module = GPT2(size="nano", vocab_size=VOCAB_SIZE, activation_checkpointing=is_checkpointed)
    module.configure_model()
    for block in module.blocks():
        block.get_submodule("attn").register_forward_pre_hook(count)
    trainer = quiet_trainer(
        folder, max_steps=3, strategy=strategy, limit_val_batches=0, gradient_clip_val=1.0
    )
    trainer.fit(module, text_data(folder / "corpus", folder / "cache"))
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}, num_calls


@pytest.mark.parametrize("strategy", [*SHARDED[:2], "fsdp1_zero3", "fsdp2_zero2"])
def test_checkpointed_blocks_train_the_same_under_sharding(strategy: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "corpus")
    found = {
        is_checkpointed: on_trainer_ranks(_train_sharded, 2, tmp_path, strategy, is_checkpointed)
        for is_checkpointed in (False, True)
    }
    for (plain, num_calls), (checkpointed, num_calls_checkpointed) in zip(
        *found.values(), strict=True
    ):
        assert num_calls == 3 * 4
        assert num_calls_checkpointed == 2 * num_calls, "forward, and again in the backward"
        assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


def test_recomputed_blocks_get_keywords_that_recomputing_has_too() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, debug: int) -> Tensor:  # type: ignore[override]
            return super().forward(x) * debug

    block = Scaled(3, 3)
    x = torch.randn(2, 3, requires_grad=True)
    expected = block(x, debug=3)
    block.__class__ = _checkpointed(Scaled)
    torch.testing.assert_close(block(x, debug=3), expected)
