"""A model of the recipes in the Trainer: what it logs and learns, and where it goes on."""

import math
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor
from torch.utils.data import DataLoader

from recipes.errors import RecipeError
from recipes.gpt2 import GPT2
from recipes.optimizer import OptimizerConfig
from tests.support.recipe_models import (
    SEQ_LEN,
    VOCAB_SIZE,
    built_gpt2,
    fresh,
    make_nano_smaller,
    quiet_trainer,
    text_data,
)
from tests.support.texts import write_folder
from tests.support.trainer import SHARDED, on_trainer_ranks


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    make_nano_smaller(monkeypatch)


class _Recorder(pl.Callback):
    """What the Trainer logged at every optimizer step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.lrs: list[float] = []

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.lrs.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if "train/loss" in trainer.callback_metrics:
            self.losses.append(trainer.callback_metrics["train/loss"].item())


def test_the_logged_loss_is_the_mean_of_the_step_s_micro_batches(
    tiny: None, tmp_path: Path
) -> None:
    data = text_data(write_folder(tmp_path / "corpus"), tmp_path / "cache")
    module, recorder = built_gpt2(optimizer=OptimizerConfig(lr=1e-12)), _Recorder()
    trainer = quiet_trainer(
        tmp_path,
        max_steps=2,
        accumulate_grad_batches=3,
        limit_val_batches=0,
        callbacks=[recorder],
    )
    trainer.fit(module, data)
    data.setup("fit")
    iterator = iter(data.train_dataloader())
    losses = [module.loss(next(iterator)).item() for _ in range(6)]
    expected = [sum(losses[:3]) / 3, sum(losses[3:]) / 3]
    assert [recorder.losses[0], recorder.losses[-1]] == pytest.approx(expected, abs=1e-5)


def test_validation_weighs_every_token_alike(tiny: None, tmp_path: Path) -> None:
    data = text_data(write_folder(tmp_path / "corpus"), tmp_path / "cache", batch_size=4)
    data.setup("validate")
    sizes = [len(batch["labels"]) for batch in data.val_dataloader()]
    assert len(sizes) > 1
    assert sizes[-1] < 4, "the last batch is smaller, or a mean of means would pass as well"
    module = built_gpt2()
    (found,) = quiet_trainer(tmp_path).validate(module, data, verbose=False)
    with torch.no_grad():
        whole = next(iter(DataLoader(data.val, batch_size=len(data.val))))
        expected = F.cross_entropy(
            module(whole["input_ids"]).flatten(0, 1), whole["labels"].ravel()
        )
    assert found["val/loss"] == pytest.approx(expected.item(), abs=1e-6)
    assert found["val/perplexity"] == pytest.approx(math.exp(expected.item()), rel=1e-5)
    perplexity = torchmetrics.text.Perplexity()
    perplexity.update(module(whole["input_ids"]), whole["labels"])
    assert found["val/perplexity"] == pytest.approx(perplexity.compute().item(), rel=1e-5)


def test_a_validation_remembers_no_other(tiny: None, tmp_path: Path) -> None:
    data = text_data(write_folder(tmp_path / "corpus"), tmp_path / "cache")
    module = built_gpt2()
    (before,) = quiet_trainer(tmp_path).validate(module, data, verbose=False)
    with torch.no_grad():
        module.get_parameter("model.transformer.ln_f.weight").zero_()  # all tokens as likely
    (after,) = quiet_trainer(tmp_path).validate(module, data, verbose=False)
    assert before["val/loss"] != pytest.approx(math.log(VOCAB_SIZE), abs=1e-4)
    assert after["val/loss"] == pytest.approx(math.log(VOCAB_SIZE), abs=1e-6)


def test_training_learns_the_text(tiny: None, tmp_path: Path) -> None:
    data = text_data(write_folder(tmp_path / "corpus"), tmp_path / "cache")
    recorder = _Recorder()
    trainer = quiet_trainer(tmp_path, max_steps=60, limit_val_batches=0, callbacks=[recorder])
    trainer.fit(fresh(optimizer=OptimizerConfig(lr=0.01)), data)
    assert recorder.losses[0] == pytest.approx(math.log(VOCAB_SIZE), rel=0.05)
    assert recorder.losses[-1] < 0.7 * recorder.losses[0]


class _SaveAt(pl.Callback):
    """Saves a checkpoint after given optimizer steps."""

    def __init__(self, folder: Path, *steps: int) -> None:
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        path = self.folder / f"{trainer.global_step}.ckpt"
        if trainer.global_step in self.steps and not path.exists():
            trainer.save_checkpoint(path)


def test_a_resumed_run_ends_in_the_same_weights_bit_for_bit(tiny: None, tmp_path: Path) -> None:
    folder, cache = write_folder(tmp_path / "corpus", num_words=60), tmp_path / "cache"

    def run(*callbacks: pl.Callback, ckpt_path: Path | None = None) -> dict[str, Tensor]:
        torch.manual_seed(3 if ckpt_path is None else 4)
        module = GPT2(size="nano", vocab_size=VOCAB_SIZE, optimizer=OptimizerConfig(lr=0.01))
        trainer = quiet_trainer(
            tmp_path, max_epochs=3, accumulate_grad_batches=2, callbacks=list(callbacks)
        )
        trainer.fit(module, text_data(folder, cache), ckpt_path=ckpt_path)
        assert trainer.num_training_batches == 9, "five optimizer steps, the last of one batch"
        assert trainer.global_step == 15
        return module.state_dict()

    expected = run(_SaveAt(tmp_path, 2, 5, 6, 10, 13))
    for step in (2, 5, 6, 10, 13):
        found = run(ckpt_path=tmp_path / f"{step}.ckpt")
        assert all(torch.equal(found[name], expected[name]) for name in expected), step


def test_a_checkpoint_is_read_by_plain_torch(tiny: None, tmp_path: Path) -> None:
    data = text_data(write_folder(tmp_path / "corpus"), tmp_path / "cache")
    module, trainer = fresh(), quiet_trainer(tmp_path, max_steps=1, limit_val_batches=0)
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    state = torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]
    with warnings.catch_warnings(action="error"):
        built_gpt2().load_state_dict(state)
    assert torch.equal(state["model.lm_head.weight"], module.state_dict()["model.lm_head.weight"])


def _meta_init(rank, world_size, folder):
    data = text_data(Path(folder) / "text", Path(folder) / "cache")
    found = {}
    for strategy in SHARDED[::2]:
        torch.manual_seed(0)
        module = GPT2(size="nano", vocab_size=VOCAB_SIZE, max_seq_len=SEQ_LEN, meta_init=True)
        trainer = quiet_trainer(Path(folder), strategy=strategy, max_steps=1)
        largest = []

        class Looks(pl.Callback):
            def setup(self, trainer, pl_module, stage, largest=largest):
                largest.append(all(p.is_meta for p in pl_module.parameters()))

        trainer.callbacks.append(Looks())
        trainer.fit(module, data)
        found[strategy] = largest, {n: v.clone() for n, v in module.state_dict().items()}
    return found


def test_a_model_without_memory_gets_its_values_when_it_is_sharded(tiny, tmp_path):
    write_folder(tmp_path / "text")
    found = on_trainer_ranks(_meta_init, 2, str(tmp_path))
    scratch = found[0]["scratch_fsdp_zero3"][1]
    assert scratch["model.transformer.wte.weight"].std() == pytest.approx(0.02, rel=0.1)
    for ranks in found:
        for was_meta, state in ranks.values():
            assert was_meta == [True]
            torch.testing.assert_close(state, scratch, atol=1e-6, rtol=1e-5)


def test_what_cannot_start_without_memory_says_so(tiny, tmp_path):
    write_folder(tmp_path / "text")
    module = GPT2(size="nano", vocab_size=VOCAB_SIZE, meta_init=True)
    trainer = quiet_trainer(tmp_path, strategy="auto", max_steps=1)
    with pytest.raises(RecipeError, match=r"meta_init: .*SingleDeviceStrategy.*meta_init false"):
        trainer.fit(module, text_data(tmp_path / "text", tmp_path / "cache"))
