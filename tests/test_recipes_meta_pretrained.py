"""Pretrained weights that are read by slices: built without memory, sharded, then read."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from lightning_fsdp import ScratchFSDPStrategy
from lightning_fsdp.checkpoint.contents import LEFT_OUT
from recipes import pretrained
from recipes.errors import RecipeError
from recipes.gpt2 import GPT2
from recipes.lora import QwenLora
from recipes.pretrained import folder_of, load_model, read_weights
from recipes.qwen import Qwen
from tests.support.memory import StorageTracker
from tests.support.pretrained import token_loader
from tests.support.processes import REPOSITORY
from tests.support.trainer import make_trainer, on_trainer_ranks, seeded, weights_of

KINDS = ["gpt2 tied", "gpt2 untied", "qwen tied", "qwen untied"]
WTE = "model.transformer.wte.weight"
STRATEGIES = ["scratch_fsdp_zero3", "scratch_fsdp_zero2", "fsdp1_zero3", "fsdp2_zero3"]


def _plain(kind, layers=2, n_embd=20):
    tied = kind.endswith(" tied")
    if kind.startswith("gpt2"):
        shape = {"n_positions": 16, "n_embd": n_embd, "n_layer": layers, "n_head": 2}
        config = GPT2Config(vocab_size=61, tie_word_embeddings=tied, **shape)
        return GPT2LMHeadModel(config)
    shape = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    rest = {"max_position_embeddings": 16, "tie_word_embeddings": tied}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=61, **shape, **heads, **rest))


def _write(folder, kind, dtype=torch.float32, size="20KB", **options):
    model = seeded(lambda: _plain(kind, **options), seed=5)
    for parameter in model.parameters():  # also what begins as zeros and ones
        parameter.data.add_(torch.randn_like(parameter) / 50)
    model.generation_config.update(do_sample=True, top_k=7)
    model.to(dtype).save_pretrained(folder, max_shard_size=size)
    return str(folder)


def _recipe(kind):
    return GPT2 if kind.startswith("gpt2") else Qwen


def _expected(kind, folder):
    recipe = _recipe(kind)
    config = recipe(pretrained=str(folder)).config
    model = load_model(str(folder), recipe.model_class, config)
    return {f"model.{name}": value.detach() for name, value in model.named_parameters()}


def _same(found, expected):
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


class _Sees(pl.Callback):
    """Weights as other callbacks find them at the beginning, and the loss of every step."""

    def __init__(self):
        self.weights, self.losses = {}, []

    def on_fit_start(self, trainer, module):
        self.weights = {n: w.detach().clone() for n, w in trainer.strategy.weights.full()}

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def on_train_batch_end(self, trainer, module, *args):
        self.losses.append(float(trainer.callback_metrics["train/loss"]))


def _fit(module, strategy, folder, steps=1, **options):
    sees, chosen = _Sees(), {"max_epochs": 9}
    trainer = make_trainer(strategy, Path(folder), max_steps=steps, callbacks=[sees], **chosen)
    trainer.fit(module, token_loader(), **options)
    return trainer, sees


def _reads(rank, world_size, kind, folder):
    expected = _expected(kind, folder)
    for strategy in STRATEGIES:
        losses = []
        for meta_init in (True, False):
            torch.manual_seed(rank)  # values that are drawn must not matter
            module = _recipe(kind)(pretrained=folder, meta_init=meta_init)
            _, sees = _fit(module, strategy, folder)
            _same(sees.weights, expected)
            losses.append(sees.losses)
            assert module.model.generation_config.top_k == 7
        assert losses[0] == losses[1], strategy
    for hook, precision in (("validate", "32-true"), ("test", "bf16-true"), ("predict", "32-true")):
        module, sees = _recipe(kind)(pretrained=folder, meta_init=True), _Sees()
        module.test_step = module.validation_step
        trainer = make_trainer(STRATEGIES[0], Path(folder), callbacks=[sees], precision=precision)
        getattr(trainer, hook)(module, token_loader())
        is_half = precision == "bf16-true"
        _same(sees.weights, {n: v.bfloat16() if is_half else v for n, v in expected.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_first_loss_are_those_of_from_pretrained(tmp_path, kind):
    dtype = torch.float32 if kind.endswith(" tied") else torch.bfloat16
    on_trainer_ranks(_reads, 2, kind, _write(tmp_path, kind, dtype), timeout_s=280)


def _lora(folder, **options):
    return seeded(lambda: QwenLora(pretrained=str(folder), rank=2, **options))


def _split(weights):
    adapters = {name for name in weights if ".lora_" in name}
    base = {n.replace("base_model.model.", "").replace(".base_layer", ""): v
            for n, v in weights.items() if n not in adapters}  # fmt: skip
    return base, {name: weights[name] for name in adapters}


def _reads_under_adapters(rank, world_size, folder):
    expected = {n: v.bfloat16() for n, v in _expected("qwen tied", folder).items()}
    for strategy in ("scratch_fsdp_zero3", "fsdp1_zero3", "fsdp2_zero3"):
        losses = []
        for meta_init in (True, False):
            module = _lora(folder, meta_init=meta_init, activation_checkpointing=True)
            _, sees = _fit(module, strategy, folder)
            base, adapters = _split(sees.weights)
            _same(base, expected)
            assert all(v.dtype == torch.float32 for v in adapters.values())
            assert all(bool(v.any()) == (".lora_A" in n) for n, v in adapters.items())
            losses.append(sees.losses)
            base, trained = _split(dict(module.named_parameters()))
            _same(base, expected)
            assert any(not torch.equal(trained[name], adapters[name]) for name in trained)
        assert losses[0] == losses[1], strategy


def test_a_base_is_read_under_new_adapters(tmp_path):
    folder = _write(tmp_path, "qwen tied")
    on_trainer_ranks(_reads_under_adapters, 2, folder, timeout_s=280)


def _resumes(rank, world_size, folder):
    for strategy in ("scratch_fsdp_zero3", "fsdp1_zero3", "fsdp2_zero3"):
        trainer, _ = _fit(GPT2(pretrained=folder, meta_init=True), strategy, folder, steps=2)
        path = Path(folder) / f"{strategy}.ckpt"
        trainer.save_checkpoint(path)
        saved = {n: p.detach().clone() for n, p in trainer.lightning_module.named_parameters()}
        assert not torch.equal(saved[WTE], _expected("gpt2 tied", folder)[WTE])
        module = GPT2(pretrained=folder, meta_init=True)
        trainer, sees = _fit(module, strategy, folder, steps=3, ckpt_path=path, weights_only=True)
        _same(sees.weights, saved)
        assert trainer.global_step == 3


def test_the_weights_of_a_checkpoint_are_not_read_over(tmp_path):
    on_trainer_ranks(_resumes, 2, _write(tmp_path, "gpt2 tied"), timeout_s=280)


def _resumes_adapters(rank, world_size, folder):
    expected = {n: v.bfloat16() for n, v in _expected("qwen tied", folder).items()}
    for kind in ("full", "sharded"):
        for has_base in (True, False):
            options = {"checkpoint": kind, "checkpoint_base": has_base}
            path = Path(folder) / f"{kind}{has_base}.ckpt"
            trainer, _ = _fit(
                _lora(folder, meta_init=True), ScratchFSDPStrategy(**options), folder, steps=2
            )
            trainer.save_checkpoint(path)
            saved = _split(dict(trainer.lightning_module.named_parameters()))[1]
            module = _lora(folder, meta_init=True)
            with mock.patch.object(pretrained, "read_weights", wraps=read_weights) as reads:
                _, sees = _fit(
                    module, ScratchFSDPStrategy(**options), folder, steps=3,
                    ckpt_path=path, weights_only=True,
                )  # fmt: skip
            assert reads.call_count == (not has_base)
            base, adapters = _split(sees.weights)
            _same(base, expected)
            _same(adapters, {name: value.detach() for name, value in saved.items()})


def test_a_base_that_a_checkpoint_leaves_out_is_read_and_its_adapters_stay(tmp_path):
    on_trainer_ranks(_resumes_adapters, 2, _write(tmp_path, "qwen tied"), timeout_s=280)


def _fits_again(rank, world_size, folder):
    module = GPT2(pretrained=folder, meta_init=True)

    class Fails(pl.Callback):
        def setup(self, trainer, module, stage):
            trainer.strategy.setup = self.fail

        def fail(self, trainer):
            raise ValueError("not yet")

    trainer = make_trainer("scratch_fsdp", Path(folder), max_steps=1, callbacks=[Fails()])
    with pytest.raises(ValueError, match="not yet"):
        trainer.fit(module, token_loader())
    trainer, sees = _fit(module, "scratch_fsdp", folder, steps=2)
    _same(sees.weights, _expected("gpt2 tied", folder))
    trained = {n: p.detach().clone() for n, p in module.named_parameters()}
    trainer.validate(module, token_loader())
    _same(sees.weights, trained)
    assert sum(isinstance(c, pretrained._ReadsFirst) for c in trainer.callbacks) == 1
    _, sees = _fit(module, "scratch_fsdp_zero2", folder)
    _same(sees.weights, trained)
    assert not torch.equal(weights_of(module)[WTE], trained[WTE])


def test_a_module_reads_once_and_then_keeps_what_it_has_trained(tmp_path):
    on_trainer_ranks(_fits_again, 2, _write(tmp_path, "gpt2 tied"))


def _peaks(rank, world_size, folder):
    module = GPT2(pretrained=folder, meta_init=True)
    peaks, found = {"before": 0, "reading": 0}, {}

    def measure():
        peaks[when[-1]] = max(peaks[when[-1]], tracker.live_bytes())

    def read(*args, **options):
        when.append("reading")
        return pretrained_load(*args, **options)

    class Measures(pl.Callback):
        def setup(self, trainer, module, stage):
            tracker.__enter__()

        def on_fit_start(self, trainer, module):
            tracker.__exit__(None, None, None)
            units = [sum(w.shard.numel() for _, w in trainer.strategy.weights.items())]
            found["shard"] = 4 * sum(units)

    when, tracker = ["before"], StorageTracker(at_each_operation=measure)
    pretrained_load = pretrained.load_pretrained
    with mock.patch.object(pretrained, "load_pretrained", read):
        trainer = make_trainer(
            "scratch_fsdp_zero3", Path(folder), max_steps=1, callbacks=[Measures()]
        )
        trainer.fit(module, token_loader())
    block = sum(p.numel() for p in module.blocks()[0].parameters())
    return peaks, found["shard"], 4 * block, 4 * sum(p.numel() for p in module.parameters())


def test_no_rank_holds_the_whole_model(tmp_path):
    _write(tmp_path, "gpt2 tied", layers=8)
    files = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    for peaks, shard, block, whole in on_trainer_ranks(_peaks, 2, str(tmp_path)):
        assert shard <= 0.51 * whole
        assert peaks["before"] <= shard + 1.1 * block + 16_384 < 0.75 * whole
        # While it reads, files are mapped, which the tracker takes for memory.
        assert peaks["reading"] - files <= shard + 16_384


def test_what_cannot_be_read_by_slices_is_refused_before_the_model_is_sharded(tmp_path):
    folder = _write(tmp_path, "gpt2 tied", size="5GB")
    stored = {n: v.clone() for n, v in load_file(tmp_path / "model.safetensors").items()}
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(RecipeError, match=r"meta_init: .*damaged.*Set --model\.meta_init false"):
        GPT2(pretrained=folder, meta_init=True).configure_model()
    (tmp_path / "model.safetensors").unlink()
    torch.save(stored, tmp_path / "pytorch_model.bin")
    with pytest.raises(RecipeError, match=r"meta_init: expected safetensors.*pytorch_model\.bin"):
        GPT2(pretrained=folder, meta_init=True).configure_model()


def test_files_of_another_model_are_refused(tmp_path):
    folder = _write(tmp_path, "gpt2 tied", size="5GB")
    file = tmp_path / "model.safetensors"
    stored = {name: value.clone() for name, value in load_file(file).items()}
    model = _plain("gpt2 tied")
    stored["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)  # of old files
    save_file(stored, file)
    read_weights(model, folder, tmp_path)
    save_file({**stored, "transformer.h.7.mlp.c_fc.bias": torch.ones(3)}, file)
    with pytest.raises(RecipeError, match=r"a place in the model.*transformer\.h\.7\.mlp"):
        read_weights(model, folder, tmp_path)
    del stored["transformer.ln_f.bias"]
    save_file(stored, file)
    with pytest.raises(RecipeError, match=r"no weights for transformer\.ln_f\.bias"):
        read_weights(model, folder, tmp_path)
    with pytest.raises(RecipeError, match=r"pretrained: .*of another shape"):
        read_weights(_plain("gpt2 tied", n_embd=22), folder, tmp_path)


def test_a_checkpoint_with_a_part_of_the_base_is_refused(tmp_path):
    module = GPT2(pretrained=_write(tmp_path, "gpt2 tied"), meta_init=True)
    module.configure_model()
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    message = r"--ckpt_path: .* without '.*wpe.*Set --model\.meta_init false"
    with pytest.raises(RecipeError, match=message):
        module.slices.note(module, {LEFT_OUT: {"model.transformer.wpe.weight": [16, 20]}})
    for left_out, is_resumed in (({}, True), (dict.fromkeys(names), False)):
        module.slices.note(module, {LEFT_OUT: left_out})
        assert module.slices._is_resumed == is_resumed
        module.slices.begin(make_trainer("auto", tmp_path, devices=1))
        assert not module.slices._is_resumed  # the next run may have no checkpoint


_OFFLINE = """
from recipes.pretrained import folder_of
print(folder_of("someone/whole"), folder_of("someone/parts"))
"""


def test_a_name_on_the_hub_is_read_from_the_cache_of_transformers(tmp_path):
    folders = []
    for name, size in (("whole", "5GB"), ("parts", "20KB")):
        place = tmp_path / f"models--someone--{name}"
        folders.append(_write(place / "snapshots" / ("a" * 40), "qwen tied", size=size))
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text("a" * 40)
    told = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", _OFFLINE], env=told, cwd=REPOSITORY, capture_output=True, text=True
    )
    assert ended.stdout.split() == folders, ended.stderr
    assert folder_of(folders[0]) == Path(folders[0])
