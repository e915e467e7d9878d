"""Models of transformers, saved from shards and read into shards, slice by slice."""

import copy
import json
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed import fsdp
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from lightning_fsdp import ZERO2, load_pretrained, save_pretrained, shard_model
from lightning_fsdp.checkpoint import safetensors_folder
from recipes.gpt2 import GPT2
from tests.support.cases import each_on_ranks
from tests.support.memory import StorageTracker, bytes_of, tensors_of
from tests.support.pretrained import _core_zero3, _gpt2, _plain, logits_of, token_loader, wholes
from tests.support.ranks import run_on_ranks
from tests.support.trainer import SHARDED, make_trainer, on_trainer_ranks, seeded

pytestmark = pytest.mark.usefixtures("kept_ranks")


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


def _core_zero2(model):
    return shard_model(model, ZERO2)


def _fsdp2(model):
    inner = model.get_submodule(model.base_model_prefix)
    for block in inner.h if hasattr(inner, "h") else inner.layers:
        fsdp.fully_shard(block)
    return fsdp.fully_shard(model)


HOW = [_core_zero3, _core_zero2, _fsdp2, _plain]


def _save(rank, world_size, shard, make, folder, size):
    folder = Path(folder) / shard.__name__ / "model"
    model = seeded(make)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model = shard(model)
    logits_of(model)  # ZeRO-2 has whole copies now
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
        exactly = {"atol": 0, "rtol": 0, "msg": lambda text, f=folder: f"{f}: {text}"}
        torch.testing.assert_close(dict(loaded.state_dict()), expected, **exactly)
        plain = make()
        plain.load_state_dict(expected)
        assert torch.equal(logits_of(loaded), logits_of(plain)), folder


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


def test_beside_a_single_file_an_old_index_is_not_asked(tmp_path):
    seeded(_gpt2, seed=1).save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    new = seeded(_gpt2, seed=2)
    new.save_pretrained(tmp_path / "parts")
    assert (tmp_path / "parts" / safetensors_folder.INDEX).exists(), "transformers leaves it"
    model = seeded(_gpt2)
    load_pretrained(model, tmp_path / "parts")
    assert torch.equal(logits_of(model), logits_of(new))


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


def _load(rank, world_size, shard, make, folder, on_meta):
    if on_meta:
        with torch.device("meta"):
            model = make()
    else:
        model = seeded(make, seed=rank + 5)
    model = shard(model)
    if shard is not _plain:
        logits_of(model)
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
    found = wholes(model)
    return sum(reads), found, logits_of(model)


@pytest.mark.parametrize(
    ("world_size", "make"), [(2, MODELS[0]), (3, MODELS[0]), (2, MODELS[1]), (3, MODELS[2])]
)
def test_a_rank_reads_the_elements_that_it_keeps(tmp_path, make, world_size):
    model = seeded(make)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    total = sum(parameter.nbytes for parameter in model.parameters())
    everything = each_on_ranks(_load, world_size, HOW, make, str(tmp_path), False)
    for shard, results in everything.items():
        for _, found, logits in results:
            for ours, theirs, tolerances in (
                (found, dict(model.state_dict()), {"atol": 0, "rtol": 0}),
                (logits, logits_of(model), {"atol": 1e-6, "rtol": 1e-5}),
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

    tracker = StorageTracker(model)
    at_rest = bytes_of(tensors_of(model))
    peak = []
    tracker.at_each_operation = lambda: peak.append(tracker.live_bytes())
    looks = mock.patch.object(safetensors_folder.SafetensorsFolder, "__exit__", look_and_leave)
    with looks, tracker:
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


class _Saves(GPT2):
    folder = None

    def on_train_end(self):
        self.trainer.strategy.save_pretrained(self.folder / "during", max_shard_size="1MB")


def _fit(rank, world_size, folder):
    for strategy in SHARDED:
        model = seeded(lambda: _Saves(size="nano", vocab_size=61, max_seq_len=16))
        model.folder = Path(folder) / strategy
        trainer = make_trainer(strategy, Path(folder), max_steps=2)
        trainer.fit(model, token_loader())
        trainer.strategy.save_pretrained(model.folder / "after")
        expected = logits_of(model.model)
        for when in ("during", "after"):
            loaded = AutoModelForCausalLM.from_pretrained(model.folder / when)
            assert torch.equal(logits_of(loaded), expected), (strategy, when)


def test_a_model_trained_here_gives_the_same_logits_in_transformers(tmp_path):
    on_trainer_ranks(_fit, 2, str(tmp_path), timeout_s=280)


class _Loads(GPT2):
    def on_train_start(self):
        if self.trainer.ckpt_path is None:
            load_pretrained(self, self.folder)


def _load_and_fit(rank, world_size, folder):
    start = seeded(lambda: GPT2(size="nano", vocab_size=61, max_seq_len=16))
    start.configure_model()
    if rank == 0:
        start.model.save_pretrained(folder)
    dist.barrier()
    saved = Path(folder, "saved.ckpt")
    for strategy in SHARDED:
        # Of each engine, one is also continued from a checkpoint.
        runs = [(1, None), (2, saved)] if strategy.endswith("zero3") else [(1, None)]
        for num_steps, ckpt_path in runs:
            loads = seeded(lambda: _Loads(size="nano", vocab_size=61, max_seq_len=16), seed=2)
            loads.folder = folder
            starts = copy.deepcopy(start)
            for model in (loads, starts):
                trainer = make_trainer(strategy, saved.parent, max_steps=num_steps, max_epochs=2)
                trainer.fit(model, token_loader(), ckpt_path=ckpt_path)
            if len(runs) > num_steps:
                trainer.save_checkpoint(saved)
            assert torch.equal(logits_of(loads.model), logits_of(starts.model)), strategy
        assert not torch.equal(logits_of(loads.model), logits_of(start.model))


def test_a_hook_loads_weights_under_every_strategy(tmp_path):
    on_trainer_ranks(_load_and_fit, 2, str(tmp_path / "weights"), timeout_s=280)


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
    expected = wholes(model)
    save_pretrained(model, ours)
    other = _core_zero3(seeded(_mixtral, seed=2))
    load_pretrained(other, ours)
    torch.testing.assert_close(wholes(other), expected, atol=0, rtol=0)
    with pytest.raises(NotImplementedError, match=r"gate_up_proj' is computed from .* and others"):
        load_pretrained(other, theirs)


def test_experts_are_written_as_the_module_has_them(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    model = seeded(_mixtral)
    model.save_pretrained(theirs)
    run_on_ranks(_mixtral_there_and_back, 2, str(ours), str(theirs))
    loaded, report = AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(logits_of(loaded), logits_of(model))
