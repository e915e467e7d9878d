"""Runs go on from what was converted; a conversion holds a few tensors of many."""

import threading
from pathlib import Path

import peft
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import GPT2Config, GPT2LMHeadModel

import lightning_fsdp
from lightning_fsdp.checkpoint.convert import convert
from tests.support.converted import assert_identical, load_plainly
from tests.support.own_memory import own_bytes
from tests.support.trainer import (
    AdamwRegressor,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
    weights_of,
    with_options,
)

pytestmark = pytest.mark.usefixtures("kept_ranks")


def _options(folder, at_step):
    keep = ModelCheckpoint(folder, every_n_train_steps=at_step, save_top_k=-1, filename="kept")
    average = lightning_fsdp.ShardedEMA(decay=0.5)
    return {"callbacks": [keep, average], "enable_checkpointing": True, "max_epochs": 2}


def _train_with_average(rank, world_size, folder, strategy):
    found = {}
    for checkpoint in ("sharded", "full"):
        run = seeded(AdamwRegressor)
        options = _options(folder / checkpoint, at_step=4)
        chosen = with_options(strategy, checkpoint=checkpoint)
        make_trainer(chosen, folder, **options).fit(run, make_loader())
        found = weights_of(run)
    return found


def _go_on(rank, world_size, folder, strategy, paths):
    results = []
    for path in paths:
        run = seeded(AdamwRegressor, seed=9)
        trainer = make_trainer(strategy, folder, **_options(folder / "unused", at_step=100))
        trainer.fit(run, make_loader(), ckpt_path=folder / path)
        results.append(weights_of(run))
    weights = seeded(AdamwRegressor, seed=8)
    trainer = make_trainer(strategy, folder)
    trainer.validate(weights, make_loader(), ckpt_path=folder / "from_weights", verbose=False)
    return results, weights_of(weights)


@pytest.mark.parametrize("strategy", ["scratch_fsdp_zero3", "fsdp1_zero3"])
def test_a_run_goes_on_from_what_its_checkpoints_were_converted_to(tmp_path, strategy):
    expected = on_trainer_ranks(_train_with_average, 2, tmp_path, strategy)[0]
    kept = {kind: tmp_path / kind / "kept.ckpt" for kind in ("sharded", "full")}
    assert convert(kept["sharded"], tmp_path / "file", to="full") == []
    assert convert(kept["full"], tmp_path / "folder", to="sharded") == []
    assert convert(tmp_path / "file", tmp_path / "back", to="sharded") == []
    convert(kept["sharded"], tmp_path / "weights", to="safetensors")
    convert(tmp_path / "weights", tmp_path / "from_weights", to="sharded")

    found, file = load_plainly(tmp_path / "file"), load_plainly(kept["full"])
    del found["callbacks"], file["callbacks"]  # their paths differ
    assert_identical({key: found[key] for key in file}, file)
    assert found["current_model_state"]["head.bias"].tolist()
    names = ("file", "folder", "back")
    for results, weights in on_trainer_ranks(_go_on, 2, tmp_path, strategy, names):
        for result in results:
            assert_identical(result, expected)
        assert_identical(weights, {name: file["state_dict"][name] for name in weights})


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_adapters_of_peft_are_not_written_under_names_that_nobody_knows(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11))
    adapted = peft.get_peft_model(model, peft.LoraConfig(fan_in_fan_out=True))
    torch.save({"state_dict": adapted.state_dict()}, tmp_path / "full")
    with pytest.raises(NotImplementedError, match=r"base_layer.*expected the names of a model"):
        convert(tmp_path / "full", tmp_path / "out", to="safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"full"}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells what is anonymous")
@pytest.mark.parametrize(
    ("start", "to"),
    [
        ("full", "safetensors"),
        ("sharded", "safetensors"),
        ("full", "sharded"),
        ("sharded", "full"),
    ],
)
def test_a_conversion_holds_a_few_tensors_of_many(tmp_path, start, to):
    def write(folder, num, numel):
        folder.mkdir()
        state = {f"weight {n}": torch.full((numel,), float(n)) for n in range(num)}
        torch.save({"state_dict": state}, folder / "full")
        if start == "sharded":
            convert(folder / "full", folder / "sharded", to="sharded")
        return folder

    small = write(tmp_path / "small", 1, 1)
    convert(small / start, small / "out", to=to)  # imports what it needs
    large = write(tmp_path / "large", 32, 2**20)  # 128 MiB
    seen, is_done = [], threading.Event()

    def watch():
        while not is_done.wait(0.001):
            seen.append(own_bytes())

    before = own_bytes()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        convert(large / start, large / "out", to=to, max_shard_size="16MB")
    finally:
        is_done.set()
        watcher.join()
    assert len(seen) > 10
    assert max(seen) - before <= 56 * 2**20  # two files, and what the allocator keeps


def test_a_conjugate_is_not_tied_to_what_it_is_a_view_of(tmp_path):
    z = torch.tensor([1 + 2j, 3 - 1j])
    torch.save({"state_dict": {"z": z, "tied": z, "conjugate": z.conj()}}, tmp_path / "z.ckpt")
    convert(tmp_path / "z.ckpt", tmp_path / "sharded", to="sharded")
    convert(tmp_path / "sharded", tmp_path / "full.ckpt", to="full")
    found = load_plainly(tmp_path / "full.ckpt")["state_dict"]
    assert_identical(found, {"z": z, "tied": z, "conjugate": z.conj()})
    assert found["z"].data_ptr() == found["tied"].data_ptr()
