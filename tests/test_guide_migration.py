"""The three steps of docs/fsdp1-vs-fsdp2.md train and save as plain torch does."""

import re
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.guide.subjects import Block, are_equal, batch_of, loss_of, net
from tests.support.cases import each_on_trainer_ranks
from tests.support.guide import ENGINE_NAMES, STEPS
from tests.support.ranks import run_on_ranks
from tests.support.trainer import Regressor, make_loader, seeded, weights_of

NUM_STEPS, NUM_MICRO_BATCHES = 3, 2


def _batch(rank: int, step: int, i: int) -> Any:
    """The last step's gradients are too small to be clipped, which would hide a wrong divisor."""
    return (*batch_of(rank, 10 * step + i), 0.3 if step == NUM_STEPS - 1 else 30.0)


def _weighted_loss(model: Any, batch: Any) -> Tensor:
    *batch, weight = batch
    return weight * loss_of(model, batch)


def _program(engine: str) -> str:
    """The three steps of one engine."""
    parts = [code for code in STEPS if re.match(rf"# {engine}\b", code)]
    assert len(parts) == 3
    return "\n".join(parts)


def _in_fp32(code: str) -> str:
    assert "torch.bfloat16" in code
    return code.replace("torch.bfloat16", "torch.float32")


def _run_program(rank: int, world_size: int, code: str, path: str) -> None:
    warnings.simplefilter("ignore")  # torch's own, about names that it will drop
    steps = [[_batch(rank, step, i) for i in range(NUM_MICRO_BATCHES)] for step in range(NUM_STEPS)]
    names = {"torch": torch, "dist": dist, "Block": Block, "device": torch.device("cpu")}
    names |= {"model": net(), "steps": steps, "loss_of": _weighted_loss, "path": path}
    exec(code, names)


def _plain_training() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and momentum after the same steps, in one process."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(NUM_STEPS):
        for rank in range(2):
            for i in range(NUM_MICRO_BATCHES):
                loss = _weighted_loss(model, _batch(rank, step, i))
                (loss / (2 * NUM_MICRO_BATCHES)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert (norm > 1) == (step < NUM_STEPS - 1)
        optimizer.step()
        optimizer.zero_grad()
    named = dict(model.named_parameters())
    momentum = {name: optimizer.state[p]["momentum_buffer"] for name, p in named.items()}
    return model.state_dict(), momentum


def _check_program(code: str, folder: Path, tolerance: float) -> None:
    path = folder / "saved.pt"
    run_on_ranks(_run_program, 2, code, str(path))
    saved = torch.load(path, weights_only=True)
    weights, momentum = _plain_training()
    assert are_equal(saved["model"], weights, tolerance)
    state = saved["optimizer"]["state"]
    names = dict(enumerate(momentum)) if 0 in state else {name: name for name in momentum}
    found = {names[key]: values["momentum_buffer"] for key, values in state.items()}
    assert are_equal(found, momentum, tolerance)


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_the_three_steps_train_and_save_as_plain_torch(engine, tmp_path):
    _check_program(_in_fp32(_program(engine)), tmp_path, 1e-6)


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_the_three_steps_do_so_in_bf16_as_printed(engine, tmp_path):
    _check_program(_program(engine), tmp_path, 2e-2)


def test_the_first_step_of_fsdp2_needs_one_changed_import(tmp_path):
    theirs, ours = _program("FSDP2"), _program("here")
    first = theirs[: theirs.index("# FSDP2", 1)].replace("torch.distributed.fsdp", "lightning_fsdp")
    assert "from lightning_fsdp import MixedPrecisionPolicy, fully_shard" in first
    rest = ours[ours.index("# here", 1) :]
    _check_program(_in_fp32(first + rest), tmp_path, 1e-6)


class _Clipped(Regressor):
    def loss(self, batch: Any) -> Tensor:
        return 30.0 * super().loss(batch)


def _run_trainer(rank: int, world_size: int, code: str) -> dict[str, Tensor]:
    module = seeded(_Clipped)
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False}
    names = {"module": module, "loader": make_loader(), "options": options}
    exec(code.replace("max_epochs=1", "max_epochs=1, **options"), names)
    assert isinstance(names["trainer"], pl.Trainer)
    return weights_of(module)


def test_under_lightning_the_word_alone_changes(tmp_path):
    (code,) = [code for code in STEPS if code.startswith("# under Lightning")]
    words = re.findall(r'"((?:fsdp|scratch)\w+)"', code)
    assert words == ["fsdp1_zero3", "fsdp2_zero3", "scratch_fsdp_zero3"]
    codes = {word: code.replace('"fsdp1_zero3",', f'"{word}",') for word in ("ddp", *words)}
    found = each_on_trainer_ranks(_run_trainer, 2, codes.values())
    trained = {word: found[code] for word, code in codes.items()}
    assert not are_equal(trained["ddp"][0], weights_of(seeded(_Clipped)), 1e-2)
    for word in words:
        for rank in range(2):
            assert are_equal(trained[word][rank], trained["ddp"][rank], 1e-5), word
