"""The command that plans: the table, the file, and what it refuses."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
from transformers import MixtralConfig

from lightning_fsdp.plan import __main__ as plan_command
from lightning_fsdp.plan.__main__ import main
from lightning_fsdp.plan.models import MODELS, config_of
from tests.support.planned import folder_with, planned
from tests.support.ranks import run_on_ranks


@pytest.fixture
def folder(tmp_path):
    return folder_with("gpt2", tmp_path, n_layer=2)


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
        ({"--model": "g" * 5000}, "expected one of gpt2-nano, .* or a folder"),
        ({"--ranks": "0"}, "--ranks: expected 1 or more, got '0'"),
        ({"--ranks": "3000000000"}, "--ranks: expected at most 2147483647, got '3000000000'"),
        ({"--rank": "3"}, "unrecognized arguments: --rank 3"),
        ({"--stage": "4"}, r"--stage: invalid choice: 4 \(choose from 2, 3\)"),
        ({"--precision": "16-mixed"}, r"invalid choice: '16-mixed' \(.*'?bf16-mixed'?\)"),
        ({"--precision": "fp8"}, r"--precision: invalid choice: 'fp8' \(choose from '?32-true"),
        ({"--shard-size": "3"}, "--shard-size: expected a divisor of the 2 ranks, got 3"),
        ({"--state-over": "all"}, "--state-over='all': expected a shard_size smaller"),
        ({"--batch-size": "0"}, "--batch-size: expected 1 or more, got '0'"),
        ({"--seq-len": "4096"}, "--seq-len: expected at most the model's 1024 positions, got 4096"),
        (
            {"--device-memory": "much"},
            "--device-memory: expected an amount of memory, such as 80GB",
        ),
        ({"--device-memory": ""}, "--device-memory: expected an amount of memory, .* got ''"),
        ({"--device-memory": "24"}, r"expected 1MB or more, such as 80GB, got '24' \(24 bytes\)"),
        ({"--device-memory": "9" * 400}, "--device-memory: expected an amount of memory"),
        ({"--max-batch-size": "8"}, "--max-batch-size: expected --device-memory with it"),
        ({"--device-memory": "1GB", "--batch-size": "4"}, "--batch-size: not with --device-memory"),
        ({"--max-batch-size": "0"}, "--max-batch-size: expected 1 or more, got '0'"),
        ({"--optimizer": "mun"}, "--optimizer: invalid choice: 'mun' "),
    ],
)
def test_wrong_arguments_are_named(changes, message, capsys):
    options = {"--model": next(iter(MODELS)), "--ranks": "2", **changes}
    with pytest.raises(SystemExit) as raised:
        main([word for option in options.items() for word in option])
    assert raised.value.code == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert re.search(f"^error: .*{message}", told)


def test_a_model_whose_step_does_not_run_without_data_is_one_line(tmp_path, capsys):
    """Which tokens an expert gets is asked for where its products are not made together."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    config = MixtralConfig(**sizes, **heads, num_local_experts=2)
    config.save_pretrained(tmp_path)
    words = ["--model", str(tmp_path), "--ranks", "2", "--seq-len", "16", "--precision"]
    assert main([*words, "bf16-mixed"]) == 0
    one_by_one = {**config.to_dict(), "experts_implementation": "eager"}
    (tmp_path / "config.json").write_text(json.dumps(one_by_one))
    with pytest.raises(SystemExit) as raised:
        main([*words, "32-true"])
    assert raised.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"--model: expected one whose step runs in 32-true .* aten.*Try", message)


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
    monkeypatch.setattr(plan_command, "format_plan", lambda *_: str(path.mkdir()))
    with pytest.raises(SystemExit):
        main(["--model", str(folder), "--ranks", "2", "--seq-len", "32", "--out", str(path)])
    assert "error: --out: expected a file to write" in capsys.readouterr().err


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path, folder, capsys, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("of before")

    def fail(path, content):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(SystemExit):
        main(["--model", str(folder), "--ranks", "2", "--seq-len", "32", "--out", str(path)])
    assert "(No space left on device). Name another" in capsys.readouterr().err
    assert path.read_text() == "of before"
    assert {*tmp_path.iterdir()} == {folder, path}


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


def test_sizes_that_make_no_model_are_refused(folder, capsys):
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"n_head": 7}))
    with pytest.raises(SystemExit):
        main(["--model", str(folder), "--ranks", "2", "--seq-len", "32"])
    said = "error: --model: expected a config that makes a model, got: .* Correct its config.json"
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
