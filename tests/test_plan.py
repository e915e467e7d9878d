"""What a plan says of stages, dtypes, sizes and batches."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config

from lightning_fsdp.plan.__main__ import main
from lightning_fsdp.plan.dry_run import Run, largest_batch
from lightning_fsdp.plan.ledger import FakeLedger
from lightning_fsdp.plan.models import block_classes, build, config_of
from lightning_fsdp.plan.report import format_plan
from lightning_fsdp.plan.torch_internals import FakeTensors
from tests.support.planned import BATCH, SEQ_LEN, VOCABULARY, folder_with, planned


@pytest.fixture
def folder(tmp_path):
    return folder_with("gpt2", tmp_path, n_layer=2)


@pytest.mark.parametrize("world_size", [1, 8, 1024])
def test_what_rests_is_sixteen_bytes_per_parameter_over_the_ranks(folder, world_size):
    plan = planned(folder, world_size=world_size, precision="bf16-mixed")
    share = plan.num_parameters / world_size
    resting = plan.phases["step"].resting
    padding = 4 * 8 * 64  # of all regions: less than 8 elements each, and 32 per parameter
    for owner, num_bytes in (("parameters", 4), ("gradients", 4), ("optimizer", 8)):
        assert resting[owner] == pytest.approx(num_bytes * share, rel=0.01, abs=4 * padding), owner


def test_replicas_hold_what_a_flat_mesh_of_their_ranks_holds(folder):
    flat = planned(folder, world_size=8)
    with_replicas = planned(folder, world_size=32, shard_size=8)
    assert with_replicas.phases == flat.phases
    assert planned(folder, world_size=8, shard_size=8).phases == flat.phases
    assert "32 ranks (4 replicas of 8)" in format_plan("model", with_replicas)
    twice = replace(flat, run=replace(flat.run, grad_accum=2))
    assert f"per rank {BATCH} x 2 sequences of {SEQ_LEN} tokens" in format_plan("model", twice)
    assert "replicas" not in format_plan("model", flat)
    for size in (0, 3):
        with pytest.raises(ValueError, match=f"a divisor of the 8 ranks, got {size}"):
            Run(world_size=8, shard_size=size)


def test_state_over_all_ranks_rests_beside_the_part_that_a_replica_gathers_from(folder):
    options = {"world_size": 32, "precision": "bf16-mixed"}
    flat = planned(folder, **options).phases["step"].resting
    plan = planned(folder, shard_size=8, state_over="all", **options)
    resting = plan.phases["step"].resting
    part = 2 * plan.num_parameters / 8
    assert resting["parameters"] == pytest.approx(flat["parameters"] + part, rel=0.01, abs=4096)
    assert {**resting, "parameters": 0} == {**flat, "parameters": 0}
    assert "32 ranks (4 replicas of 8, state over all)" in format_plan("model", plan)
    for size in (None, 8):
        with pytest.raises(ValueError, match="state_over='all': expected a shard_size smaller"):
            Run(world_size=8, shard_size=size, state_over="all")
    with pytest.raises(ValueError, match="state_over: expected 'replica' or 'all', got 'hosts'"):
        Run(world_size=8, shard_size=4, state_over="hosts")
    with pytest.raises(ValueError, match=r"precision: expected '32-true' or .*-mixed', got 'fp8'"):
        Run(world_size=8, precision="fp8")


def test_a_folder_that_names_the_dtype_of_its_weights_takes_what_is_trained(folder):
    expected = planned(folder, world_size=8, precision="bf16-mixed").phases["step"].resting
    config = json.loads((folder / "config.json").read_text())
    for dtype in ("bfloat16", "float32"):
        (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
        plan = planned(folder, world_size=8, precision="bf16-mixed")
        assert plan.phases["step"].resting == expected, dtype
    halves = planned(folder, world_size=8, precision="bf16-true").phases["step"].resting
    assert halves["parameters"] == expected["parameters"] / 2


def test_stage_2_keeps_the_model_whole_and_stage_3_two_units(tmp_path):
    folder = folder_with("gpt2", tmp_path, n_layer=3)
    whole, units = (planned(folder, world_size=64, zero_stage=stage) for stage in (2, 3))
    num_bytes = 4 * whole.num_parameters
    block = 4 * (12 * 128**2 + 13 * 128)
    embedding = 4 * VOCABULARY * 128  # tied: it comes for the head, too
    positions = 4 * 1024 * 128
    assert whole.phases["backward"].most["gathered"] == pytest.approx(num_bytes, rel=0.02)
    most = units.phases["backward"].most["gathered"]
    assert most == pytest.approx(2 * block, rel=0.02), (most, block, embedding, positions)


def test_units_of_given_classes_or_sizes_are_gathered(folder, capsys):
    whole = planned(folder, world_size=64, units=("GPT2LMHeadModel",))
    num_bytes = 4 * whole.num_parameters
    assert whole.phases["backward"].most["gathered"] == pytest.approx(num_bytes, rel=0.02)
    mlp = 4 * (8 * 128**2 + 5 * 128)
    in_parts = planned(folder, world_size=64, units=("GPT2Attention", "GPT2MLP"))
    assert in_parts.phases["backward"].most["gathered"] == pytest.approx(1.5 * mlp, rel=0.02)
    words = ["--model", str(folder), "--ranks", "64", "--seq-len", str(SEQ_LEN)]
    for units, expected in (
        (["GPT2Attention", "GPT2MLP"], "GPT2Attention, GPT2MLP"),
        (["100000"], "of 100,000 parameters or more"),
    ):
        assert main([*words, "--units", *units]) == 0
        assert f", units: {expected}\n" in capsys.readouterr().out
    for name in ("Nothing", "ModuleList"):  # which has no forward to be gathered for
        with pytest.raises(SystemExit):
            main([*words, "--units", name])
        (says,) = capsys.readouterr().err.splitlines()
        assert says.startswith("error: --units: expected classes that occur in GPT2LMHeadModel and")
        assert f"got ['{name}']. Choose from ['Conv1D', 'Embedding', 'GPT2Attention'" in says


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
def test_looking_at_all_storages_finds_no_more(tmp_path, monkeypatch, stage):
    """Nor do torch's own fake tensors, which look at all that a result could depend on."""
    options = {"world_size": 64, "zero_stage": stage, "grad_accum": 2, "precision": "bf16-mixed"}
    folder = folder_with("qwen", tmp_path, num_hidden_layers=1, layer_types=None)
    found = planned(folder, **options, activation_checkpointing=True)
    for name in ("tell", "live_bytes", "_note", "settle"):
        monkeypatch.delattr(FakeLedger, name)  # what it does faster than any ledger
    for name in ("__torch_dispatch__", "_prep_args_for_hash"):
        monkeypatch.delattr(FakeTensors, name)  # likewise
    assert planned(folder, **options, activation_checkpointing=True) == found
    assert found.peak_bytes > 0


def test_the_largest_batch_fits_and_the_next_does_not(folder):
    config, run = config_of(str(folder)), Run(world_size=8, seq_len=SEQ_LEN)
    device_bytes = 30_000_000
    search, plan = largest_batch(config, run, device_bytes=device_bytes, cap=1000)
    assert search.largest == plan.run.batch_size > 4
    assert plan.peak_bytes <= device_bytes < planned(
        folder, world_size=8, precision=run.precision, batch_size=search.largest + 1
    ).peak_bytes  # fmt: skip
    assert search.limit.startswith(f"{search.largest + 1}: takes ")


@pytest.mark.parametrize(("loss", "num_plans"), [("plain", 4), ("chunked", 5)])
def test_a_search_over_activations_takes_few_plans(loss, num_plans):
    config, run = config_of("gpt2-nano"), Run(world_size=8, loss=loss)
    search, _ = largest_batch(config, run, device_bytes=20 * 10**9, cap=1000)
    sizes = [tried.size for tried in search.tried]
    assert len(sizes) == num_plans
    assert set(sizes) >= {1, 2, search.largest, search.largest + 1}
    assert search.largest > 16


def test_chunks_of_logits_take_a_fraction_of_all(tmp_path):
    """Of 512 positions and 4,096 tokens, or of 256 positions."""
    GPT2Config(
        n_layer=1, n_embd=16, n_head=1, vocab_size=4096, bos_token_id=0, eos_token_id=0
    ).save_pretrained(tmp_path)
    options = {"world_size": 8, "batch_size": 16, "activation_checkpointing": True}
    plain, chunked = (planned(tmp_path, **options, loss=loss) for loss in ("plain", "chunked"))
    assert chunked.peak_bytes + 4 * 16 * SEQ_LEN * 4096 < plain.peak_bytes
    assert planned(tmp_path, **options) == chunked
