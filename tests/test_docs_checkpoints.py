"""Blocks of the pages that save, load, move and resume."""

import re
import warnings

import lightning as L
import torch
from peft import LoraConfig, PeftModel, get_peft_model

import lightning_fsdp
from lightning_fsdp import shard_model
from tests.support.models import causal_lm
from tests.support.pretrained import _gpt2
from tests.support.ranks import run_on_ranks
from tests.support.snippets import runs
from tests.support.trainer import (
    Regressor,
    make_data,
    make_loader,
    on_trainer_ranks,
    seeded,
    weights_of,
)


class _SeesTheStart(L.Callback):
    def on_train_start(self, trainer, module):
        weights = trainer.strategy.weights
        self.step, self.weights = trainer.global_step, {n: weights[n].full() for n in weights}


def _run_moving_snippet(rank, world_size, code, folder):
    code = code.replace('"run.ckpt"', repr(folder + "/run.ckpt"))
    code = re.sub(r"max_steps=(\d)00", r"max_steps=\1, **options", code)
    start = _SeesTheStart()
    options = {"enable_checkpointing": False, "enable_progress_bar": False, "callbacks": [start]}
    options |= {"enable_model_summary": False, "logger": False}
    names = {
        "options": options,
        "L": L,
        "lightning_fsdp": lightning_fsdp,
        "model": seeded(Regressor, seed=world_size),
        "data": make_loader(batch_size=8 // world_size),
    }
    exec(code, names)
    return start.step, start.weights, names["trainer"].global_step, weights_of(names["model"])


@runs("docs/checkpoints.md", "start.py", "start")
@runs("docs/checkpoints.md", "finish.py", "finish")
def test_the_run_that_moves_continues_where_it_was(tmp_path, start, finish):
    *_, step, saved = on_trainer_ranks(_run_moving_snippet, 4, start, str(tmp_path))[0]
    assert step == 1
    begun, read, step, _ = on_trainer_ranks(_run_moving_snippet, 2, finish, str(tmp_path))[0]
    assert (begun, step) == (1, 2)
    torch.testing.assert_close(read, saved, atol=0, rtol=0)


def _run_background_snippet(rank, world_size, code, folder):
    code = code.replace("ModelCheckpoint(", f"ModelCheckpoint({folder!r}, ")
    code = code.replace("steps=50", "steps=1").replace("steps=100", "steps=2, **options")
    names = {
        "L": L,
        "lightning_fsdp": lightning_fsdp,
        "model": seeded(Regressor),
        "data": make_loader(),
        "options": {"enable_progress_bar": False, "enable_model_summary": False, "logger": False},
    }
    exec(code, names)
    return names["keep"].best_model_path, weights_of(names["model"])


@runs("docs/checkpoints.md", "async_save=True")
def test_the_snippet_that_saves_in_the_background_leaves_the_last_checkpoint(tmp_path, code):
    path, weights = on_trainer_ranks(_run_background_snippet, 2, code, str(tmp_path))[0]
    assert [str(each) for each in tmp_path.iterdir()] == [path]
    read = seeded(Regressor, seed=9)
    lightning_fsdp.load_sharded(path, read)
    torch.testing.assert_close(weights_of(read), weights, atol=0, rtol=0)


def _run_sharded_snippet(rank, world_size, code, folder):
    model = shard_model(causal_lm(seed=1 + world_size))
    names = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    exec(code.replace('"run.ckpt"', repr(folder)), names)
    return names["step"]


@runs("docs/checkpoints.md", "save_sharded(")
def test_the_snippet_without_lightning_saves_and_loads(tmp_path, code):
    assert run_on_ranks(_run_sharded_snippet, 2, code, str(tmp_path / "run")) == [100, 100]


def _run_transformers_snippet(rank, world_size, code, folder, trained):
    from transformers import AutoConfig, AutoModelForCausalLM

    names = {"torch": torch, "shard_model": shard_model, "folder": folder, "tokenizer": None}
    names |= {"AutoConfig": AutoConfig, "AutoModelForCausalLM": AutoModelForCausalLM}
    exec(code.replace('"trained"', repr(trained)), names)


@runs("docs/checkpoints.md", "AutoConfig.from_pretrained")
def test_the_transformers_snippet_goes_there_and_back(tmp_path, code):
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=61, n_positions=16, n_embd=20, n_layer=2, n_head=2)
    config.bos_token_id = config.eos_token_id = 0
    model = seeded(lambda: GPT2LMHeadModel(config))
    model.save_pretrained(tmp_path / "start")
    folders = str(tmp_path / "start"), str(tmp_path / "trained")
    run_on_ranks(_run_transformers_snippet, 2, code, *folders)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    torch.testing.assert_close(dict(found.state_dict()), dict(model.state_dict()), atol=0, rtol=0)


def _run_adapters_snippet(rank, world_size, code, folder):
    names = {"shard_model": shard_model, "base": seeded(_gpt2), "get_peft_model": get_peft_model}
    names["folder"] = f"{folder}/base"
    for name in ("adapters", "merged"):
        code = code.replace(f'"{name}"', repr(f"{folder}/{name}"))
    exec(code, names | {"LoraConfig": LoraConfig})


@runs("docs/checkpoints.md", "save_adapters(")
def test_the_snippet_with_adapters_saves_both_folders(tmp_path, code):
    seeded(_gpt2, seed=4).save_pretrained(tmp_path / "base")
    run_on_ranks(_run_adapters_snippet, 2, code, str(tmp_path))
    PeftModel.from_pretrained(seeded(_gpt2), tmp_path / "adapters")
    assert (tmp_path / "merged" / "model.safetensors").exists()


def _run_resuming_snippet(rank, world_size, code, folder, num_steps):
    warnings.filterwarnings("ignore", ".*there is no last checkpoint")  # at the first time
    code = code.replace('"checkpoints"', repr(folder)).replace("steps=100", "steps=1")
    code = code.replace("devices=2", "devices=2, **options").replace("[keep]", "[keep, start]")
    start = _SeesTheStart()
    options = {"accelerator": "cpu", "max_steps": num_steps, "logger": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False}
    names = {"options": options, "start": start, "dataset": make_data(64)}
    names["model"] = seeded(Regressor)
    exec(code, names)
    return start.step, names["loader"].num_batches_read


@runs("docs/checkpoints.md", "ResumableLoader")
def test_the_resuming_snippet_begins_and_then_goes_on(tmp_path, code):
    folder = str(tmp_path)
    assert on_trainer_ranks(_run_resuming_snippet, 2, code, folder, 1) == [(0, 1)] * 2
    assert on_trainer_ranks(_run_resuming_snippet, 2, code, folder, 3) == [(1, 3)] * 2
