"""What the README says is what the project does."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

import lightning_fsdp
from lightning_fsdp import shard_model
from lightning_fsdp.core.sharded_module import ShardedModule
from lightning_fsdp.plan import __main__ as plan
from recipes.gpt2 import GPT2
from tests.support.models import causal_lm, lm_loss, token_batch
from tests.support.ranks import run_on_ranks
from tests.support.trainer import (
    Regressor,
    make_loader,
    on_trainer_ranks,
    seeded,
    weights_of,
)

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_every_file_that_the_readme_names_exists():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    named = re.findall(r"recipes/[a-z0-9_]+\.yaml", README)
    assert links
    assert named
    for path in {*links, *named}:
        assert (ROOT / path).exists(), path


def test_every_make_target_that_the_readme_names_exists():
    targets = set(re.findall(r"\bmake ([a-z-]+)", README))
    makefile = (ROOT / "Makefile").read_text()
    assert {"bench", "test", "train", "tensorboard"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_refused_method_of_fsdp2_is_in_the_readme():
    listed = re.findall(r"`(set_[a-z_]+)`", README)
    for name in listed:
        method = getattr(ShardedModule, name)
        assert method.__doc__.startswith("Refused."), name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_quick_start_script_trains(tmp_path):
    scripts = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (script,) = [code for code in scripts if "trainer.fit(GPT2(" in code]
    assert "trainer.fit" in script
    (tmp_path / "train.py").write_text(script.replace("max_steps=100", "max_steps=3"))
    finished = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert "Starting with 2 processes" in finished.stderr
    assert "`max_steps=3` reached" in finished.stderr


def _run_gradient_snippet(rank, world_size, code):
    names = {
        "model": shard_model(causal_lm()),
        "batches": [token_batch(0, micro_batch, rank) for micro_batch in range(3)],
        "loss_of": lm_loss,
    }
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


def test_the_gradient_snippet_prints_what_it_says():
    scripts = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (code,) = [code for code in scripts if "on_local" in code]
    first, second = run_on_ranks(_run_gradient_snippet, 2, code)
    lines = first.splitlines()
    assert re.fullmatch(r"tensor\([\d.]+\) tensor\([\d.]+, dtype=torch.float64\)", lines[0])
    assert lines[1] == "reduced torch.Size([61, 20])"
    names = [name for name, _ in causal_lm().named_parameters()]
    assert sorted(line.split()[0] for line in lines[2:]) == sorted(names)
    for ours, theirs in zip(lines[2:], second.splitlines()[2:], strict=True):
        assert ours.split()[:2] == theirs.split()[:2]


def _run_optimizer_snippet(rank, world_size, code):
    model = causal_lm()
    names = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    exec(code, names)
    held = names["optimizer"].param_groups[0]["params"]
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    assert all(hasattr(parameter, "full_tensor") for parameter in held)


def test_the_optimizer_snippet_works():
    scripts = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (code,) = [code for code in scripts if "optimizers_follow" in code]
    run_on_ranks(_run_optimizer_snippet, 2, code)


def _run_watch_snippet(rank, world_size, code, folder):
    code = code.replace('"runs"', repr(folder)).replace("devices=2", "devices=2, **options")
    options = {"accelerator": "cpu", "max_steps": 4, "accumulate_grad_batches": 2}
    options |= {"enable_checkpointing": False, "enable_progress_bar": False}
    names = {"options": options | {"log_every_n_steps": 2, "enable_model_summary": False}}
    exec(code, names)
    assert len(names["callbacks"]) == 5
    model = seeded(lambda: GPT2(size="nano", vocab_size=61, max_seq_len=16))
    ids = torch.randint(0, 61, (64, 16))
    loader = DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=2)
    names["trainer"].fit(model, loader)


def test_the_watching_snippet_fills_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scripts = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (code,) = [code for code in scripts if "MemoryProbe" in code]
    on_trainer_ranks(_run_watch_snippet, 2, code, str(tmp_path))
    events = EventAccumulator(str(tmp_path / "watched" / "version_0")).Reload()
    scalars = events.Tags()["scalars"]
    for tag in (
        "probes/gradient_access/before_step/accessible",
        "probes/micro_batch/1/cosine",
        "noise_scale/noise",
        "memory/backward/peak_bytes/rank1",
        "throughput/mfu",
    ):
        assert tag in scalars, tag
    assert [image.step for image in events.Images("memory/timeline")] == [0, 1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_plan_prints_what_the_readme_shows(capsys):
    blocks = re.findall(
        r"```\n\$ python -m lightning_fsdp\.plan (.*?)\n(.*?)```", README, re.DOTALL
    )
    ((arguments, shown),) = blocks
    assert plan.main(shlex.split(arguments)) == 0
    assert capsys.readouterr().out == shown


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


def test_the_run_that_moves_continues_where_it_was(tmp_path):
    scripts = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    start, finish = [code for code in scripts if "torchrun --nproc_per_node" in code]
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


def test_the_snippet_that_saves_in_the_background_leaves_the_last_checkpoint(tmp_path):
    scripts = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (code,) = [code for code in scripts if "async_save=True" in code]
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


def test_the_snippet_without_lightning_saves_and_loads(tmp_path):
    scripts = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (code,) = [code for code in scripts if "save_sharded(" in code]
    assert run_on_ranks(_run_sharded_snippet, 2, code, str(tmp_path / "run")) == [100, 100]


def _run_transformers_snippet(rank, world_size, code, folder, trained):
    from transformers import AutoConfig, AutoModelForCausalLM

    names = {"torch": torch, "shard_model": shard_model, "folder": folder, "tokenizer": None}
    names |= {"AutoConfig": AutoConfig, "AutoModelForCausalLM": AutoModelForCausalLM}
    exec(code.replace('"trained"', repr(trained)), names)


def test_the_transformers_snippet_goes_there_and_back(tmp_path):
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=61, n_positions=16, n_embd=20, n_layer=2, n_head=2)
    config.bos_token_id = config.eos_token_id = 0
    model = seeded(lambda: GPT2LMHeadModel(config))
    model.save_pretrained(tmp_path / "start")
    scripts = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (code,) = [code for code in scripts if "load_pretrained" in code]
    folders = str(tmp_path / "start"), str(tmp_path / "trained")
    run_on_ranks(_run_transformers_snippet, 2, code, *folders)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    torch.testing.assert_close(dict(found.state_dict()), dict(model.state_dict()), atol=0, rtol=0)
