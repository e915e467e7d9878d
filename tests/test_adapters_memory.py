"""Of a frozen base a rank holds its share in bf16, and nothing else; ``plan`` knows it."""

from pathlib import Path

import peft
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_fsdp import ZERO3, MemoryProbe, shard_model
from lightning_fsdp.plan import __main__ as plan_command
from lightning_fsdp.plan import dry_run as planning
from lightning_fsdp.plan.models import build, config_of
from tests.support.adapters import lora, trained
from tests.support.cases import each_on_ranks
from tests.support.memory import StorageTracker, optimizer_tensors
from tests.support.planned import BATCH, SEQ_LEN, folder_with, planned
from tests.support.trainer import make_trainer, on_trainer_ranks, with_options
from tests.test_plan_measured import _CausalLM, _Tracks


def _adapted(config):
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # not converted: plan's tensors cannot be swapped
    try:
        base = build(config)
    finally:
        torch.set_default_dtype(dtype)
    return peft.get_peft_model(base, lora())


def _held(rank, world_size, case, folder):
    """Bytes alive between two steps."""
    torch.manual_seed(0)
    model = _adapted(config_of(folder))
    base = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    adapters = sum(p.numel() for p in trained(model))
    buffers = sum(b.nbytes for b in model.buffers())
    model = shard_model(model, ZERO3)
    optimizer = torch.optim.AdamW(trained(model))
    ids = torch.zeros(BATCH, SEQ_LEN, dtype=torch.long)
    tracker = StorageTracker(model)
    with tracker:
        for _ in range(2):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            del loss
            optimizer.step()
    tracker.track(optimizer_tensors(optimizer))
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert all(p.grad is None and p not in optimizer.state for p in frozen)
    assert all(p.dtype == torch.bfloat16 for p in frozen)
    return tracker.settled_bytes([ids]) - buffers, base, adapters


def test_a_rank_holds_its_share_of_the_base_in_two_bytes_and_nothing_of_it_beside(tmp_path):
    folder = str(folder_with("qwen", tmp_path))
    for world_size in (1, 2):
        for held, base, adapters in each_on_ranks(_held, world_size, [ZERO3], folder)[ZERO3]:
            # Of the adapters: values, gradients and two moments, in four bytes.
            expected = (2 * base + 16 * adapters) / world_size
            assert expected <= held <= 1.02 * expected, world_size


class _Lora(_CausalLM):
    def build(self):
        return _adapted(self.config)


def _measured(rank, world_size, model, folder, units):
    module = _Lora(model, "adamw")
    probe, tracks = MemoryProbe(steps=[1]), _Tracks()
    options = {"callbacks": [tracks, probe], "gradient_clip_val": 1.0, "max_steps": 2}
    strategy = with_options("scratch_fsdp_zero3", units=units)
    trainer = make_trainer(strategy, Path(folder), **options)
    tokens = torch.zeros(SEQ_LEN, dtype=torch.long)
    rows = [{"input_ids": tokens, "labels": tokens}] * (2 * world_size * BATCH)
    trainer.fit(module, DataLoader(rows, batch_size=BATCH))
    return probe.reports[0].ranks[0], tracks.peak


def test_a_plan_names_what_is_no_folder_of_adapters(tmp_path, capsys):
    folder = folder_with("qwen", tmp_path)
    with pytest.raises(SystemExit):
        plan_command.main(
            ["--model", str(folder), "--ranks", "2", "--adapters", str(tmp_path), "--seq-len", "32"]
        )
    assert "adapters: expected a folder with an adapter_config.json" in capsys.readouterr().err


@pytest.mark.parametrize("saved", [None, ["norm"]])
def test_an_optimizer_of_matrices_is_planned_over_those_that_train(tmp_path, saved):
    folder, adapters = folder_with("qwen", tmp_path), str(tmp_path / "adapters")
    lora(modules_to_save=saved).save_pretrained(adapters)
    state = {
        optimizer: planned(
            folder, world_size=2, zero_stage=3, adapters=adapters, optimizer=optimizer
        )
        .phases["step"]
        .resting["optimizer"]
        for optimizer in ("adamw", "muon")
    }
    assert 0 < state["muon"] < state["adamw"]  # one moment in place of two


@pytest.mark.parametrize("units", [None, ("Qwen2ForCausalLM",)])
def test_two_ranks_with_adapters_take_what_was_planned(tmp_path, units):
    folder, adapters = folder_with("qwen", tmp_path), str(tmp_path / "adapters")
    lora().save_pretrained(adapters)
    options = {"backend": "gloo", "adapters": adapters, "units": units}
    plan = planned(folder, world_size=2, zero_stage=3, **options)
    measured, tracked = on_trainer_ranks(_measured, 2, str(folder), str(tmp_path), units)[0]
    for phase in planning.PHASES:
        for owner in ("parameters", "optimizer"):
            expected = measured[phase].resting[owner]
            assert plan.phases[phase].resting[owner] == pytest.approx(expected, rel=0.03), phase
    assert plan.peak_bytes == pytest.approx(tracked, rel=0.03)
    gradients = measured["step"].resting["gradients"]
    assert plan.phases["step"].resting["gradients"] == pytest.approx(gradients, rel=0.03)
