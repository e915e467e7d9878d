"""The optimizer of the recipes: decay groups, options, warm-up and cosine."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recipes.errors import RecipeError
from recipes.gpt2 import GPT2
from recipes.optimizer import OptimizerConfig, build_adamw, decay_groups, lr_factor
from tests.support.recipe_models import (
    VOCAB_SIZE,
    built_gpt2,
    fresh,
    make_nano_smaller,
    quiet_trainer,
    text_data,
)
from tests.support.texts import write_folder


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    make_nano_smaller(monkeypatch)


def test_matrices_and_embeddings_decay_and_nothing_else(tiny: None) -> None:
    module = built_gpt2()
    decay, other = decay_groups(module.parameters(), 0.3)
    assert (decay["weight_decay"], other["weight_decay"]) == (0.3, 0.0)
    names = {parameter: name for name, parameter in module.named_parameters()}
    assert {names[p].rsplit(".", 1)[1] for p in other["params"]} == {"weight", "bias"}
    assert all(".ln_" in names[p] or names[p].endswith("bias") for p in other["params"])
    assert all(names[p].endswith("weight") for p in decay["params"])
    assert len(decay["params"]) == 2 + 2 * 4
    assert len(decay["params"]) + len(other["params"]) == len(names)


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    (group,) = decay_groups(layer.parameters(), 0.1)
    assert [id(parameter) for parameter in group["params"]] == [id(layer.weight)]


def test_adamw_gets_every_option() -> None:
    config = OptimizerConfig(lr=0.5, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.2)
    optimizer = build_adamw(nn.Linear(3, 2).parameters(), config)
    decay, other = optimizer.param_groups
    for group in (decay, other):
        assert (group["lr"], group["betas"], group["eps"], group["fused"]) == (
            0.5,
            (0.8, 0.9),
            1e-5,
            True,
        )
    assert (decay["weight_decay"], other["weight_decay"]) == (0.2, 0.0)


def _closed_form(num_steps: int, num_warmup: int, low: float) -> list[float]:
    rise = [(step + 1) / (num_warmup + 1) for step in range(num_warmup)]
    fall = [
        (1 + low + (1 - low) * math.cos(math.pi * step / (num_steps - num_warmup))) / 2
        for step in range(num_steps - num_warmup)
    ]
    return rise + fall


@pytest.mark.parametrize(
    ("num_steps", "ratio", "num_warmup"), [(100, 0.1, 10), (7, 0.3, 3), (20, 0.0, 0), (3, 0.01, 1)]
)
def test_the_learning_rate_follows_warm_up_and_cosine(
    num_steps: int, ratio: float, num_warmup: int
) -> None:
    config = OptimizerConfig(warmup_ratio=ratio, final_lr_ratio=0.2)
    found = [lr_factor(step, num_steps=num_steps, config=config) for step in range(num_steps)]
    assert found == pytest.approx(_closed_form(num_steps, num_warmup, 0.2), abs=1e-12)
    assert max(found) == found[num_warmup] == 1.0
    assert lr_factor(num_steps, num_steps=num_steps, config=config) == pytest.approx(0.2)
    assert lr_factor(2 * num_steps, num_steps=num_steps, config=config) == pytest.approx(0.2)


def test_a_run_that_is_all_warm_up_has_a_schedule() -> None:
    config = OptimizerConfig(warmup_ratio=1.0)
    factors = [lr_factor(step, num_steps=4, config=config) for step in range(5)]
    assert factors == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, r"optimizer\.lr: expected more than 0, got 0\.0"),
        ({"weight_decay": -1.0}, r"optimizer\.weight_decay: expected 0 or more, got -1\.0"),
        ({"eps": -1e-8}, r"optimizer\.eps: expected 0 or more, got -1e-08"),
        ({"betas": (1.5, 0.9)}, r"optimizer\.betas: expected two of .*, got \[1\.5, 0\.9\]"),
        ({"betas": (0.9, 1.0)}, r"optimizer\.betas: expected two of .*, got \[0\.9, 1\.0\]"),
        ({"betas": (-0.1, 0.9)}, r"optimizer\.betas: expected two of .*, got \[-0\.1, 0\.9\]"),
        ({"warmup_ratio": 1.5}, r"optimizer\.warmup_ratio: expected 0 to 1, got 1\.5"),
        ({"final_lr_ratio": -0.1}, r"optimizer\.final_lr_ratio: expected 0 to 1, got -0\.1"),
    ],
)
def test_an_optimizer_option_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        OptimizerConfig(**options)


def test_the_learning_rate_moves_with_optimizer_steps_and_ends_with_the_run(
    tiny: None, tmp_path: Path
) -> None:
    data = text_data(write_folder(tmp_path / "corpus"), tmp_path / "cache")
    config = OptimizerConfig(lr=0.01, warmup_ratio=0.3, final_lr_ratio=0.1)
    seen: list[float] = []
    module = GPT2(size="nano", vocab_size=VOCAB_SIZE, optimizer=config)
    trainer = quiet_trainer(tmp_path, max_steps=6, accumulate_grad_batches=3, limit_val_batches=0)
    step = torch.optim.AdamW.step

    def recording_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", recording_step)
        trainer.fit(module, data)
    assert seen == pytest.approx([0.01 * factor for factor in _closed_form(6, 2, 0.1)])


def test_a_run_without_an_end_is_refused(tiny: None, tmp_path: Path) -> None:
    data = text_data(write_folder(tmp_path / "corpus"), tmp_path / "cache")
    trainer = quiet_trainer(tmp_path, max_epochs=-1, limit_val_batches=0)
    with pytest.raises(RecipeError, match=r"schedule: expected a run with an end.*max_steps"):
        trainer.fit(fresh(), data)
