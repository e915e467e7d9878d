"""Every block of Python on a page runs, and does what the page says.

A test names its block by the page and a part of it (``runs``); a block that no test names fails.
Those of docs/fsdp1-vs-fsdp2.md are run by ``test_guide.py``, which finds out as well that it runs
all of them.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import warnings

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import lightning_fsdp
from lightning_fsdp import ShardedTensor, full_state_dict, shard_model
from lightning_fsdp.plan import __main__ as plan
from recipes.gpt2 import GPT2
from tests.support.models import causal_lm, lm_loss, token_batch
from tests.support.pages import PAGES, ROOT, blocks, python_blocks
from tests.support.ranks import run_on_ranks
from tests.support.trainer import (
    Regressor,
    fit,
    make_data,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
    weights_of,
)
from tests.test_strategy_nonfinite import Broken

_named: list[str] = []  # the blocks that tests of this file run


def runs(page: str, part: str, name: str = "code") -> pytest.MarkDecorator:
    """Give a test the block of a page that has this part, as the argument ``name``."""
    (code,) = [code for code in python_blocks(page) if part in code]
    _named.append(code)
    return pytest.mark.parametrize(name, [pytest.param(code, id=page)])


def test_every_block_of_python_is_run():
    pages = PAGES.keys() - {"docs/fsdp1-vs-fsdp2.md", "docs/a-step.md"}  # which have their own
    assert {language for page in pages for language, _ in blocks(page)} == {"", "python"}
    assert sorted(_named) == sorted(code for page in pages for code in python_blocks(page))


def _run_example(rank, world_size, code, folder):
    os.chdir(folder)
    names = {"__name__": "__main__"}
    exec(code.replace("max_steps=100", "max_steps=3"), names)
    return names["trainer"].global_step


@runs("README.md", "trainer.fit(GPT2(")
def test_the_example_trains(tmp_path, code):
    """Here on ranks that are there already; ``test_package.py`` starts it as a script."""
    assert "recipes" not in code  # which are not installed with the package
    assert on_trainer_ranks(_run_example, 2, code, tmp_path) == [3, 3]


@runs("docs/recipes.md", "trainer.fit(GPT2(")
def test_the_script_with_a_recipe_trains(tmp_path, code):
    (tmp_path / "train.py").write_text(code.replace("max_steps=100", "max_steps=3"))
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


@runs("docs/access.md", "on_local")
def test_the_gradient_snippet_prints_what_it_says(code):
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


@runs("docs/optimizers.md", "optimizers_follow")
def test_the_optimizer_snippet_works(code):
    run_on_ranks(_run_optimizer_snippet, 2, code)


def _run_muon_snippet(rank, world_size, code):
    for is_before in (False, True):
        model = causal_lm()
        names = {"model": model, "torch": torch}
        if is_before:
            exec(code, names)
        shard_model(model)
        if not is_before:
            exec(code, names)
        before = full_state_dict(model)
        lm_loss(model, token_batch(0, 0, rank)).backward()
        names["muon"].step()
        names["adamw"].step()
        after = full_state_dict(model)
        assert not any(torch.equal(before[name], after[name]) for name in before)


@runs("docs/optimizers.md", "torch.optim.Muon(matrices)")
def test_the_muon_snippet_trains_everything(code):
    run_on_ranks(_run_muon_snippet, 2, code)


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


@runs("docs/access.md", "MemoryProbe")
def test_the_watching_snippet_fills_tensorboard(tmp_path, code):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

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


def test_the_plan_prints_what_the_page_shows(capsys):
    page = PAGES["docs/planning.md"]
    (found,) = re.findall(
        r"```\n\$ python -m lightning_fsdp\.plan (.*?)\n(.*?)```", page, re.DOTALL
    )
    arguments, shown = found
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


@runs("docs/checkpoints.md", "load_pretrained")
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


def _run_import_snippet(rank, world_size, code):
    names = {"model": causal_lm(), "torch": torch}
    exec(code, names)
    model, optimizer = names["model"], names["optimizer"]
    before = full_state_dict(model)
    lm_loss(model, token_batch(0, 0, rank)).backward()
    optimizer.step()
    assert all(isinstance(parameter, ShardedTensor) for parameter in model.parameters())
    return [name for name, value in full_state_dict(model).items() if value.equal(before[name])]


@runs("docs/training.md", "fully_shard  # was")
def test_the_snippet_with_one_changed_import_trains_every_weight(code):
    assert run_on_ranks(_run_import_snippet, 2, code) == [[], []]


def _run_meta_snippet(rank, world_size, code):
    config = GPT2Config(vocab_size=61, n_positions=16, n_embd=20, n_layer=2, n_head=2)
    names = {"torch": torch, "shard_model": shard_model, "config": config}
    names["GPT2LMHeadModel"] = GPT2LMHeadModel
    torch.manual_seed(0)
    exec(code, names)
    held = sum(parameter.to_local().numel() for parameter in names["model"].parameters())
    return held, full_state_dict(names["model"])["transformer.wte.weight"]


@runs("docs/training.md", 'torch.device("meta")')
def test_the_meta_snippet_gives_the_same_values_on_any_number_of_ranks(code):
    ((all_of_it, expected),) = run_on_ranks(_run_meta_snippet, 1, code)
    assert expected.std() > 0
    for held, weight in run_on_ranks(_run_meta_snippet, 2, code):
        assert held <= 0.6 * all_of_it
        torch.testing.assert_close(weight, expected, atol=0, rtol=0)


def _run_fp16_snippet(rank, world_size, code):
    model = causal_lm()
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    names |= {"torch": torch, "loss_of": lm_loss, "batch": token_batch(0, 0, rank)}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    exec(code.replace('"cuda"', '"cpu", init_scale=256.0'), names)
    after = full_state_dict(model)
    return [name for name, value in after.items() if value.equal(before[name])]


@runs("docs/training.md", "GradScaler")
def test_the_fp16_snippet_trains(code):
    unchanged, _ = run_on_ranks(_run_fp16_snippet, 2, code)
    assert unchanged == []


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


def _run_chat_snippet(rank, world_size, code, folder):
    config = GPT2Config(vocab_size=61, n_positions=16, n_embd=20, n_layer=2, n_head=2)
    names = {"L": L, "torch": torch, "F": F, "config": config}
    names["GPT2LMHeadModel"] = GPT2LMHeadModel
    exec(code, names)
    tokens = torch.arange(8 * 16).view(8, 16) % 61
    rows = []
    # Some micro-batch has no token, whoever gets which.
    for length, row in zip((16, 0, 9, 0, 0, 0, 0, 14), tokens, strict=True):
        labels = row.roll(-1).where(torch.arange(16) < length, -100)
        rows.append({"input_ids": row, "labels": labels})
    model = seeded(names["Chat"]).eval()  # no dropout, here and there
    logits = model.model(tokens).logits.flatten(0, 1)
    expected = F.cross_entropy(logits, torch.stack([row["labels"] for row in rows]).flatten())
    trainer = make_trainer("scratch_fsdp", folder, accumulate_grad_batches=2, logger=False)
    trainer.fit(model, DataLoader(rows, batch_size=2))
    assert trainer.global_step == 1
    for name in ("loss", "epoch_loss"):
        torch.testing.assert_close(trainer.callback_metrics[name], expected.detach())


@runs("docs/numbers.md", "class Chat")
def test_the_chat_snippet_logs_the_mean_over_all_tokens(tmp_path, code):
    on_trainer_ranks(_run_chat_snippet, 2, code, tmp_path)


def _run_divide_snippet(rank, world_size, code):
    plain, model = causal_lm(), shard_model(causal_lm())
    batches = [token_batch(0, 0, each)["tokens"] for each in range(world_size)]
    joined = torch.cat([batch[:, :-1] for batch in batches])
    labels = torch.cat([batch[:, 1:] for batch in batches]).flatten()
    F.cross_entropy(plain(joined).flatten(0, 1), labels).backward()
    mine = batches[rank]
    names = {"model": lambda x: model(x).flatten(0, 1), "F": F, "num_tokens": labels.numel()}
    names |= {"inputs": mine[:, :-1], "labels": mine[:, 1:].flatten()}
    names["model"].modules = model.modules
    exec(code, names)
    for sharded, whole in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)


@runs("docs/numbers.md", "set_gradient_divide_factor")
def test_the_snippet_with_a_number_of_ones_own_divides_by_it(code):
    run_on_ranks(_run_divide_snippet, 2, code)


def _run_nonfinite_snippet(rank, world_size, code, folder):
    names = {"ScratchFSDPStrategy": lightning_fsdp.ScratchFSDPStrategy}
    exec(code, names)
    with pytest.raises(lightning_fsdp.NonfiniteGradient) as caught:
        fit(
            names["strategy"],
            folder,
            seeded(lambda: Broken("backward")),
            make_loader(96),
            accumulate_grad_batches=2,
        )
    return str(caught.value)


@runs("docs/numbers.md", "on_nonfinite")
def test_the_page_shows_what_is_said_of_a_step_that_is_not_finite(tmp_path, code):
    (shown,) = [text for _, text in blocks("docs/numbers.md") if text.startswith("optimizer step")]
    for said in on_trainer_ranks(_run_nonfinite_snippet, 2, code, tmp_path):
        assert said.split() == shown.split()
