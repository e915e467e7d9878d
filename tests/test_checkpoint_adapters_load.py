"""Base and adapters read into sharded models of peft, against peft's own ``from_pretrained``."""

import json
import math
import warnings
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import fsdp

from lightning_fsdp import ZERO2, load_adapters, load_pretrained, shard_model
from tests.support.adapters import (
    KINDS,
    Adapted,
    adapted,
    adapted_loader,
    lora,
    loss_of,
    qwen2,
    token_batch,
    trained,
)
from tests.support.cases import each_on_ranks, each_on_trainer_ranks
from tests.support.pretrained import _core_zero3, _plain, logits_of, wholes
from tests.support.trainer import SHARDED, make_trainer

pytestmark = pytest.mark.usefixtures("kept_ranks")

WARNS = ("dora", "bf16 dora", "head", "tokens", "untied", "whole head")


def _zero2(model):
    return shard_model(model, ZERO2)


def _fsdp2(model):
    for block in model.get_base_model().base_model.layers:
        fsdp.fully_shard(block)
    return fsdp.fully_shard(model)


def _base(kind, seed=5):
    make, _ = KINDS[kind]
    torch.manual_seed(seed)
    base = make()
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return base


def _saved(folder, kind):
    """Written by transformers and peft in one process; other values than ``adapted`` gives."""
    where = folder / kind
    base = _base(kind)
    base.save_pretrained(where / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, about embeddings
        torch.manual_seed(3)
        model = peft.get_peft_model(base, KINDS[kind][1]())
        with torch.no_grad():
            for parameter in trained(model):
                parameter.add_(0.2 * torch.randn_like(parameter))
        model.save_pretrained(where / "adapters")


def _load(model, where, kind):
    """Base, then adapters; what is not named stays."""
    before = wholes(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_pretrained(model, where / "base")
    said = [str(w.message) for w in caught if "load_adapters" in str(w.message)]
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    assert len(said) == (kind in WARNS and rank == 0), (kind, said)
    between = wholes(model)
    named = model.named_parameters(remove_duplicate=False)
    names = {n for n, p in named if p.requires_grad and ".base_layer." not in n}
    for name, value in between.items():
        assert torch.equal(value, before[name]) == (name in names), (kind, name)
    load_adapters(model, where / "adapters")


def _reads(rank, world_size, case, folder):
    kind, shard = case
    where = Path(folder) / kind
    model = shard(adapted(kind))
    loss_of(model, token_batch(0, 0, rank)).backward()  # units have been gathered and freed
    _load(model, where, kind)
    expected = peft.PeftModel.from_pretrained(_base(kind), where / "adapters")
    torch.testing.assert_close(wholes(model), dict(expected.state_dict()), atol=0, rtol=0)
    assert torch.equal(logits_of(model), logits_of(expected)), kind
    model.train()
    loss_of(model, token_batch(0, 0, rank)).backward()


def test_base_and_adapters_are_those_that_peft_reads(tmp_path):
    ways = [_core_zero3, _zero2, _fsdp2]
    for kind in KINDS:
        _saved(tmp_path, kind)
    kinds = [kind for kind in KINDS if kind != "gpt2"]
    cases = [(kind, ways[i % 3]) for i, kind in enumerate(kinds)]
    cases += [("gpt2", _core_zero3), ("bf16", _core_zero3), ("dora", _fsdp2), ("ia3", _zero2)]
    each_on_ranks(_reads, 2, cases, str(tmp_path), timeout_s=300)
    each_on_ranks(_reads, 3, [("tied", _core_zero3)], str(tmp_path), timeout_s=100)
    _reads(0, 1, ("dora", _plain), str(tmp_path))


class _Loads(Adapted):
    """Starts from folders, as its own configuration says nothing of values."""

    folder = None

    def on_train_start(self):
        load_pretrained(self, self.folder / "base")
        load_adapters(self, self.folder / "adapters")


def _fit(rank, world_size, case, folder):
    strategy, kind = case
    model = _Loads(kind)
    model.folder = Path(folder) / kind
    trainer = make_trainer(strategy, model.folder, max_steps=1, gradient_clip_val=0.5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "load_pretrained: .* stay what peft made")
        trainer.fit(model, adapted_loader())
    plain = Adapted(kind)
    plain.model = peft.PeftModel.from_pretrained(
        _base(kind), model.folder / "adapters", is_trainable=True
    )
    make_trainer("ddp", folder, max_steps=1, gradient_clip_val=0.5).fit(plain, adapted_loader())
    tolerance = 2e-2 if kind.startswith("bf16") else 1e-5
    torch.testing.assert_close(
        wholes(model.model), wholes(plain.model), atol=tolerance, rtol=tolerance
    )


def test_under_every_strategy_a_run_starts_from_both_folders(tmp_path):
    kinds = ["tied", "bf16", "dora", "ia3"]
    for kind in kinds:
        _saved(tmp_path, kind)
    cases = [(SHARDED[i], kinds[i % 4]) for i in range(len(SHARDED))]
    cases += [("fsdp1_zero3", "bf16 tied"), ("fsdp2_zero3", "bf16")]
    _saved(tmp_path, "bf16 tied")
    each_on_trainer_ranks(_fit, 2, cases, str(tmp_path), timeout_s=250)


# What is changed in a folder, and what the error says.
WRONG = {
    "r": r"expected the adapters of the model, got others: r: 4 in the files, 3 here\. Build",
    "lora_alpha": r"lora_alpha: 9 in the files, 8 here",
    "use_rslora": r"use_rslora: True in the files, False here",
    "init_lora_weights": r"init_lora_weights: 'pissa' in the files, True here",
    "kind": r"peft_type: IA3 in the files, LORA here",
    "targets": r"missing in the files: .*down_proj\.lora_.*; without a place in the module: .*"
    r"up_proj.*other targets, target_modules: \['q_proj', 'up_proj', 'v_proj'\] in the files",
    "missing": r"missing in the files: \S+q_proj\.lora_A\.default\.weight \(the adapters belong",
    "unexpected": r"without a place in the module: extra \(the adapters belong",
    "shape": r"q_proj\.lora_A\.default\.weight: \(3, 25\) in the files, \(3, 24\) here.*another",
    "dtype": r"torch\.bfloat16 in the files, torch\.float32 here.*cast=True converts",
    "config": r"expected a folder with adapter_model\.safetensors and adapter_config\.json, got no",
    "file": r"expected adapter_model\.safetensors or .*adapter_model\.bin.*saved again by peft",
    "damaged": r"expected a whole safetensors file, got a damaged one",
    "rank 1": r"rank 1 of 2.*expected a folder with adapter_model\.safetensors, got nothing there",
}


def _change(where, change):
    """Write a folder of peft that differs in one thing."""
    config = {"r": 4, "lora_alpha": 9, "use_rslora": True}
    options = {change: config[change]} if change in config else {}
    if change == "targets":
        options["target_modules"] = ["q_proj", "v_proj", "up_proj"]
    made = KINDS["ia3"][1]() if change == "kind" else lora()
    for name, value in options.items():
        setattr(made, name, set(value) if isinstance(value, list) else value)
    peft.get_peft_model(_base("qwen2"), made).save_pretrained(where)
    file, settings = where / "adapter_model.safetensors", where / "adapter_config.json"
    state = load_file(file)
    key = next(key for key in state if "layers.0.self_attn.q_proj.lora_A" in key or "ia3" in key)
    if change == "missing":
        del state[key]
    elif change == "unexpected":
        state["extra"] = torch.ones(2)
    elif change == "shape":
        state[key] = torch.ones(3, 25)
    elif change == "dtype":
        state = {name: value.bfloat16() for name, value in state.items()}
    save_file(state, file)
    if change == "init_lora_weights":
        written = json.loads(settings.read_text())
        settings.write_text(json.dumps({**written, change: "pissa"}))
    elif change == "config":
        settings.unlink()
    elif change == "file":
        file.rename(where / "adapter_model.bin")
    elif change == "damaged":
        file.write_bytes(file.read_bytes()[:-100])


def _refused(rank, world_size, case, folder):
    where = Path(folder) / case
    model = _core_zero3(adapted("qwen2"))
    before = wholes(model)
    here = where / "elsewhere" if case == "rank 1" and rank == 1 else where
    error = FileNotFoundError if case in ("config", "file", "rank 1") else ValueError
    with pytest.raises(error, match=WRONG[case]):
        load_adapters(model, here)
    torch.testing.assert_close(wholes(model), before, atol=0, rtol=0)
    if case == "dtype":
        load_adapters(model, where, cast=True)
        stored = load_file(where / "adapter_model.safetensors")
        found = wholes(model)
        for key, value in stored.items():
            assert torch.equal(found[key.replace(".weight", ".default.weight")], value.float())


def test_adapters_that_do_not_fit_are_refused_on_every_rank(tmp_path):
    for change in WRONG:
        _change(tmp_path / change, change)
    each_on_ranks(_refused, 2, list(WRONG), str(tmp_path), timeout_s=200)


def test_of_several_adapters_one_is_read_and_embeddings_may_be_beside_it(tmp_path):
    _saved(tmp_path, "qwen2")
    model = adapted("qwen2")
    model.add_adapter("second", lora("q_proj", "v_proj", "down_proj", lora_dropout=0.5))
    before = wholes(model)
    load_adapters(model, tmp_path / "qwen2" / "adapters", adapter_name="second")
    expected = load_file(tmp_path / "qwen2" / "adapters" / "adapter_model.safetensors")
    for name, value in wholes(model).items():
        if ".second." in name:
            assert torch.equal(value, expected[name.replace(".second.", ".")]), name
        else:
            assert torch.equal(value, before[name]), name
    with_embeddings = peft.get_peft_model(_base("qwen2"), lora())
    with_embeddings.save_pretrained(tmp_path / "more", save_embedding_layers=True)
    load_adapters(model, tmp_path / "more")
    embeddings = model.get_base_model().get_input_embeddings().weight
    assert torch.equal(embeddings, _base("qwen2").get_input_embeddings().weight)


def test_what_cannot_be_read_into_is_refused(tmp_path):
    _saved(tmp_path, "qwen2")
    model = adapted("qwen2")
    with pytest.raises(ValueError, match=r"load_adapters: .*one of \['default'\], got 'other'"):
        load_adapters(model, tmp_path, adapter_name="other")
    model.merge_adapter()
    for load, name in ((load_adapters, "adapters"), (load_pretrained, "base")):
        with pytest.raises(ValueError, match=r"q_proj': expected adapters beside .* got merged"):
            load(model, tmp_path / "qwen2" / name)
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(qwen2(), prompts)
    with pytest.raises(NotImplementedError, match=r"load_adapters: .* embeddings of prompts of"):
        load_adapters(model, tmp_path / "qwen2" / "adapters")
    load_pretrained(model, tmp_path / "qwen2" / "base")
    found = model.get_base_model().state_dict()
    torch.testing.assert_close(dict(found), dict(_base("qwen2").state_dict()), atol=0, rtol=0)
    with torch.device("meta"):
        model = peft.get_peft_model(qwen2(), lora())
    for load, name in ((load_adapters, "adapters"), (load_pretrained, "base")):
        with pytest.raises(ValueError, match=r"on the meta device .*load after sharding"):
            load(model, tmp_path / "qwen2" / name)


@pytest.mark.parametrize("initial", ["pissa", "olora", "loftq"])
def test_a_base_that_peft_subtracted_adapters_from_is_not_loaded(tmp_path, initial):
    qwen2().save_pretrained(tmp_path)
    config = lora()
    if initial != "loftq":
        config.init_lora_weights = initial
    model = peft.get_peft_model(qwen2(), config)
    model.peft_config["default"].init_lora_weights = initial  # LoftQ itself needs scipy
    before = wholes(model)
    message = rf"'default' \(init_lora_weights='{initial}'\).*Load the base before get_peft_model"
    with pytest.raises(NotImplementedError, match=message):
        load_pretrained(model, tmp_path)
    torch.testing.assert_close(wholes(model), before, atol=0, rtol=0)


def _from_meta(rank, world_size, shard, folder):
    where = Path(folder) / "tied"
    with torch.device("meta"):
        model = peft.get_peft_model(qwen2(tied=True), lora())
    model = shard(model)
    load_pretrained(model, where / "base")
    load_adapters(model, where / "adapters")
    expected = peft.PeftModel.from_pretrained(_base("tied"), where / "adapters")
    torch.testing.assert_close(wholes(model), dict(expected.state_dict()), atol=0, rtol=0)
    assert torch.equal(logits_of(model), logits_of(expected))


def test_a_base_on_the_meta_device_gets_its_values_after_sharding(tmp_path):
    _saved(tmp_path, "tied")
    each_on_ranks(_from_meta, 2, [_core_zero3, _zero2], str(tmp_path))


def _refused_on_meta(rank, world_size, case):
    kind, name = case
    make, config = KINDS[kind]
    with torch.device("meta"):
        model = peft.get_peft_model(make(), config())
    message = rf"parameter '\S+\.{name}\.default\S*': .* on the meta device.* build it on a real"
    with pytest.raises(ValueError, match=message):
        _core_zero3(model)


def test_adapters_that_start_from_values_of_a_meta_base_are_refused():
    cases = [("dora", "lora_magnitude_vector"), ("ia3", "ia3_l")]
    each_on_ranks(_refused_on_meta, 2, [*cases, ("tokens", "trainable_tokens_delta")])


def _fresh(rank, world_size, shard):
    for kind in ("linear", "embedding"):
        targets = {"linear": ("q_proj", "down_proj"), "embedding": ("embed_tokens",)}[kind]
        with torch.device("meta"):
            model = peft.get_peft_model(qwen2(), lora(*targets))
        model = shard(model)
        values = wholes(model)
        factors = {name: value for name, value in values.items() if "lora_" in name}
        zero = {name for name, value in factors.items() if not value.any()}
        made = peft.get_peft_model(qwen2(), lora(*targets)).state_dict()
        assert zero == {n for n in factors if not made[n].any()}
        for name in factors.keys() - zero:  # as widely spread as where peft makes them
            five_errors = 5 / math.sqrt(factors[name].numel())
            assert factors[name].std() / made[name].std() == pytest.approx(1, abs=five_errors)
        adapted = logits_of(model)
        with model.disable_adapter():
            assert torch.equal(logits_of(model), adapted)


def test_fresh_adapters_over_a_meta_base_change_nothing_at_first():
    each_on_ranks(_fresh, 2, [_core_zero3, _zero2])
