"""What the README says is what the project does."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_fsdp import shard_model
from lightning_fsdp.core.sharded_module import ShardedModule
from recipes.gpt2 import GPT2
from tests.support.models import causal_lm, lm_loss, token_batch
from tests.support.ranks import run_on_ranks
from tests.support.trainer import on_trainer_ranks, seeded

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
    targets = set(re.findall(r"\bmake ([a-z]+)", README))
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
    (script,) = [code for code in scripts if "max_steps=100" in code]
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
        "gradient_access/before_step/accessible",
        "micro_batch/1/cosine",
        "noise_scale/noise",
        "memory/backward/peak_bytes/rank1",
        "throughput/mfu",
    ):
        assert tag in scalars, tag
    assert [image.step for image in events.Images("memory/timeline")] == [0, 1]
