"""Blocks of the pages that train: by optimizer, in fp16, over tokens, and what is watched."""

import contextlib
import io
import itertools
import re

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import lightning_fsdp
from lightning_fsdp import ShardedTensor, full_state_dict, shard_model
from recipes.gpt2 import GPT2
from tests.support.models import causal_lm, lm_loss, token_batch
from tests.support.nonfinite import Broken
from tests.support.pages import blocks
from tests.support.ranks import run_on_ranks
from tests.support.snippets import runs
from tests.support.trainer import (
    Regressor,
    fit,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
)


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


def _scaled_loss(model, batch):
    return 1000 * lm_loss(model, batch)  # so that the snippet clamps some gradients


def _run_readme_gradients(rank, world_size, code):
    """Compare with plain torch, one model for each rank and micro-batch."""
    batches = [[token_batch(0, m, r) for m in range(2)] for r in range(world_size)]
    names = {"model": causal_lm(), "batches": batches[rank], "loss_of": _scaled_loss}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, names)
    expected = [{}, {}]  # by micro-batch: the mean over ranks of clamped gradients
    for micro_batch, name in itertools.product(range(2), dict(causal_lm().named_parameters())):
        expected[micro_batch][name] = 0
    for micro_batch, ranks_batches in itertools.product(range(2), batches):
        model = causal_lm()
        _scaled_loss(model, ranks_batches[micro_batch]).backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        assert any(gradient.abs().max() > 1 for gradient in gradients.values())
        for name, gradient in gradients.items():
            expected[micro_batch][name] += gradient.clamp(-1, 1) / world_size
    first, second = expected
    lines = printed.getvalue().splitlines()
    assert sorted(line.split()[0] for line in lines[1:]) == sorted(first)
    for name, whole in names["g"].full():
        torch.testing.assert_close(whole, first[name] + second[name])
        torch.testing.assert_close(names["g"][name].full(micro_batch=1), second[name])
    dot = sum((first[name].double() * second[name].double()).sum() for name in first)
    norm = torch.cat([(first[name] + second[name]).flatten() for name in first]).norm()
    shown = [float(number) for number in re.findall(r"tensor\(([\d.]+)", lines[0])]
    assert shown == pytest.approx([norm.item(), dot.item()], rel=1e-3)


@runs("README.md", "g.on_local")
def test_the_gradients_of_the_readme_are_those_of_plain_torch(code):
    run_on_ranks(_run_readme_gradients, 2, code)


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


def _run_replicas_snippet(rank, world_size, code, folder):
    names = {}
    exec(
        code.replace(
            "devices=4",
            f"devices=4, default_root_dir={str(folder)!r}, logger=False, "
            "enable_checkpointing=False, enable_progress_bar=False, "
            "enable_model_summary=False, max_steps=1",
        ),
        names,
    )
    names["trainer"].fit(seeded(Regressor), make_loader())
    return names["strategy"].num_replicas


@runs("docs/training.md", "shard_size=2")
def test_the_snippet_of_replicas_makes_two(tmp_path, code):
    assert on_trainer_ranks(_run_replicas_snippet, 4, code, tmp_path) == [2] * 4


def _run_loss_snippet(rank, world_size, code):
    torch.manual_seed(rank)
    names = {}
    exec(code, names)
    model, logits = names["model"], names["head"](names["hidden"].detach())
    expected = F.cross_entropy(logits.flatten(0, 1), names["labels"].flatten())
    torch.testing.assert_close(names["loss"], expected)
    assert all(p.grad is not None for p in model.parameters())


@runs("docs/memory-limit.md", "call_with(head")
def test_the_loss_without_logits_is_that_of_the_logits(code):
    run_on_ranks(_run_loss_snippet, 2, code)
