"""GPT-2 of the recipes: the model, its loss, its optimizer and schedule, by their values."""

import functools
import json
import math
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config

from recipes.data import TextData
from recipes.errors import RecipeError
from recipes.gpt2 import GPT2
from recipes.optimizer import OptimizerConfig, build_adamw, decay_groups, lr_factor
from tests.support.texts import write_folder
from tests.support.trainer import SHARDED, on_trainer_ranks

VOCAB_SIZE = 300
SEQ_LEN = 16
TINY = {"n_embd": 16, "n_layer": 2, "n_head": 2}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the size nano smaller still."""
    from recipes import gpt2

    shape = gpt2.GPT2Shape(num_layers=2, width=16, num_heads=2)
    monkeypatch.setitem(gpt2.SHAPES, "nano", shape)


def _built(**options: Any) -> GPT2:
    module = GPT2(size="nano", vocab_size=VOCAB_SIZE, **options)
    module.configure_model()
    return module


def _batch(rows: int = 3, seq_len: int = SEQ_LEN, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    window = torch.randint(0, VOCAB_SIZE, (rows, seq_len + 1), generator=generator)
    return {"input_ids": window[:, :-1], "labels": window[:, 1:]}


def _data(folder: Path, cache: Path, **options: Any) -> TextData:
    chosen = {"vocab_size": VOCAB_SIZE, "seq_len": SEQ_LEN, "batch_size": 2, "val_fraction": 0.1}
    return TextData(path=folder, cache_dir=cache, **(chosen | options))


def _trainer(folder: Path, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=2 if options.get("strategy") in SHARDED else 1,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"logger": False, "enable_checkpointing": False} | options),
    )


# --------------------------------------------------------------------------------------- model


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
    module = _built()
    assert isinstance(module.model, GPT2LMHeadModel)
    tied = module.model.lm_head.weight
    assert tied is module.model.transformer.wte.weight
    assert sum(parameter is tied for parameter in module.parameters()) == 1
    module.loss(_batch()).backward()
    embedded = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    embedded[_batch()["input_ids"].unique()] = True
    assert tied.grad is not None
    assert tied.grad[~embedded].abs().sum() > 0, "the head's gradient reaches unseen tokens"


def test_building_twice_keeps_the_model(tiny: None) -> None:
    module = _built()
    before = module.model
    module.configure_model()
    assert module.model is before


def test_a_model_that_is_not_built_is_refused(tiny: None) -> None:
    with pytest.raises(
        RuntimeError, match=r"GPT2: expected a model that is built, got none\. Call"
    ):
        GPT2(size="nano")(_batch()["input_ids"])


def test_the_loss_is_that_of_transformers_on_the_whole_window(tiny: None) -> None:
    module, batch = _built(), _batch()
    window = torch.cat([batch["input_ids"], batch["labels"][:, -1:]], dim=1)
    assert isinstance(module.model, GPT2LMHeadModel)
    expected = module.model(input_ids=window, labels=window).loss
    torch.testing.assert_close(module.loss(batch), expected, rtol=1e-6, atol=1e-6)
    assert math.isclose(module.loss(batch).item(), math.log(VOCAB_SIZE), rel_tol=0.05)


def test_attention_is_the_fused_one_and_sees_no_later_token(tiny: None) -> None:
    module, batch = _built(), _batch()
    assert module.config._attn_implementation == "sdpa"
    changed = batch["input_ids"].clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % VOCAB_SIZE
    before, after = module(batch["input_ids"]), module(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def _loss_and_gradients(module: GPT2) -> list[Tensor]:
    module.zero_grad()
    loss = module.loss(_batch())
    loss.backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    return [loss.detach(), *[grad.clone() for grad in gradients if grad is not None]]


def _saved_bytes(module: GPT2) -> int:
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module.loss(_batch(rows=8))
    return sum(saved.values())


def test_activation_checkpointing_saves_memory_and_changes_no_value(tiny: None) -> None:
    torch.manual_seed(1)
    plain = _built()
    torch.manual_seed(1)
    checkpointed = _built(activation_checkpointing=True)
    expected, found = _loss_and_gradients(plain), _loss_and_gradients(checkpointed)
    assert len(expected) == len(found) > 20
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert _saved_bytes(checkpointed) < 0.6 * _saved_bytes(plain)
    assert list(checkpointed.state_dict()) == list(plain.state_dict())


def test_checkpointed_blocks_draw_the_same_dropout_again(tiny: None) -> None:
    def run(**options: Any) -> list[Tensor]:
        torch.manual_seed(1)
        module = _built(dropout=0.3, **options)
        torch.manual_seed(2)
        return _loss_and_gradients(module)

    expected, found = run(), run(activation_checkpointing=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_each_block_is_compiled_and_nothing_else(
    tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def compile_eagerly(forward: Any) -> Any:
        compiled.append(forward.__self__)
        return functools.partial(forward)

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    torch.manual_seed(1)
    plain = _built()
    torch.manual_seed(1)
    module = _built(compile_blocks=True, activation_checkpointing=True)
    assert isinstance(module.model, GPT2LMHeadModel)
    assert [id(block) for block in compiled] == [id(block) for block in module.model.transformer.h]
    expected, found = _loss_and_gradients(plain), _loss_and_gradients(module)
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
    trainer = _trainer(
        folder, max_steps=3, strategy=strategy, limit_val_batches=0, gradient_clip_val=1.0
    )
    trainer.fit(module, _data(folder / "corpus", folder / "cache"))
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}, num_calls


@pytest.mark.parametrize("strategy", SHARDED)
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


# ---------------------------------------------------------------------------------- pretrained


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


@pytest.mark.parametrize("options", [{}, {"size": "nano", "pretrained": "gpt2"}])
def test_a_model_is_either_new_or_pretrained(options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="GPT2: expected either size or pretrained, got size="):
        GPT2(**options)


# ----------------------------------------------------------------------------- fit of the data


def test_data_that_does_not_fit_the_model_is_refused(tiny: None, tmp_path: Path) -> None:
    folder, cache = write_folder(tmp_path / "corpus"), tmp_path / "cache"
    data = _data(folder, cache, seq_len=33)
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
    data = _data(folder, cache)
    data.open()
    with pytest.raises(RecipeError, match=r"trained on the corpus\. Add --data\.tokenizer .*model"):
        pretrained.require_fitting(data)


def test_the_trainer_meets_the_refusal_as_well(tiny: None, tmp_path: Path) -> None:
    data = _data(write_folder(tmp_path / "corpus"), tmp_path / "cache")
    with pytest.raises(RecipeError, match="vocab_size: expected at least the tokenizer's 300"):
        _trainer(tmp_path, max_steps=1).fit(GPT2(size="nano", vocab_size=299), data)


# ------------------------------------------------------------------------ optimizer and schedule


def test_matrices_and_embeddings_decay_and_nothing_else(tiny: None) -> None:
    module = _built()
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


# ------------------------------------------------------------------------------ in the Trainer


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


def test_the_learning_rate_moves_with_optimizer_steps_and_ends_with_the_run(
    tiny: None, tmp_path: Path
) -> None:
    data = _data(write_folder(tmp_path / "corpus"), tmp_path / "cache")
    config = OptimizerConfig(lr=0.01, warmup_ratio=0.3, final_lr_ratio=0.1)
    seen: list[float] = []
    module = GPT2(size="nano", vocab_size=VOCAB_SIZE, optimizer=config)
    trainer = _trainer(tmp_path, max_steps=6, accumulate_grad_batches=3, limit_val_batches=0)
    step = torch.optim.AdamW.step

    def recording_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", recording_step)
        trainer.fit(module, data)
    assert seen == pytest.approx([0.01 * factor for factor in _closed_form(6, 2, 0.1)])


def test_a_run_without_an_end_is_refused(tiny: None, tmp_path: Path) -> None:
    data = _data(write_folder(tmp_path / "corpus"), tmp_path / "cache")
    trainer = _trainer(tmp_path, max_epochs=-1, limit_val_batches=0)
    with pytest.raises(RecipeError, match=r"schedule: expected a run with an end.*max_steps"):
        trainer.fit(_fresh(), data)


def _fresh(**options: Any) -> GPT2:
    torch.manual_seed(3)
    return GPT2(size="nano", vocab_size=VOCAB_SIZE, **options)


def test_the_logged_loss_is_the_mean_of_the_step_s_micro_batches(
    tiny: None, tmp_path: Path
) -> None:
    data = _data(write_folder(tmp_path / "corpus"), tmp_path / "cache")
    module, recorder = _built(optimizer=OptimizerConfig(lr=1e-12)), _Recorder()
    trainer = _trainer(
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
    data = _data(write_folder(tmp_path / "corpus"), tmp_path / "cache", batch_size=4)
    data.setup("validate")
    sizes = [len(batch["labels"]) for batch in data.val_dataloader()]
    assert len(sizes) > 1
    assert sizes[-1] < 4, "the last batch is smaller, or a mean of means would pass as well"
    module = _built()
    (found,) = _trainer(tmp_path).validate(module, data, verbose=False)
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
    data = _data(write_folder(tmp_path / "corpus"), tmp_path / "cache")
    module = _built()
    (before,) = _trainer(tmp_path).validate(module, data, verbose=False)
    with torch.no_grad():
        module.get_parameter("model.transformer.ln_f.weight").zero_()  # all tokens as likely
    (after,) = _trainer(tmp_path).validate(module, data, verbose=False)
    assert before["val/loss"] != pytest.approx(math.log(VOCAB_SIZE), abs=1e-4)
    assert after["val/loss"] == pytest.approx(math.log(VOCAB_SIZE), abs=1e-6)


def test_training_learns_the_text(tiny: None, tmp_path: Path) -> None:
    data = _data(write_folder(tmp_path / "corpus"), tmp_path / "cache")
    recorder = _Recorder()
    trainer = _trainer(tmp_path, max_steps=60, limit_val_batches=0, callbacks=[recorder])
    trainer.fit(_fresh(optimizer=OptimizerConfig(lr=0.01)), data)
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
        trainer = _trainer(
            tmp_path, max_epochs=3, accumulate_grad_batches=2, callbacks=list(callbacks)
        )
        trainer.fit(module, _data(folder, cache), ckpt_path=ckpt_path)
        assert trainer.num_training_batches == 9, "five optimizer steps, the last of one batch"
        assert trainer.global_step == 15
        return module.state_dict()

    expected = run(_SaveAt(tmp_path, 2, 5, 6, 10, 13))
    for step in (2, 5, 6, 10, 13):
        found = run(ckpt_path=tmp_path / f"{step}.ckpt")
        assert all(torch.equal(found[name], expected[name]) for name in expected), step


def test_a_checkpoint_is_read_by_plain_torch(tiny: None, tmp_path: Path) -> None:
    data = _data(write_folder(tmp_path / "corpus"), tmp_path / "cache")
    module, trainer = _fresh(), _trainer(tmp_path, max_steps=1, limit_val_batches=0)
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    state = torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]
    with warnings.catch_warnings(action="error"):
        _built().load_state_dict(state)
    assert torch.equal(state["model.lm_head.weight"], module.state_dict()["model.lm_head.weight"])


def _meta_init(rank, world_size, folder):
    data = _data(Path(folder) / "text", Path(folder) / "cache")
    found = {}
    for strategy in SHARDED[::2]:
        torch.manual_seed(0)
        module = GPT2(size="nano", vocab_size=VOCAB_SIZE, max_seq_len=SEQ_LEN, meta_init=True)
        trainer = _trainer(Path(folder), strategy=strategy, max_steps=1)
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
    trainer = _trainer(tmp_path, strategy="auto", max_steps=1)
    with pytest.raises(RecipeError, match=r"meta_init: .*SingleDeviceStrategy.*Leave out"):
        trainer.fit(module, _data(tmp_path / "text", tmp_path / "cache"))
    GPT2Config(vocab_size=VOCAB_SIZE, **TINY).save_pretrained(tmp_path / "model")
    with pytest.raises(RecipeError, match=r"meta_init: .*new weights.*pretrained"):
        GPT2(pretrained=str(tmp_path / "model"), meta_init=True)
