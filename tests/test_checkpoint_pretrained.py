"""Folders of safetensors: from any engine to transformers, and back."""

import copy
import json
import re
import warnings
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed import fsdp
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from lightning_fsdp import ZERO2, ZERO3, load_pretrained, save_pretrained, shard_model
from lightning_fsdp.checkpoint import safetensors_folder
from recipes.gpt2 import GPT2
from tests.support.cases import each_on_ranks
from tests.support.memory import StorageTracker, bytes_of, tensors_of
from tests.support.ranks import errors_on_ranks, run_on_ranks
from tests.support.trainer import SHARDED, make_trainer, on_trainer_ranks, seeded

_IDS = torch.arange(24).reshape(2, 12) % 61


def _gpt2():
    config = GPT2Config(vocab_size=61, n_positions=16, n_embd=20, n_layer=2, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.bos_token_id = config.eos_token_id = 0
    return GPT2LMHeadModel(config)


def _qwen2(tied=False):
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=61,
            hidden_size=24,
            intermediate_size=36,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=tied,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def _qwen2_tied():
    return _qwen2(tied=True)


MODELS = [_gpt2, _qwen2, _qwen2_tied]


def _plain(model):
    return model


def _core_zero3(model):
    return shard_model(model, ZERO3)


def _core_zero2(model):
    return shard_model(model, ZERO2)


def _fsdp2(model):
    inner = model.get_submodule(model.base_model_prefix)
    for block in inner.h if hasattr(inner, "h") else inner.layers:
        fsdp.fully_shard(block)
    return fsdp.fully_shard(model)


HOW = [_core_zero3, _core_zero2, _fsdp2, _plain]


def _logits(model):
    with torch.no_grad():
        return model.eval()(_IDS).logits


def _wholes(model):
    return {
        name: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone()
        for name, v in model.state_dict().items()
    }


# -- out -------------------------------------------------------------------------------------------


def _save(rank, world_size, shard, make, folder, size):
    folder = Path(folder) / shard.__name__ / "model"
    model = seeded(make)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model = shard(model)
    _logits(model)  # ZeRO-2 has whole copies now
    save_pretrained(model, folder, max_shard_size=size)
    assert not list(folder.parent.glob(".*partial"))
    return expected if rank == 0 else None


@pytest.mark.parametrize("make", MODELS)
def test_transformers_loads_what_a_sharded_model_saved(tmp_path, make):
    for shard, (expected, _) in each_on_ranks(_save, 2, HOW, make, str(tmp_path), "20KB").items():
        folder = tmp_path / shard.__name__ / "model"
        assert len(list(folder.glob("*.safetensors"))) > 1, folder
        loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), (folder, report)
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == [type(make()).__name__], folder
        torch.testing.assert_close(
            dict(loaded.state_dict()),
            expected,
            atol=0,
            rtol=0,
            msg=lambda text, folder=folder: f"{folder}: {text}",
        )
        plain = make()
        plain.load_state_dict(expected)
        assert torch.equal(_logits(loaded), _logits(plain)), folder


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("size", ["20KB", "5GB"])
def test_the_folder_is_the_one_that_transformers_writes(tmp_path, make, size):
    ours, theirs = tmp_path / "_core_zero3" / "model", tmp_path / "theirs"
    run_on_ranks(_save, 2, _core_zero3, make, str(tmp_path), size)
    seeded(make).save_pretrained(theirs, max_shard_size=size)
    names = {path.name for path in ours.iterdir()}
    if size == "5GB":
        assert names == {path.name for path in theirs.iterdir()}
    for name in ("config.json", "generation_config.json"):
        assert json.loads((ours / name).read_text()) == json.loads((theirs / name).read_text())
    read = [
        {
            key: value
            for file in folder.glob("*.safetensors")
            for key, value in load_file(file).items()
        }
        for folder in (ours, theirs)
    ]
    torch.testing.assert_close(read[0], read[1], atol=0, rtol=0)
    if size == "20KB":
        index = json.loads((ours / safetensors_folder.INDEX).read_text())
        assert {*index["weight_map"].values()} | {"config.json", "generation_config.json"} == (
            names - {safetensors_folder.INDEX}
        )
        their_index = json.loads((theirs / safetensors_folder.INDEX).read_text())
        assert index["metadata"]["total_size"] == their_index["metadata"]["total_size"]
        for file in ours.glob("*.safetensors"):
            tensors = load_file(file)
            assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 20_000


class _Mixed(torch.nn.Module):
    """Dtypes of every width, a scalar, an empty tensor, one that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.two_bytes = torch.nn.Parameter(torch.randn(3, 5).half())
        self.brain_float = torch.nn.Parameter(torch.randn(3, 5).bfloat16())
        self.transposed = torch.nn.Parameter(torch.randn(7, 3).t())
        self.scalar = torch.nn.Parameter(torch.tensor(2.5, dtype=torch.float64))
        self.register_buffer("flag", torch.tensor([True, False, True]))
        self.register_buffer("none", torch.empty(0, 4))
        self.register_buffer("count", torch.tensor(3))


def test_every_dtype_and_shape_is_written_as_safetensors_reads_it(tmp_path):
    model = seeded(_Mixed)
    save_pretrained(model, tmp_path / "mixed")
    file = tmp_path / "mixed" / "model.safetensors"
    torch.testing.assert_close(
        load_file(file), {k: v.contiguous() for k, v in model.state_dict().items()}, atol=0, rtol=0
    )
    other = seeded(_Mixed, seed=3)
    assert load_pretrained(other, tmp_path / "mixed").missing == []
    torch.testing.assert_close(dict(other.state_dict()), dict(model.state_dict()), atol=0, rtol=0)


# -- in --------------------------------------------------------------------------------------------


def _load(rank, world_size, shard, make, folder, on_meta):
    if on_meta:
        with torch.device("meta"):
            model = make()
    else:
        model = seeded(make, seed=rank + 5)
    model = shard(model)
    if shard is not _plain:
        _logits(model)
    reads = []
    plain_read = safetensors_folder.SafetensorsFolder.read_into

    def counted(self, name, box, target):
        reads.append(target.nbytes)
        plain_read(self, name, box, target)

    safetensors_folder.SafetensorsFolder.read_into = counted
    try:
        load_pretrained(model, folder)
    finally:
        safetensors_folder.SafetensorsFolder.read_into = plain_read
    found = _wholes(model)
    return sum(reads), found, _logits(model)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_reads_the_elements_that_it_keeps(tmp_path, make, world_size):
    model = seeded(make)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    total = sum(parameter.nbytes for parameter in model.parameters())
    everything = each_on_ranks(_load, world_size, HOW, make, str(tmp_path), False)
    for shard, results in everything.items():
        for _, found, logits in results:
            for ours, theirs, tolerances in (
                (found, dict(model.state_dict()), {"atol": 0, "rtol": 0}),
                (logits, _logits(model), {"atol": 1e-6, "rtol": 1e-5}),
            ):
                torch.testing.assert_close(
                    ours, theirs, **tolerances, msg=lambda text, s=shard: f"{s.__name__}: {text}"
                )
        if shard is _plain:
            assert [num_bytes for num_bytes, *_ in results] == [total] * world_size
        else:
            assert sum(num_bytes for num_bytes, *_ in results) == total, shard.__name__
            largest = max(num_bytes for num_bytes, *_ in results)
            assert largest <= 1.2 * total / world_size, shard.__name__


@pytest.mark.parametrize("make", MODELS)
def test_a_model_without_memory_is_sharded_and_then_loaded(tmp_path, make):
    model = seeded(make)
    model.save_pretrained(tmp_path)
    for _, found, _ in run_on_ranks(_load, 2, _core_zero3, make, str(tmp_path), True):
        torch.testing.assert_close(found, dict(model.state_dict()), atol=0, rtol=0)


def _resident_bytes(file):
    """Of a file, what this process has touched through its mappings."""
    text = Path("/proc/self/smaps").read_text()
    sections = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text)
    found = [section for section in sections if str(file) in section.splitlines()[0]]
    return sum(1024 * int(re.search(r"^Rss:\s+(\d+)", s, re.MULTILINE)[1]) for s in found)


def _touched(rank, world_size, folder):
    model = shard_model(torch.nn.Linear(1024, 8192, bias=False))
    seen = []
    leave = safetensors_folder.SafetensorsFolder.__exit__

    def look_and_leave(self, *args):
        seen.append(_resident_bytes(Path(folder) / "model.safetensors"))
        return leave(self, *args)

    safetensors_folder.SafetensorsFolder.__exit__ = look_and_leave
    tracker = StorageTracker(model)
    at_rest = bytes_of(tensors_of(model))
    peak = []
    tracker.at_each_operation = lambda: peak.append(tracker.live_bytes())
    with tracker:
        load_pretrained(model, folder)
    return seen[0], max(peak) - at_rest


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux tells what is mapped")
def test_no_more_of_a_file_is_touched_and_no_copy_is_made(tmp_path):
    save_file({"weight": torch.randn(8192, 1024)}, tmp_path / "model.safetensors")
    for touched, beside in run_on_ranks(_touched, 4, str(tmp_path)):
        # Of 32 MiB. The kernel maps up to 2 MiB where one byte is touched, at both ends.
        assert 8 * 2**20 <= touched <= 12 * 2**20
        # The mapping of the file, of which no more was touched, and what the ranks agree on.
        assert 0 <= beside - 32 * 2**20 < 4096


def test_keys_of_the_base_model_and_left_overs_of_old_versions_are_known(tmp_path):
    base = GPT2Model(_gpt2().config)
    state = {name: value.contiguous() for name, value in base.state_dict().items()}
    save_file({**state, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path / "model.safetensors")
    model = seeded(_gpt2)
    assert load_pretrained(model, tmp_path).unexpected == []
    torch.testing.assert_close(
        dict(model.transformer.state_dict()), dict(base.state_dict()), atol=0, rtol=0
    )
    assert model.lm_head.weight is model.transformer.wte.weight


# -- in a Trainer ----------------------------------------------------------------------------------


class _Saves(GPT2):
    folder = None

    def on_train_end(self):
        self.trainer.strategy.save_pretrained(self.folder / "during", max_shard_size="1MB")


def _loader():
    ids = torch.randint(0, 61, (16, 12), generator=torch.Generator().manual_seed(1))
    return DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=2)


def _fit(rank, world_size, folder):
    for strategy in SHARDED:
        model = seeded(lambda: _Saves(size="nano", vocab_size=61, max_seq_len=16))
        model.folder = Path(folder) / strategy
        trainer = make_trainer(strategy, Path(folder), max_steps=2)
        trainer.fit(model, _loader())
        trainer.strategy.save_pretrained(model.folder / "after")
        expected = _logits(model.model)
        for when in ("during", "after"):
            loaded = AutoModelForCausalLM.from_pretrained(model.folder / when)
            assert torch.equal(_logits(loaded), expected), (strategy, when)


def test_a_model_trained_here_gives_the_same_logits_in_transformers(tmp_path):
    on_trainer_ranks(_fit, 2, str(tmp_path), timeout_s=280)


class _Loads(GPT2):
    folder = None

    def on_train_start(self):
        load_pretrained(self, self.folder)


def _load_and_fit(rank, world_size, folder):
    start = seeded(lambda: GPT2(size="nano", vocab_size=61, max_seq_len=16))
    start.configure_model()
    if rank == 0:
        start.model.save_pretrained(folder)
    dist.barrier()
    for strategy in SHARDED:
        loads = seeded(lambda: _Loads(size="nano", vocab_size=61, max_seq_len=16), seed=2)
        loads.folder = folder
        starts = copy.deepcopy(start)
        for model in (loads, starts):
            make_trainer(strategy, Path(folder), max_steps=2).fit(model, _loader())
        assert torch.equal(_logits(loads.model), _logits(starts.model)), strategy
        assert not torch.equal(_logits(loads.model), _logits(start.model))


def test_a_hook_loads_weights_under_every_strategy(tmp_path):
    on_trainer_ranks(_load_and_fit, 2, str(tmp_path / "weights"), timeout_s=280)


# -- experts, which are stored one by one and computed with together ------------------------------


def _mixtral():
    config = MixtralConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
    )
    return MixtralForCausalLM(config)


def _mixtral_there_and_back(rank, world_size, ours, theirs):
    model = _core_zero3(seeded(_mixtral))
    expected = _wholes(model)
    save_pretrained(model, ours)
    other = _core_zero3(seeded(_mixtral, seed=2))
    load_pretrained(other, ours)
    torch.testing.assert_close(_wholes(other), expected, atol=0, rtol=0)
    with pytest.raises(NotImplementedError, match=r"gate_up_proj' is computed from .* and others"):
        load_pretrained(other, theirs)


def test_experts_are_written_as_the_module_has_them(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    model = seeded(_mixtral)
    model.save_pretrained(theirs)
    run_on_ranks(_mixtral_there_and_back, 2, str(ours), str(theirs))
    loaded, report = AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(_logits(loaded), _logits(model))


# -- refused ---------------------------------------------------------------------------------------


def _load_wrong(rank, world_size, folder, change):
    model = _core_zero3(seeded(_gpt2))
    if change == "rank 1 has no file" and rank == 1:
        folder = f"{folder}/elsewhere"
    before = _wholes(model)
    try:
        load_pretrained(model, folder)
    finally:
        torch.testing.assert_close(_wholes(model), before, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"missing in the files: transformer\.ln_f\.bias \(strict=False leaves out"),
        ("unexpected", r"without a place in the module: extra"),
        ("shape", r"another shape: transformer\.ln_f\.bias: \(21,\) in the files, \(20,\) here"),
        ("dtype", r"ln_f\.bias: torch\.bfloat16 in the files, torch\.float32 here.*cast=True"),
        (
            "tie",
            r"one weight here, two with other values there: lm_head\.weight and transformer\.wte",
        ),
        ("truncated", r"model\.safetensors: expected a whole safetensors file, got a damaged one"),
        ("no folder", r"expected a folder with model\.safetensors, got nothing there"),
        ("a file", r"expected a folder with model\.safetensors, got a file there"),
        ("old", r"expected model\.safetensors or .*pytorch_model\.bin has to be saved again"),
        ("index", r"model\.safetensors\.index\.json: expected an index with a weight_map"),
        ("no shard", r"the index names \['model-00001-of-00002\.safetensors'\], which are not"),
        ("rank 1 has no file", r"rank 1 of 2.*expected a folder with model\.safetensors"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_on_every_rank_and_nothing_is_changed(
    tmp_path, change, message
):
    folder = tmp_path / "model"
    seeded(_gpt2, seed=1).save_pretrained(folder)
    file = folder / "model.safetensors"
    state, name = load_file(file), "transformer.ln_f.bias"
    if change == "missing":
        del state[name]
    elif change == "unexpected":
        state["extra"] = torch.ones(2)
    elif change == "shape":
        state[name] = torch.ones(21)
    elif change == "dtype":
        state[name] = state[name].bfloat16()
    elif change == "tie":
        state["lm_head.weight"] = state["transformer.wte.weight"] + 1
    save_file(state, file)
    if change == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif change == "no folder":
        folder = tmp_path / "none"
    elif change == "a file":
        folder = file
    elif change == "old":
        file.rename(folder / "pytorch_model.bin")
    elif change == "index":
        (folder / safetensors_folder.INDEX).write_text("{}")
    elif change == "no shard":
        weight_map = {"a": "model-00001-of-00002.safetensors"}
        (folder / safetensors_folder.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    for error in errors_on_ranks(_load_wrong, 2, str(folder), change):
        assert error is not None
        assert re.search(message, error.message, re.DOTALL), error


def test_what_differs_may_be_left_out_or_converted(tmp_path):
    state = {k: v.bfloat16() for k, v in seeded(_gpt2, seed=1).state_dict().items()}
    del state["lm_head.weight"], state["transformer.ln_f.bias"]
    save_file({**state, "extra": torch.ones(2)}, tmp_path / "model.safetensors")
    model = seeded(_gpt2)
    kept = model.transformer.ln_f.bias.clone()
    found = load_pretrained(model, tmp_path, strict=False, cast=True)
    assert (found.missing, found.unexpected) == (["transformer.ln_f.bias"], ["extra"])
    assert torch.equal(model.transformer.ln_f.bias, kept)
    assert torch.equal(model.lm_head.weight, state["transformer.wte.weight"].float())


def _lora(model):
    return peft.get_peft_model(model, peft.LoraConfig(fan_in_fan_out=True))


def _lora_inside(model):
    return _lora(model).get_base_model()


def _lora_of_transformers(model):
    model.add_adapter(peft.LoraConfig(fan_in_fan_out=True))
    return model


def _prompt(model):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(model, config)


class _Around(torch.nn.Module):
    """As a LightningModule holds a model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


def _refuse_adapters(rank, world_size, folder, shard):
    for adapt in (_lora, _lora_inside, _lora_of_transformers, _prompt):
        model = shard(_Around(adapt(seeded(_gpt2))))
        for move in (save_pretrained, load_pretrained):
            with pytest.raises(NotImplementedError, match=r"GPT2LMHeadModel: .* got adapters of"):
                move(model, folder)
            if adapt is not _prompt:  # which is around the model, not inside
                inner = next(m for m in model.modules() if isinstance(m, GPT2LMHeadModel))
                with pytest.raises(NotImplementedError, match=r"got adapters of peft"):
                    move(inner, folder)


@pytest.mark.parametrize("shard", [_plain, _core_zero3, fsdp.fully_shard])
def test_adapters_of_peft_are_refused(tmp_path, shard):
    run_on_ranks(_refuse_adapters, 2, str(tmp_path), shard)


class _TrainsAdapters(GPT2):
    folder = None

    def configure_model(self):
        if not hasattr(self.model, "peft_config"):
            super().configure_model()
            self.model = _lora(self.model)

    def on_train_end(self):
        with pytest.raises(NotImplementedError, match=r"got adapters of peft"):
            self.trainer.strategy.save_pretrained(self.folder)


def _fit_adapters(rank, world_size, folder):
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
    for strategy in ("scratch_fsdp_zero3", "fsdp1_zero3", "fsdp2_zero3"):
        model = seeded(lambda: _TrainsAdapters(size="nano", vocab_size=61, max_seq_len=16))
        model.folder = Path(folder) / strategy
        make_trainer(strategy, Path(folder), max_steps=1).fit(model, _loader())
        assert not model.folder.exists()


def test_a_strategy_refuses_adapters_of_peft(tmp_path):
    on_trainer_ranks(_fit_adapters, 2, str(tmp_path), timeout_s=280)


def test_merged_adapters_are_saved_as_the_message_says(tmp_path):
    adapted = _lora(seeded(_gpt2))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    merged = adapted.merge_and_unload()
    save_pretrained(merged, tmp_path / "merged")
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not any(report.values()), report
    assert torch.equal(_logits(loaded), _logits(merged))
    assert not torch.equal(_logits(loaded), _logits(seeded(_gpt2)))


def test_adapters_beside_the_model_do_not_matter(tmp_path):
    pair = torch.nn.ModuleDict({"model": seeded(_gpt2), "judge": _MLPWithAdapter()})
    save_pretrained(pair, tmp_path / "model")
    assert load_file(tmp_path / "model" / "model.safetensors")


class _MLPWithAdapter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        inner = torch.nn.Sequential(torch.nn.Linear(3, 3))
        self.inner = peft.get_peft_model(inner, peft.LoraConfig(target_modules=["0"]))


def test_quantized_weights_are_refused(tmp_path):
    model = seeded(_gpt2)
    model.hf_quantizer = True
    for move in (save_pretrained, load_pretrained):
        with pytest.raises(NotImplementedError, match="got quantized"):
            move(model, tmp_path)


def test_one_of_two_models_has_to_be_named(tmp_path):
    pair = torch.nn.ModuleDict({"student": seeded(_gpt2), "teacher": seeded(_gpt2)})
    with pytest.raises(ValueError, match=r"got \['student', 'teacher'\]\. Give one of them"):
        save_pretrained(pair, tmp_path)


def _fsdp1(rank, world_size, folder):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(_gpt2(), device_id=torch.device("cpu"), use_orig_params=True)
    for move in (save_pretrained, load_pretrained):
        for of in (model, model.module, model.module.transformer):
            with pytest.raises(TypeError, match=r"got FullyShardedDataParallel, which hides"):
                move(of, folder)


def test_what_hides_its_elements_is_refused(tmp_path):
    run_on_ranks(_fsdp1, 2, str(tmp_path))


class _WithExtraState(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)

    def get_extra_state(self):
        return {"a": 1}


def test_values_that_are_no_tensors_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'_extra_state': expected a tensor, got dict"):
        save_pretrained(_WithExtraState(), tmp_path / "extra")
    odd = torch.nn.Module()
    odd.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"'phase': expected a dtype that safetensors has a name"):
        save_pretrained(odd, tmp_path / "odd")


def test_a_model_without_memory_is_not_loaded(tmp_path):
    seeded(_gpt2).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = _gpt2()
    with pytest.raises(ValueError, match=r"on the meta device.*load after sharding"):
        load_pretrained(model, tmp_path)


def _save_wrong(rank, world_size, folder, kind):
    model = _core_zero3(seeded(_gpt2))
    if kind in ("full disk", "no memory"):
        write = safetensors_folder.SafetensorsWriter.write

        def fail(self, name, tensor):
            if "h.1" in name:
                if kind == "no memory":
                    raise MemoryError
                raise OSError(28, "No space left on device", name)
            write(self, name, tensor)

        safetensors_folder.SafetensorsWriter.write = fail
    try:
        save_pretrained(model, folder, max_shard_size="3 parsecs" if kind == "size" else "5GB")
    finally:
        dist.barrier()
        assert not list(Path(folder).parent.glob(".*partial"))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("occupied", r"expected a directory that does not exist yet, got one with something in it"),
        ("file", r"expected a directory that does not exist yet"),
        ("full disk", r"rank 0 of 2.*No space left on device"),
        ("no memory", r"rank 0 of 2.*MemoryError"),
        ("size", r"max_shard_size: expected bytes or a size such as '5GB', got '3 parsecs'"),
    ],
)
def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(tmp_path, kind, message):
    folder = tmp_path / "model"
    if kind == "occupied":
        folder.mkdir()
        (folder / "mine").write_text("kept")
    elif kind == "file":
        folder.write_text("kept")
    for error in errors_on_ranks(_save_wrong, 2, str(folder), kind):
        assert error is not None
        assert re.search(message, error.message, re.DOTALL), error
    assert folder.exists() == (kind in ("occupied", "file"))
    if kind == "occupied":
        assert [path.name for path in folder.iterdir()] == ["mine"]
