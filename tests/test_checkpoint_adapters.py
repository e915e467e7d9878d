"""Adapters of peft, saved from shards as peft saves them, read by peft, and merged."""

import json
import warnings
from pathlib import Path

import peft
import pytest
import torch
from torch.distributed import fsdp
from transformers import AutoModelForCausalLM

from lightning_fsdp import save_adapters, save_pretrained
from tests.support.adapters import (
    KINDS,
    Adapted,
    adapted,
    adapted_loader,
    loss_of,
    qwen2,
    token_batch,
    trained,
)
from tests.support.cases import each_on_ranks
from tests.support.pretrained import _core_zero3, _gpt2, logits_of, wholes
from tests.support.ranks import run_on_ranks
from tests.support.trainer import make_trainer, on_trainer_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")


def _fsdp2(model):
    inner = model.get_base_model().base_model
    for block in inner.h if hasattr(inner, "h") else inner.layers:
        fsdp.fully_shard(block)
    return fsdp.fully_shard(model)


def _merge_in_one_process(model):
    """What peft makes of it; where it copies an embedding apart, it says so in the config."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")
        return model.merge_and_unload()


def assert_same_folder(ours, theirs, what=""):
    names = {path.name for path in theirs.iterdir()}
    assert {path.name for path in ours.iterdir()} == names, what
    for name in names:
        if name.endswith(".json"):
            assert json.loads((ours / name).read_text()) == json.loads((theirs / name).read_text())
        else:
            assert (ours / name).read_bytes() == (theirs / name).read_bytes(), (what, name)


def _plain(model):
    return model


CASES = [
    *((kind, _core_zero3) for kind in KINDS),
    ("bf16", _fsdp2),
    ("tied", _fsdp2),
    ("qwen2", _plain),
]


def _save(rank, world_size, case, folder):
    kind, shard = case
    folder = Path(folder) / f"{kind} {shard.__name__} {world_size}"
    model = shard(adapted(kind))
    loss_of(model, token_batch(0, 0, rank))  # the core has looked at its units now
    before, parameters = wholes(model), list(model.parameters())
    save_adapters(model, folder / "adapters")
    save_pretrained(model, folder / "merged", merge_adapters=True)
    torch.testing.assert_close(wholes(model), before, atol=0, rtol=0)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    loss_of(model, token_batch(0, 0, rank)).backward()
    if rank == 0:
        plain = adapted(kind)
        plain.save_pretrained(folder / "theirs")
        assert_same_folder(folder / "adapters", folder / "theirs", kind)
        make, _ = KINDS[kind]
        torch.manual_seed(0)
        loaded = peft.PeftModel.from_pretrained(make(), folder / "adapters")
        assert torch.equal(logits_of(loaded), logits_of(plain)), kind
        merged = _merge_in_one_process(plain)
        found, report = AutoModelForCausalLM.from_pretrained(
            folder / "merged", output_loading_info=True
        )
        assert not any(report.values()), (kind, report)
        expected = dict(merged.state_dict())
        torch.testing.assert_close(dict(found.state_dict()), expected, atol=0, rtol=0)
        tied = (found.config.tie_word_embeddings, merged.config.tie_word_embeddings)
        assert tied[0] == tied[1] == (kind in ("tied", "bf16 tied", "tied head", "gpt2")), kind
        assert found.config.architectures == [type(merged).__name__]


_NEED_VALUES = {
    "RandLoraConfig": {"r": 3},
    "VBLoRAConfig": {"r": 3, "num_vectors": 16, "vector_length": 12},
    "DeloraConfig": {"r": 3},
}


def _merge_with_values(rank, world_size, folder):
    """Kinds of which peft computes something of values, also of those that are not the layer's."""
    for name, options in _NEED_VALUES.items():
        config = getattr(peft, name)(target_modules=["q_proj", "down_proj"], **options)

        def build(config=config):
            torch.manual_seed(0)
            model = peft.get_peft_model(qwen2(), config)
            for parameter in trained(model):
                torch.nn.init.normal_(parameter, std=0.2)
            return model

        model = _core_zero3(build())
        save_pretrained(model, Path(folder) / name, merge_adapters=True)
        expected, plain = build().merge_and_unload().state_dict(), qwen2().state_dict()
        found = AutoModelForCausalLM.from_pretrained(Path(folder) / name).state_dict()
        torch.testing.assert_close(dict(found), dict(expected), atol=0, rtol=0)
        key = "model.layers.0.self_attn.q_proj.weight"
        assert not torch.allclose(found[key], plain[key]), "something was added"


def test_adapters_whose_merge_needs_values_are_merged(tmp_path):
    run_on_ranks(_merge_with_values, 2, str(tmp_path))


def test_files_are_those_of_peft_and_adapters_are_merged_as_by_peft(tmp_path):
    few = [("qwen2", _core_zero3), ("qwen2", _fsdp2)]
    for world_size, cases in ((2, CASES), (3, few[:1]), (1, few)):
        each_on_ranks(_save, world_size, cases, str(tmp_path), timeout_s=200)


class _Saves(Adapted):
    folder = None

    def on_train_end(self):
        self.trainer.strategy.save_adapters(self.folder / "during")
        self.trainer.strategy.save_pretrained(self.folder / "merged", merge_adapters=True)


class _Continues(Adapted):
    """Starts from saved adapters."""

    def __init__(self, kind, folder):
        super().__init__(kind)
        base = self.model.unload()
        self.model = peft.PeftModel.from_pretrained(base, folder, is_trainable=True)

    def on_train_start(self):
        self.trainer.strategy.save_adapters(self.folder)


def _fit(rank, world_size, strategy, kind, folder, earlier):
    folder = Path(folder) / f"{strategy} {world_size}"
    model = _Saves(kind)
    model.folder = folder
    trainer = make_trainer(strategy, folder, max_steps=2)
    trainer.fit(model, adapted_loader())
    trainer.strategy.save_adapters(folder / "after")
    if rank == 0:
        model.model.save_pretrained(folder / "theirs")
        for when in ("during", "after"):
            assert_same_folder(folder / when, folder / "theirs", strategy)
    merged = _merge_in_one_process(model.model)
    found = AutoModelForCausalLM.from_pretrained(folder / "merged")
    expected = dict(merged.state_dict())
    torch.testing.assert_close(dict(found.state_dict()), expected, atol=0, rtol=0)
    if earlier is not None:
        model = _Continues(kind, earlier)
        model.folder = folder / "continued"
        make_trainer(strategy, folder, max_steps=1).fit(model, adapted_loader())
        file = "adapter_model.safetensors"
        assert (model.folder / file).read_bytes() == (Path(earlier) / file).read_bytes()


def test_strategies_save_while_they_train_and_another_goes_on(tmp_path):
    earlier = None
    for strategy, kind, world_size in [
        ("scratch_fsdp_zero3", "bf16", 2),
        ("fsdp1_zero3", "bf16", 3),
        ("fsdp2_zero2", "bf16", 1),
        ("scratch_fsdp_zero2", "bf16", 2),
    ]:
        on_trainer_ranks(_fit, world_size, strategy, kind, str(tmp_path), earlier, timeout_s=100)
        earlier = str(tmp_path / f"{strategy} {world_size}" / "after")
    on_trainer_ranks(_fit, 2, "fsdp1_zero2", "dora", str(tmp_path), None, timeout_s=100)


def _refused(rank, world_size, folder):
    folder = Path(folder)
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel: expected one .* of peft .* got none"):
        save_adapters(_gpt2(), folder / "none")
    pair = torch.nn.ModuleList([adapted("qwen2"), adapted("qwen2")])
    with pytest.raises(ValueError, match=r"expected one model of peft .* got \['0', '1'\]"):
        save_pretrained(pair, folder / "two", merge_adapters=True)
    model = _core_zero3(adapted("qwen2"))
    with pytest.raises(ValueError, match=r"one of \['default'\], got 'other'"):
        save_adapters(model, folder / "other", adapter_name="other")
    with pytest.raises(RuntimeError, match=r"lora_B.* Merge adapters by save_pretrained\("):
        model.merge_adapter()
    (folder / "full").mkdir(exist_ok=True)
    (folder / "full" / "mine").write_text("kept")
    for save in (save_adapters, lambda *args: save_pretrained(*args, merge_adapters=True)):
        with pytest.raises(FileExistsError, match=r"one with something in it"):
            save(model, folder / "full")
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = _core_zero3(peft.get_peft_model(_gpt2(), prompts))
    with pytest.raises(NotImplementedError, match=r"got embeddings of prompts of .*computes"):
        save_adapters(model, folder / "prompts")
    assert not list(folder.glob(".*"))


def test_what_cannot_be_saved_is_refused_on_every_rank(tmp_path):
    run_on_ranks(_refused, 2, str(tmp_path))
