"""Models of the recipes in their smallest size: data, a Trainer, and what each of them must do."""

import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from recipes import gpt2
from recipes.causal_lm import CausalLM
from recipes.data import TextData
from recipes.gpt2 import GPT2
from tests.support.trainer import SHARDED

VOCAB_SIZE = 300

SEQ_LEN = 16

TINY = {"n_embd": 16, "n_layer": 2, "n_head": 2}


def make_nano_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the size nano smaller still."""
    monkeypatch.setitem(gpt2.SHAPES, "nano", (2, 16, 2))


def built_gpt2(**options: Any) -> GPT2:
    module = GPT2(size="nano", vocab_size=VOCAB_SIZE, **options)
    module.configure_model()
    return module


def text_data(folder: Path, cache: Path, **options: Any) -> TextData:
    chosen = {"vocab_size": VOCAB_SIZE, "seq_len": SEQ_LEN, "batch_size": 2, "val_fraction": 0.1}
    return TextData(path=folder, cache_dir=cache, **(chosen | options))


def quiet_trainer(folder: Path, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=2 if options.get("strategy") in SHARDED else 1,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"logger": False, "enable_checkpointing": False} | options),
    )


def fresh(**options: Any) -> GPT2:
    torch.manual_seed(3)
    return GPT2(size="nano", vocab_size=VOCAB_SIZE, **options)


def loss_and_gradients(module: CausalLM, batch: dict[str, Tensor]) -> list[Tensor]:
    module.zero_grad()
    loss = module.loss(batch)
    loss.backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    return [loss.detach(), *[grad.clone() for grad in gradients if grad is not None]]


def assert_fused_attention_sees_no_later_token(module: CausalLM, batch: dict[str, Tensor]) -> None:
    assert module.config._attn_implementation == "sdpa"
    changed = batch["input_ids"].clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % module.config.vocab_size
    before, after = module(batch["input_ids"]), module(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def compile_eagerly(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Make ``torch.compile`` leave what it is given as it is; lists whose methods it was given."""
    compiled: list[Any] = []

    def compile_nothing(forward: Any) -> Any:
        compiled.append(forward.__self__)
        return functools.partial(forward)

    monkeypatch.setattr(torch, "compile", compile_nothing)
    return compiled
