"""One form of checkpoint into another: every value, every name, and what is wrong is told."""

import re
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_fsdp.checkpoint import folder
from lightning_fsdp.checkpoint.contents import NAMES
from lightning_fsdp.checkpoint.convert import convert
from lightning_fsdp.convert.__main__ import main
from recipes.gpt2 import GPT2
from tests.support.converted import assert_identical, load_plainly
from tests.support.processes import REPOSITORY
from tests.support.trainer import make_trainer, on_trainer_ranks, seeded


class _Run(GPT2):
    """Two groups, state of two kinds per parameter, a tied weight, a buffer, a value."""

    def __init__(self):
        super().__init__(size="nano", vocab_size=61, max_seq_len=16)
        self.register_buffer("seen", torch.tensor(3))

    def on_save_checkpoint(self, checkpoint):
        checkpoint["note"] = {"of mine": torch.arange(3)}

    def on_train_end(self):
        self.trainer.optimizers[0].state["own"] = {"of": "no parameter", "seen": torch.ones(2)}
        self.trainer.save_checkpoint(self.path)  # it is sharded now


def _loader():
    ids = torch.randint(0, 61, (16, 12), generator=torch.Generator().manual_seed(1))
    return DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=2)


def _train(rank, world_size, path, strategies):
    for strategy in strategies:
        trainer = make_trainer(strategy, Path(path).parent, max_steps=2)
        run = seeded(_Run)
        run.path = Path(path).with_suffix(f".{strategy}")
        trainer.fit(run, _loader())


_ENGINES = ("scratch_fsdp", "fsdp1_zero3", "fsdp2_zero3", "ddp")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Full checkpoints of a run under each engine."""
    path = tmp_path_factory.mktemp("run") / "full"
    on_trainer_ranks(_train, 2, str(path), _ENGINES, timeout_s=280)
    return {strategy: path.with_suffix(f".{strategy}") for strategy in _ENGINES}


@pytest.fixture
def full(trained):
    return trained["scratch_fsdp"]


@pytest.mark.parametrize("engine", _ENGINES[:3])
def test_a_full_checkpoint_comes_back_from_shards_bit_for_bit(trained, tmp_path, engine):
    assert not dist.is_initialized()
    assert convert(trained[engine], tmp_path / "sharded", to="sharded") == []
    assert convert(tmp_path / "sharded", tmp_path / "full.ckpt", to="full") == []
    found, expected = load_plainly(tmp_path / "full.ckpt"), load_plainly(trained[engine])
    assert set(found) == set(expected)
    assert found["optimizer_states"][0]["state"]
    assert_identical({key: found[key] for key in expected}, expected)
    tied = [found["state_dict"][f"model.{name}.weight"] for name in ("transformer.wte", "lm_head")]
    assert tied[0].data_ptr() == tied[1].data_ptr()


def test_another_state_dict_may_be_called_as_a_folder_calls_the_module(full, tmp_path):
    expected = load_plainly(full)
    expected["model"] = {name: value + 1 for name, value in expected["state_dict"].items()}
    torch.save(expected, tmp_path / "two.ckpt")
    convert(tmp_path / "two.ckpt", tmp_path / "sharded", to="sharded")
    convert(tmp_path / "sharded", tmp_path / "full.ckpt", to="full")
    found = load_plainly(tmp_path / "full.ckpt")
    assert_identical({key: found[key] for key in expected}, expected)


def test_shards_have_the_names_of_the_module(full, tmp_path):
    convert(full, tmp_path / "sharded", to="sharded")
    shapes = folder.read_shapes(tmp_path / "sharded")
    expected = load_plainly(full)
    names = [name for name in expected["state_dict"] if name != "model.lm_head.weight"]
    of_model = {key for key in shapes if key.startswith("model.")}
    assert of_model == {f"model.{name}" for name in names}
    for name in names:
        assert shapes[f"model.{name}"][0] == expected["state_dict"][name].shape
    for name in names:
        if name != "seen":
            assert f"optimizer.0.{name}.exp_avg" in shapes
    assert not any(key.endswith(".step") for key in shapes)


@pytest.mark.parametrize("size", ["40KB", "5GB"])
@pytest.mark.parametrize("start", ["full", "sharded"])
def test_weights_come_back_from_safetensors_bit_for_bit(full, tmp_path, start, size):
    source = full
    if start == "sharded":
        source = tmp_path / "source"
        convert(full, source, to="sharded")
    left_out = convert(source, tmp_path / "st", to="safetensors", max_shard_size=size)
    assert left_out[0] == "optimizer state: safetensors hold weights alone"
    assert "note" in left_out[1]
    assert "config.json" in left_out[2]
    assert (len(list((tmp_path / "st").glob("*.safetensors"))) > 1) == (size == "40KB")
    assert convert(tmp_path / "st", tmp_path / "again", to=start) == []
    if start == "sharded":
        convert(tmp_path / "again", tmp_path / "again.ckpt", to="full")
        (tmp_path / "again").rename(tmp_path / "shards")
        (tmp_path / "again.ckpt").rename(tmp_path / "again")
    found, expected = (
        load_plainly(tmp_path / "again")["state_dict"],
        load_plainly(full)["state_dict"],
    )
    assert_identical({name: found[name] for name in expected}, expected)
    assert set(found) == set(expected)


def test_transformers_and_lightning_read_what_was_converted(full, tmp_path):
    model = seeded(_Run)
    model.configure_model()
    model.load_state_dict(load_plainly(full)["state_dict"])
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        expected = model.eval().model(ids).logits
    model.model.config.dtype = "bfloat16"  # of the base: what was trained is in fp32
    model.model.config.save_pretrained(tmp_path / "config")
    left_out = convert(
        full, tmp_path / "hf", to="safetensors", prefix="model.", config=tmp_path / "config"
    )
    assert left_out[-1] == "seen: not below 'model.'"
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, expected)
    assert "lm_head.weight" not in load_file(tmp_path / "hf" / "model.safetensors")

    convert(tmp_path / "hf", tmp_path / "back.ckpt", to="full", prefix="model.")
    found = _Plain.load_from_checkpoint(tmp_path / "back.ckpt", strict=False)
    with torch.no_grad():
        assert torch.equal(found.eval().model(ids).logits, expected)


class _Plain(pl.LightningModule):
    def __init__(self):
        super().__init__()
        run = _Run()
        run.configure_model()
        self.model = run.model


def test_a_folder_of_tensors_without_a_state_dict_is_told(tmp_path):
    folder.save(tmp_path / "tensors", {"weight": torch.ones(2)}, {})
    with pytest.raises(ValueError, match=r"got tensors that belong to no state dict. Load them"):
        convert(tmp_path / "tensors", tmp_path / "out", to="full")
    assert not (tmp_path / "out").exists()


def test_optimizer_state_of_a_file_without_names_is_left_out_and_told(trained, tmp_path):
    (told,) = convert(trained["ddp"], tmp_path / "sharded", to="sharded")
    assert told.startswith("optimizer state: the file has numbers where a sharded")
    assert not any(key.startswith("optimizer") for key in folder.read_shapes(tmp_path / "sharded"))
    file = load_plainly(trained["ddp"])
    file["optimizer_states"][0]["param_groups"] = [
        {**group, "param_names": names}
        for group, names in zip(
            file["optimizer_states"][0]["param_groups"],
            load_plainly(trained["scratch_fsdp"])[NAMES][0],
            strict=True,
        )
    ]
    torch.save(file, tmp_path / "named.ckpt")
    assert convert(tmp_path / "named.ckpt", tmp_path / "named", to="sharded") == []
    assert any(key.startswith("optimizer") for key in folder.read_shapes(tmp_path / "named"))


@pytest.mark.parametrize(
    "edit",
    [
        lambda names: names[0][1].pop(),
        lambda names: names[0][0].append("another"),
        lambda names: names[0].pop(),
        lambda names: names.append([]),
        lambda names: names[0][1].__setitem__(0, names[0][0][0]),  # twice, another one never
        lambda names: names[0].reverse(),
    ],
    ids=[
        "one too few",
        "one too many",
        "a group too few",
        "an optimizer too many",
        "twice",
        "exchanged",
    ],
)
@pytest.mark.parametrize("to", ["sharded", "safetensors"])
def test_names_that_are_not_those_of_the_parameters_are_refused(full, tmp_path, capsys, edit, to):
    edited, path = load_plainly(full), tmp_path / "edited.ckpt"
    edit(edited[NAMES])
    torch.save(edited, path)
    assert main([str(path), str(tmp_path / "out"), "--to", to]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    (state,) = edited["optimizer_states"]
    sizes = re.escape(str([[len(group["params"]) for group in state["param_groups"]]]))
    expected = rf"error: {path}: expected a name for each parameter in '{NAMES}', .* {sizes}, got "
    assert re.match(expected, said), said
    assert said.endswith(
        f"Correct them, or take '{NAMES}' out of the file to convert it without optimizer state."
    )
    assert [*tmp_path.iterdir()] == [path]
    del edited[NAMES]
    torch.save(edited, path)
    left_out = convert(path, tmp_path / "out", to=to)
    assert any(told.startswith("optimizer state") for told in left_out)


def test_an_error_of_the_command_stands_alone(tmp_path, capsys):
    source = tmp_path / "nothing"
    assert main([str(source), str(tmp_path / "target"), "--to", "full"]) == 1
    expected = f"error: {source}: expected a checkpoint, got nothing there."
    assert capsys.readouterr().err.splitlines() == [expected]


def test_the_command_converts_and_tells_what_is_left_out(full, tmp_path):
    command = ["-m", "lightning_fsdp.convert", full, tmp_path / "st", "--to", "safetensors"]
    finished = subprocess.run(
        [sys.executable, *command],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert lines[0] == f"{tmp_path / 'st'}: safetensors"
    assert lines[1] == "not in it: optimizer state: safetensors hold weights alone"
    *_, bar, cleared = finished.stderr.splitlines()  # a carriage return ends a line as well
    assert "B/s" in bar
    assert not cleared.strip(), "what is said next would stand behind the bar"


class _Evil:
    def __reduce__(self):
        return (Path.touch, (Path("evil-was-here"),))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("shards", r"__0_0\.distcp: expected the checksum .* Load another checkpoint, or"),
        (
            "cut.safetensors",
            r"safetensors: expected .* that torch\.load.*damaged one \((Error|mmap)",
        ),
        ("missing", r"none: expected a checkpoint, got nothing there"),
        ("text", r"text: expected a file that torch\.load\(weights_only=True\) reads"),
        ("truncated", r"truncated: expected a file that torch\.load\(weights_only=True\) reads"),
        ("flipped", r"flipped: expected a file that.*\(checksum of '.*/data/\d+': its content has"),
        ("code", r"code: expected a file that .*global: GLOBAL getattr was not an allowed"),
        (
            "other",
            r"other: expected a checkpoint of the Trainer, with 'state_dict' in it, got \['a",
        ),
        ("tensor", r"tensor: expected a checkpoint of the Trainer.*got Tensor"),
        ("empty", r"empty: expected a sharded checkpoint, or safetensors, got a folder without"),
        ("target", r"target: expected nothing there yet"),
        ("same", r"is full already\. Copy it"),
        ("prefix", r"--prefix: expected the beginning of names as \['.*got 'modell\.'"),
        ("config", r"expected a folder with config\.json"),
        (
            "prefix without a dot",
            r"--prefix: expected names up to a dot, got 'model'\. Add the dot",
        ),
        ("prefix without safetensors", r"--prefix: expected from or to safetensors"),
        ("config without safetensors", r"--config: expected safetensors .*, got 'sharded'\. Leave"),
        ("size", r"--max-shard-size: expected bytes or a size"),
    ],
)
def test_what_is_wrong_is_named_and_leaves_nothing_behind(
    full, tmp_path, capsys, monkeypatch, wrong, message
):
    monkeypatch.chdir(tmp_path)
    source, target, to, more = full, tmp_path / "target", "safetensors", []
    if wrong.split()[0] not in ("target", "same", "prefix", "config", "size"):
        source = tmp_path / ("none" if wrong == "missing" else wrong)
    if wrong == "shards":
        convert(full, source, to="sharded")
        (file,) = source.glob("current/*.distcp")
        file.write_bytes(file.read_bytes()[:-9] + b"something")
    elif wrong == "cut.safetensors":
        source.write_bytes(b"x" * 100)
    elif wrong == "text":
        source.write_text("not a checkpoint")
    elif wrong == "truncated":
        source.write_bytes(full.read_bytes()[:-5000])
    elif wrong == "flipped":
        data, state = bytearray(full.read_bytes()), torch.load(full)["state_dict"]
        name, weight = next((n, t) for n, t in state.items() if t.dim() == 2)
        data[data.index(weight.numpy().tobytes()) + 6] ^= 4
        source.write_bytes(data)
        assert not torch.equal(torch.load(source)["state_dict"][name], weight)
    elif wrong == "code":
        torch.save({"state_dict": {}, "more": _Evil()}, source)
    elif wrong == "other":
        torch.save({"a": 1}, source)
    elif wrong == "tensor":
        torch.save(torch.ones(3), source)
    elif wrong == "empty":
        source.mkdir()
    elif wrong == "target":
        target.write_text("kept")
    elif wrong == "same":
        to = "full"
    elif wrong == "prefix":
        more = ["--prefix", "modell."]
    elif wrong == "prefix without a dot":
        more = ["--prefix", "model"]
    elif wrong == "prefix without safetensors":
        to, more = "sharded", ["--prefix", "model."]
    elif wrong == "config":
        more = ["--config", str(tmp_path)]
    elif wrong == "config without safetensors":
        (tmp_path / "config.json").touch()
        to, more = "sharded", ["--config", str(tmp_path)]
    elif wrong == "size":
        more = ["--max-shard-size", "much"]
    before = sorted(tmp_path.iterdir())
    assert main([str(source), str(target), "--to", to, *more]) == 1
    assert re.search(message, capsys.readouterr().err, re.DOTALL)
    assert sorted(tmp_path.iterdir()) == before
    assert wrong != "target" or target.read_text() == "kept"
