"""Folders and models that do not fit are refused on every rank, and nothing is changed."""

import json
import re
import shutil
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed import fsdp
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, GPT2Model

from lightning_fsdp import load_pretrained, save_pretrained
from lightning_fsdp.checkpoint import safetensors_folder
from recipes.gpt2 import GPT2
from tests.support.cases import each_on_ranks
from tests.support.pretrained import _core_zero3, _gpt2, _plain, logits_of, token_loader, wholes
from tests.support.ranks import run_on_ranks
from tests.support.trainer import make_trainer, on_trainer_ranks, seeded


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


def _load_wrong(rank, world_size, case):
    change, folder = case
    model = _core_zero3(seeded(_gpt2))
    if change == "rank 1 has no file" and rank == 1:
        folder = f"{folder}/elsewhere"
    before, said = wholes(model), None
    try:
        load_pretrained(model, folder)
    except Exception as error:  # noqa: BLE001 (whatever it is, its message is compared)
        said = str(error)
    torch.testing.assert_close(wholes(model), before, atol=0, rtol=0)
    return said


WRONG_FOLDERS = {
    "missing": r"missing in the files: transformer\.ln_f\.bias \(strict=False leaves out",
    "unexpected": r"without a place in the module: extra",
    "shape": r"another shape: transformer\.ln_f\.bias: \(21,\) in the files, \(20,\) here",
    "dtype": r"ln_f\.bias: torch\.bfloat16 in the files, torch\.float32 here.*cast=True",
    "tie": r"one weight here, two with other values there: lm_head\.weight and transformer\.wte",
    "truncated": r"model\.safetensors: expected a whole safetensors file, got a damaged one",
    "no folder": r"expected a folder with model\.safetensors, got nothing there",
    "a file": r"expected a folder with model\.safetensors, got a file there",
    "old": r"expected model\.safetensors or .*pytorch_model\.bin has to be saved again",
    "index": r"model\.safetensors\.index\.json: expected an index with a weight_map",
    "no shard": r"the index names \['model-00001-of-00002\.safetensors'\], which are not",
    "rank 1 has no file": r"rank 1 of 2.*expected a folder with model\.safetensors",
}


def _changed(folder, change):
    """What is loaded in the place of the folder, which is changed."""
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
        folder = folder / "none"
    elif change == "a file":
        folder = file
    elif change == "old":
        file.rename(folder / "pytorch_model.bin")
    elif change in ("index", "no shard"):
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
        file.unlink()  # which is read, where there is one, before an index
        (folder / safetensors_folder.INDEX).write_text(
            json.dumps(index if change == "no shard" else {})
        )
    return folder


def test_a_folder_that_does_not_fit_is_refused_on_every_rank_and_nothing_is_changed(tmp_path):
    seeded(_gpt2, seed=1).save_pretrained(tmp_path / "whole")
    cases = []
    for change in WRONG_FOLDERS:
        folder = shutil.copytree(tmp_path / "whole", tmp_path / change)
        cases.append((change, str(_changed(folder, change))))
    for (change, _), by_rank in each_on_ranks(_load_wrong, 2, cases).items():
        for said in by_rank:
            assert said is not None, change
            assert re.search(WRONG_FOLDERS[change], said, re.DOTALL), (change, said)


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


def _refuse_adapters(rank, world_size, shard, folder):
    for adapt in (_lora, _lora_inside, _lora_of_transformers, _prompt):
        model = shard(_Around(adapt(seeded(_gpt2))))
        for move in (save_pretrained, load_pretrained):
            if move is save_pretrained or adapt in (_lora_inside, _lora_of_transformers):
                match = r"GPT2LMHeadModel: .* got adapters of.*load_pretrained takes a PeftModel"
                with pytest.raises(NotImplementedError, match=match):
                    move(model, folder)
            if adapt is not _prompt:  # which is around the model, not inside
                inner = next(m for m in model.modules() if isinstance(m, GPT2LMHeadModel))
                with pytest.raises(NotImplementedError, match=r"got adapters of peft"):
                    move(inner, folder)


def test_adapters_without_their_model_of_peft_are_refused(tmp_path):
    each_on_ranks(_refuse_adapters, 2, [_plain, _core_zero3, fsdp.fully_shard], str(tmp_path))


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
    for strategy in ("scratch_fsdp_zero3", "fsdp1_zero3", "fsdp2_zero3"):
        model = seeded(lambda: _TrainsAdapters(size="nano", vocab_size=61, max_seq_len=16))
        model.folder = Path(folder) / strategy
        make_trainer(strategy, Path(folder), max_steps=1).fit(model, token_loader())
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
    assert torch.equal(logits_of(loaded), logits_of(merged))
    assert not torch.equal(logits_of(loaded), logits_of(seeded(_gpt2)))


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


def test_a_link_leads_to_what_is_saved_and_a_mount_is_refused_at_once(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    save_pretrained(seeded(_gpt2), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "model.safetensors").exists()
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "volume")
    with pytest.raises(FileExistsError, match="where something is mounted"):
        save_pretrained(seeded(_gpt2), tmp_path / "volume")
    assert {path.name for path in tmp_path.iterdir()} == {"there", "link", "volume"}


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


def test_ties_that_the_config_does_not_know_are_refused(tmp_path):
    model = seeded(_gpt2)
    model.transformer.h[1].mlp.c_fc.weight = model.transformer.h[0].mlp.c_fc.weight
    with pytest.raises(ValueError, match=r"one weight for '\S+h\.0\S+c_fc\.weight' and '\S+h\.1"):
        save_pretrained(model, tmp_path / "model")
    model = GPT2LMHeadModel(
        type(model.config)(**_gpt2().config.to_dict() | {"tie_word_embeddings": False})
    )
    model.config.tie_word_embeddings = True  # after construction
    model.tie_weights()
    save_pretrained(model, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(logits_of(loaded), logits_of(model))


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


def _save_wrong(rank, world_size, kind, folder):
    folder, said = Path(folder) / kind / "model", None
    model = _core_zero3(seeded(_gpt2))
    write = safetensors_folder.SafetensorsWriter.write

    def fail(self, name, tensor):
        if "h.1" in name:
            if kind == "no memory":
                raise MemoryError
            raise OSError(28, "No space left on device", name)
        write(self, name, tensor)

    if kind in ("full disk", "no memory"):
        safetensors_folder.SafetensorsWriter.write = fail
    try:
        save_pretrained(model, folder, max_shard_size="3 parsecs" if kind == "size" else "5GB")
    except Exception as error:  # noqa: BLE001 (whatever it is, its message is compared)
        said = str(error)
    finally:
        safetensors_folder.SafetensorsWriter.write = write
    dist.barrier()
    assert not list(folder.parent.glob(".*partial"))
    return said


NOT_WRITTEN = {
    "occupied": r"expected a directory that does not exist yet, got one with something in it",
    "file": r"expected a directory that does not exist yet",
    "full disk": r"rank 0 of 2.*No space left on device",
    "no memory": r"rank 0 of 2.*MemoryError",
    "size": r"max_shard_size: expected bytes or a size such as '5GB', got '3 parsecs'",
}


def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(tmp_path):
    for kind in NOT_WRITTEN:
        (tmp_path / kind).mkdir()
    (tmp_path / "occupied" / "model").mkdir()
    for kind in ("occupied/model/mine", "file/model"):
        (tmp_path / kind).write_text("kept")
    for kind, by_rank in each_on_ranks(_save_wrong, 2, NOT_WRITTEN, str(tmp_path)).items():
        for said in by_rank:
            assert said is not None, kind
            assert re.search(NOT_WRITTEN[kind], said, re.DOTALL), (kind, said)
        assert (tmp_path / kind / "model").exists() == (kind in ("occupied", "file"))
    assert [path.name for path in (tmp_path / "occupied" / "model").iterdir()] == ["mine"]
