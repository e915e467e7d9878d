"""LoRA on prompts with answers: the loss falls, a text is written, peft reads the adapters."""

import copy
import json
import signal
from pathlib import Path

import lightning as L
import peft
import pytest
import torch
import yaml

from recipes.data import TextData
from recipes.errors import RecipeError
from recipes.lora import QwenLora, SaveAdapters
from recipes.monitor import GracefulStop
from recipes.optimizer import OptimizerConfig
from recipes.sample import SampleText
from tests.support.processes import REPOSITORY
from tests.support.trainer import make_trainer, on_trainer_ranks

CONFIG = yaml.safe_load((REPOSITORY / "recipes" / "qwen_lora.yaml").read_text())


def _model():
    options = CONFIG["model"]["init_args"]
    options = {**options, "optimizer": OptimizerConfig(**options["optimizer"])}
    torch.manual_seed(0)
    return QwenLora(vocab_size=300, max_seq_len=64, **options)


def _data(folder):
    pairs = [{"prompt": f"What is {n}? ", "completion": f"It is {n + n}."} for n in range(32)]
    path = Path(folder) / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, pairs)))
    options = {**CONFIG["data"], "vocab_size": 300, "seq_len": 32, "batch_size": 4}
    return TextData(path=path, cache_dir=Path(folder) / "cache", val_fraction=0, **options)


class _Losses(L.Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, module, *args):
        self.losses.append(float(trainer.callback_metrics["train/loss"]))


def _fit(rank, world_size, folder):
    folder = Path(folder)
    data, model = _data(folder / str(rank)), _model()
    losses, sample = _Losses(), SampleText(prompt="", num_tokens=6)
    callbacks = [losses, sample, SaveAdapters(str(folder / "adapters"))]
    strategy, rest = CONFIG["trainer"]["strategy"], {"max_epochs": 9, "limit_val_batches": 0}
    trainer = make_trainer(strategy, folder, callbacks=callbacks, max_steps=16, **rest)
    trainer.fit(model, datamodule=data)
    assert len(sample.texts) == world_size
    assert all(p.dtype == torch.bfloat16 for p in model.parameters() if not p.requires_grad)
    base = copy.deepcopy(model.model).unload()
    loaded = peft.PeftModel.from_pretrained(base, folder / "adapters").eval()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        logits = model.model.eval()(input_ids=ids).logits
        assert torch.equal(loaded(input_ids=ids).logits, logits)
        assert not torch.equal(base(input_ids=ids).logits, _model().build()(input_ids=ids).logits)
    return losses.losses


def test_the_loss_falls_and_peft_computes_the_same_with_the_saved_adapters(tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    for losses in on_trainer_ranks(_fit, 2, str(tmp_path), timeout_s=120):
        # Processors round bf16 products differently; at this rate single losses jump by a tenth.
        assert sum(losses[-4:]) / 4 < 0.9 * losses[0], losses


class _Press(L.Callback):
    """Ctrl-C in the second step of rank 0."""

    def on_train_batch_start(self, trainer, *args):
        if trainer.is_global_zero and trainer.global_step == 1:
            signal.raise_signal(signal.SIGINT)


def _interrupt_and_go_on(rank, world_size, folder):
    folder = Path(folder)

    def fit(*callbacks, **options):
        save = SaveAdapters(str(folder / "adapters"))
        rest = {"max_steps": 3, "limit_val_batches": 0, "callbacks": [*callbacks, save]}
        trainer = make_trainer("scratch_fsdp", folder, **rest)
        trainer.fit(_model(), datamodule=_data(folder / str(rank)), **options)
        return trainer.global_step

    assert fit(_Press(), GracefulStop()) == 2
    assert not (folder / "adapters").exists()
    assert fit(GracefulStop(), ckpt_path=folder / "interrupted.ckpt", weights_only=True) == 3
    assert (folder / "adapters" / "adapter_config.json").is_file()
    with pytest.raises(RecipeError, match=r"SaveAdapters\.folder: .* with something in it"):
        fit()


def test_an_interrupted_run_goes_on_to_its_adapters_which_are_not_written_over(tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    on_trainer_ranks(_interrupt_and_go_on, 2, str(tmp_path), timeout_s=120)


def test_adapters_in_the_way_do_not_keep_a_run_from_validating(tmp_path):
    (tmp_path / "mine").write_text("kept")
    SaveAdapters(str(tmp_path)).setup(make_trainer("auto", tmp_path), _model(), "validate")


def test_wrong_use_is_named_before_training(tmp_path):
    with pytest.raises(RecipeError, match=r"rank: expected 1 or more, got 0"):
        QwenLora(size="tiny", rank=0)
    with pytest.raises(RecipeError, match=r"SaveAdapters: expected a strategy of lightning_fsdp"):
        SaveAdapters("adapters").setup(make_trainer("auto", tmp_path, devices=1), _model(), "fit")
    (tmp_path / "mine").write_text("kept")
    trainer = make_trainer("scratch_fsdp", tmp_path)
    with pytest.raises(RecipeError, match=r"SaveAdapters\.folder: .* with something in it"):
        SaveAdapters(str(tmp_path)).setup(trainer, _model(), "fit")
    for taken in ("mine", "mine/adapters"):
        with pytest.raises(RecipeError, match=r"SaveAdapters\.folder: .* got the file '.*/mine'"):
            SaveAdapters(str(tmp_path / taken)).setup(trainer, _model(), "fit")
