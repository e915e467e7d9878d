"""The plan against what is measured: two real ranks under the Trainer, and one real rank of many.

Widths are large for the vocabulary, so that what the engine holds weighs more than the logits.
"""

import json
import os
import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import GPT2Config, Qwen2Config

from lightning_fsdp import ZERO2, ZERO3, MemoryProbe, shard_model
from lightning_fsdp.core.optimizers.whole_state import kept_by
from lightning_fsdp.engines.autocast import keep_main_dtype
from lightning_fsdp.plan import __main__ as plan_command
from lightning_fsdp.plan.__main__ import main
from lightning_fsdp.plan.dry_run import PHASES, Run, dry_run, largest_batch
from lightning_fsdp.plan.ledger import FakeLedger
from lightning_fsdp.plan.models import MODELS, block_classes, build, config_of
from lightning_fsdp.strategies.precision import POLICIES
from recipes.causal_lm import CausalLM
from recipes.optimizer import OptimizerConfig
from tests.support.memory import StorageTracker, optimizer_tensors
from tests.support.ranks import run_on_ranks
from tests.support.trainer import make_trainer, on_trainer_ranks, with_options

VOCABULARY, SEQ_LEN, BATCH = 512, 32, 2
STAGES = {2: ZERO2, 3: ZERO3}
TOLERANCE = 0.03


SHAPES = {
    "gpt2": GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=VOCABULARY, eos_token_id=0),
    "qwen": Qwen2Config(
        num_hidden_layers=4, hidden_size=128, intermediate_size=512, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, tie_word_embeddings=True,
    ),
}  # fmt: skip


@pytest.fixture
def folder_of(tmp_path):
    """Writes the config of a small model, without weights."""

    def write(name):
        SHAPES[name].save_pretrained(tmp_path / name)
        return tmp_path / name

    return write


@pytest.fixture
def folder(folder_of):
    return folder_of("gpt2")


def planned(folder, **options):
    run = Run(**{"batch_size": BATCH, "seq_len": SEQ_LEN, "precision": "32-true", **options})
    return dry_run(config_of(str(folder)), run)


# -- two ranks, the Trainer, the recipe --------------------------------------------------------


class _Tracks(pl.Callback):
    """The most bytes alive in the backward, by the tests' own tracker."""

    peak = 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 1 and batch_idx % trainer.accumulate_grad_batches == 0:
            self.tracker = StorageTracker(module, self.see)
            self.tracker.track(list(kept_by(trainer.optimizers[0])))
            self.tracker.__enter__()

    def see(self):
        self.peak = max(self.peak, self.tracker.live_bytes())

    def on_train_end(self, trainer, module):
        self.tracker.__exit__(None, None, None)


class _CausalLM(CausalLM):
    """A recipe of any config; the optimizer is the recipes'."""

    max_seq_len = SEQ_LEN

    def __init__(self, folder, optimizer):
        options = {"pretrained": None, "activation_checkpointing": False, "compile_blocks": False}
        super().__init__(config_of(folder), optimizer=OptimizerConfig(name=optimizer), **options)

    def build(self):
        return build(self.config)

    def blocks(self):
        return []


def _measured(
    rank, world_size, model, folder, stage, precision, grad_accum, checkpointing, optimizer
):
    module = _CausalLM(model, optimizer)
    probe, tracks = MemoryProbe(steps=[1]), _Tracks()
    classes = block_classes(build(module.config)) if checkpointing else None
    strategy = with_options(f"scratch_fsdp_zero{stage}", activation_checkpointing=classes)
    trainer = make_trainer(
        strategy,
        Path(folder),
        callbacks=[tracks, probe],
        precision=precision,
        accumulate_grad_batches=grad_accum,
        gradient_clip_val=1.0,
        max_steps=2,
    )
    tokens = torch.zeros(SEQ_LEN, dtype=torch.long)
    rows = [{"input_ids": tokens, "labels": tokens}] * (2 * world_size * grad_accum * BATCH)
    trainer.fit(module, DataLoader(rows, batch_size=BATCH))
    (report,) = probe.reports
    return report.ranks[0], tracks.peak


@pytest.mark.parametrize(
    ("name", "stage", "precision", "grad_accum", "checkpointing", "optimizer"),
    [
        ("gpt2", 2, "32-true", 1, False, "adamw"),
        ("gpt2", 3, "32-true", 1, False, "adamw"),
        ("gpt2", 3, "bf16-true", 1, True, "adamw"),
        ("qwen", 2, "bf16-mixed", 2, True, "adamw"),
        ("qwen", 3, "bf16-mixed", 2, True, "adamw"),
        ("qwen", 3, "bf16-mixed", 1, False, "adamw"),
        ("gpt2", 2, "bf16-mixed", 2, False, "muon"),
        ("qwen", 3, "32-true", 1, False, "muon"),
    ],
)
def test_two_ranks_take_what_was_planned(
    tmp_path, folder_of, name, stage, precision, grad_accum, checkpointing, optimizer
):
    folder = folder_of(name)
    plan = planned(
        folder, world_size=2, zero_stage=stage, precision=precision, grad_accum=grad_accum,
        activation_checkpointing=checkpointing, optimizer=optimizer, backend="gloo",
    )  # fmt: skip
    options = (str(folder), str(tmp_path), stage, precision, grad_accum, checkpointing, optimizer)
    measured, tracked = on_trainer_ranks(_measured, 2, *options)[0]
    for phase in PHASES:
        found, expected = plan.phases[phase], measured[phase]
        for moment in ("peak", "resting"):
            planned_bytes, bytes_ = getattr(found, moment), getattr(expected, moment)
            assert sum(planned_bytes.values()) == pytest.approx(
                sum(bytes_.values()), rel=TOLERANCE
            ), (phase, moment, planned_bytes, bytes_)
            for owner in ("parameters", "optimizer"):
                assert planned_bytes[owner] == pytest.approx(bytes_[owner], rel=TOLERANCE), phase
    assert plan.peak_bytes == pytest.approx(tracked, rel=TOLERANCE)
    gradients = measured["step"].resting["gradients"]
    assert plan.phases["step"].resting["gradients"] == pytest.approx(gradients, rel=TOLERANCE)


def test_owners_are_those_of_a_run(folder):
    """Of 4 blocks of GPT-2 on 8 ranks: 16 matrices, and as many elements as they have."""
    plan = planned(folder, world_size=8, optimizer="muon")
    width = 128
    assert len(plan.owners) == 8
    assert sum(load.numel for load in plan.owners) == 4 * 12 * width**2
    assert max(load.work for load in plan.owners) <= 1.35 * 4 * 28 * width**3 / 8
    rest = plan.num_parameters - 4 * 12 * width**2
    resting = plan.phases["step"].resting["optimizer"]
    whole = plan.owners[0].numel  # a moment each, and a copy of those that are cut
    assert 4 * whole < resting - 8 * rest / 8 < 8.1 * whole + 8 * 8 * 64
    assert planned(folder, world_size=8).owners is None


# -- one rank of many, on real tensors ---------------------------------------------------------


def _one_of_many(rank, world_size, folder, num_ranks, stage, precision):
    from torch.testing._internal.distributed import fake_pg

    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=fake_pg.FakeStore())
    try:
        model = build(config_of(folder))
        mesh = init_device_mesh("cpu", (num_ranks,))
        shard_model(model, STAGES[stage], mesh=mesh, mp_policy=POLICIES[precision])
        keep_main_dtype(model, POLICIES[precision])
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros(BATCH, SEQ_LEN, dtype=torch.long)
        labels = tokens.clone()
        peak = 0

        def see():
            nonlocal peak
            peak = max(peak, tracker.live_bytes())

        for _ in range(2):
            tracker = StorageTracker(model, see)
            tracker.track([*optimizer_tensors(optimizer), tokens, labels])
            with tracker:
                peak = 0
                with torch.autocast("cpu", torch.bfloat16, precision == "bf16-mixed", False):
                    logits = model(input_ids=tokens, use_cache=False).logits
                    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
                    del logits
                optimizer.zero_grad()
                loss.backward()
                model.clip_grad_norm_(1.0)
                optimizer.step()
        return peak
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("name", "num_ranks", "precision"),
    [("gpt2", 8, "32-true"), ("gpt2", 64, "32-true"), ("qwen", 64, "bf16-mixed")],
)
def test_one_rank_of_many_takes_what_was_planned(folder_of, name, num_ranks, precision, stage):
    folder = folder_of(name)
    (measured,) = run_on_ranks(
        _one_of_many, 1, str(folder), num_ranks, stage, precision, backend=None
    )
    plan = planned(folder, world_size=num_ranks, zero_stage=stage, precision=precision)
    assert plan.peak_bytes == pytest.approx(measured, rel=TOLERANCE)


# -- what is written down ----------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 8, 1024])
def test_what_rests_is_sixteen_bytes_per_parameter_over_the_ranks(folder, world_size):
    plan = planned(folder, world_size=world_size, precision="bf16-mixed")
    share = plan.num_parameters / world_size
    resting = plan.phases["step"].resting
    padding = 4 * 8 * 64  # of all regions: less than 8 elements each, and 32 per parameter
    for owner, num_bytes in (("parameters", 4), ("gradients", 4), ("optimizer", 8)):
        assert resting[owner] == pytest.approx(num_bytes * share, rel=0.01, abs=4 * padding), owner


def test_a_folder_that_names_the_dtype_of_its_weights_takes_what_is_trained(folder):
    expected = planned(folder, world_size=8, precision="bf16-mixed").phases["step"].resting
    config = json.loads((folder / "config.json").read_text())
    for dtype in ("bfloat16", "float32"):
        (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
        plan = planned(folder, world_size=8, precision="bf16-mixed")
        assert plan.phases["step"].resting == expected, dtype
    halves = planned(folder, world_size=8, precision="bf16-true").phases["step"].resting
    assert halves["parameters"] == expected["parameters"] / 2


def test_stage_2_keeps_the_model_whole_and_stage_3_two_units(folder):
    whole, units = (planned(folder, world_size=64, zero_stage=stage) for stage in (2, 3))
    num_bytes = 4 * whole.num_parameters
    block = 4 * (12 * 128**2 + 13 * 128)
    embedding = 4 * VOCABULARY * 128  # tied: it comes for the head, too
    positions = 4 * 1024 * 128
    assert whole.phases["backward"].most["gathered"] == pytest.approx(num_bytes, rel=0.02)
    most = units.phases["backward"].most["gathered"]
    assert most == pytest.approx(2 * block, rel=0.02), (most, block, embedding, positions)


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("gpt2-nano", 7_357_312),
        ("gpt2-xl", 1_557_611_200),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
    ],
)
def test_a_name_has_the_parameters_of_its_paper(name, num_parameters):
    with torch.device("meta"):
        model = build(config_of(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    assert len(block_classes(model)) == 1


@pytest.mark.parametrize("stage", [2, 3])
def test_looking_at_all_storages_finds_no_more(folder_of, monkeypatch, stage):
    options = {"world_size": 64, "zero_stage": stage, "grad_accum": 2, "precision": "bf16-mixed"}
    folder = folder_of("qwen")
    found = planned(folder, **options, activation_checkpointing=True)
    for name in ("tell", "live_bytes", "_note", "_measure"):
        monkeypatch.delattr(FakeLedger, name)  # what it does faster than any ledger
    assert planned(folder, **options, activation_checkpointing=True) == found
    assert found.peak_bytes > 0


# -- the largest batch -------------------------------------------------------------------------


def test_the_largest_batch_fits_and_the_next_does_not(folder):
    config, run = config_of(str(folder)), Run(world_size=8, seq_len=SEQ_LEN)
    device_bytes = 30_000_000
    search, plan = largest_batch(config, run, device_bytes=device_bytes, cap=1000)
    assert search.largest == plan.run.batch_size > 4
    assert plan.peak_bytes <= device_bytes < planned(
        folder, world_size=8, precision=run.precision, batch_size=search.largest + 1
    ).peak_bytes  # fmt: skip
    assert search.limit.startswith(f"{search.largest + 1}: takes ")


def test_a_search_over_activations_takes_four_plans():
    config, run = config_of("gpt2-nano"), Run(world_size=8)
    search, _ = largest_batch(config, run, device_bytes=20 * 10**9, cap=1000)
    sizes = [tried.size for tried in search.tried]
    assert sizes == [1, 2, search.largest, search.largest + 1]
    assert search.largest > 16


def test_the_command_writes_the_table_and_the_file(tmp_path, folder, capsys):
    out = tmp_path / "out" / "plan.json"
    arguments = ["--model", str(folder), "--ranks", "8", "--seq-len", "32", "--out", str(out)]
    assert main([*arguments, "--device-memory", "30MB", "--max-batch-size", "3"]) == 0
    printed = capsys.readouterr().out
    assert "Largest batch on 30.0 MB: 3 per rank" in printed
    assert "the cap is 3" in printed
    document = json.loads(out.read_text())
    assert document["search"]["largest"] == document["plan"]["run"]["batch_size"] == 3
    backward = document["plan"]["phases"]["backward"]["peak"]
    assert f"{backward['activations'] / 1e6:.1f} MB" in printed
    assert main([*arguments, "--device-memory", "1MB"]) == 1
    document = json.loads(out.read_text())
    assert document["plan"] is None
    assert document["search"]["largest"] is None
    assert document["search"]["limit"].startswith("1: takes ")


def test_on_the_host_the_command_adds_what_a_process_has(tmp_path, folder, capsys, monkeypatch):
    monkeypatch.setattr(plan_command, "bytes_at_start", lambda: 400_000_000)
    out = tmp_path / "plan.json"
    arguments = ["--model", str(folder), "--world", "2", "--seq-len", "32", "--json", str(out)]
    assert main([*arguments, "--backend", "gloo"]) == 0
    document = json.loads(out.read_text())
    assert document["process_at_start_bytes"] == 400_000_000
    together = (document["plan"]["peak_bytes"] + 400_000_000) / 1e6
    assert f"a process holds at least {together:.1f} MB" in capsys.readouterr().out
    assert main(arguments) == 0
    assert "CUDA context" in capsys.readouterr().out
    assert json.loads(out.read_text())["process_at_start_bytes"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--model": "gpt9"}, "expected one of gpt2-nano, .* or a folder"),
        ({"--ranks": "0"}, "world_size: expected at least 1, got 0"),
        ({"--stage": "4"}, "zero_stage: expected 2 .* or 3 .*, got 4"),
        ({"--precision": "16-mixed"}, "expected one without a gradient scaler"),
        ({"--precision": "half"}, "precision: expected one of '32-true'"),
        ({"--batch-size": "0"}, "batch_size: expected at least 1, got 0"),
        ({"--seq-len": "4096"}, "expected at most the model's 1024 positions, got 4096"),
        (
            {"--device-memory": "much"},
            "--device-memory: expected an amount of memory, such as 80GB",
        ),
        ({"--device-memory": ""}, "--device-memory: expected an amount of memory, .* got ''"),
        ({"--max-batch-size": "8"}, "--max-batch-size: expected --device-memory with it"),
        ({"--device-memory": "1GB", "--batch-size": "4"}, "not allowed with argument"),
        ({"--device-memory": "1GB", "--max-batch-size": "0"}, "cap: expected at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(changes, message, capsys):
    options = {"--model": next(iter(MODELS)), "--ranks": "2", **changes}
    with pytest.raises(SystemExit) as raised:
        main([word for option in options.items() for word in option])
    assert raised.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "a folder"),
        ("file/plan.json", "'.*/file' is no folder"),
        ("sealed/plan.json", "no leave to write '.*/sealed'"),
        ("sealed/new/plan.json", "no leave to write '.*/sealed'"),
        ("n" * 300, "File name too long"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_before_the_plan(
    name, why, tmp_path, capsys, monkeypatch
):
    (tmp_path / "file").touch()
    (tmp_path / "sealed").mkdir()
    # Not by its mode, which does not hold root back.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "sealed")
    monkeypatch.setattr(plan_command, "dry_run", lambda *_: pytest.fail("the plan was made"))
    with pytest.raises(SystemExit) as raised:
        main(["--model", "gpt2-nano", "--ranks", "2", "--out", str(tmp_path / name)])
    assert raised.value.code == 2
    said = rf"error: --out: expected a file to write, got '{tmp_path}.*' \({why}\)\. Name another"
    assert re.search(said, capsys.readouterr().err)
    assert not list((tmp_path / "sealed").iterdir())


def test_a_file_that_cannot_be_written_after_all_is_named(tmp_path, folder, capsys, monkeypatch):
    path = tmp_path / "plan.json"
    monkeypatch.setattr(plan_command, "format_plan", lambda *_: path.mkdir())
    with pytest.raises(SystemExit):
        main(["--model", str(folder), "--ranks", "2", "--seq-len", "32", "--out", str(path)])
    assert "error: --out: expected a file to write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "message"),
    [({"n_layer": "abc"}, "'n_layer' expected int, got str"), ({"dtype": "what"}, "'what'")],
)
def test_a_config_with_a_field_of_a_wrong_type_is_refused(folder, field, message, capsys):
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | field))
    with pytest.raises(SystemExit) as raised:
        main(["--model", str(folder), "--ranks", "2"])
    assert raised.value.code == 2
    said = f"error: --model: expected one of .*{folder}.*{message}.*Correct its config.json"
    assert re.search(said, capsys.readouterr().err)


def test_a_folder_with_another_kind_of_model_is_refused(tmp_path):
    from transformers import ViTConfig

    ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"expected a config of a causal language model, got .*vit"
    ):
        config_of(str(tmp_path))


def _plans_in_a_group(rank, world_size, folder):
    with pytest.raises(RuntimeError, match="expected a process without a process group"):
        planned(folder, world_size=2)


def test_a_process_in_a_group_is_refused(folder):
    run_on_ranks(_plans_in_a_group, 1, str(folder))
