"""Checkpoints without a base beside merged adapters, and what else a run may ask for."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file

from lightning_fsdp import load_adapters, load_pretrained, load_sharded
from lightning_fsdp.checkpoint.convert import convert
from tests.support.adapters import Adapted, adapted_loader
from tests.support.cases import each_on_trainer_ranks
from tests.support.ranks import run_on_ranks
from tests.support.trainer import as_torchrun, make_trainer, weights_of, with_options


class _Saves(Adapted):
    """Saves adapters and the merged model while a checkpoint may be on its way."""

    folder = None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.global_step == 3 and not (self.folder / "merged").exists():
            self.trainer.strategy.save_adapters(self.folder / "adapters")
            self.trainer.strategy.save_pretrained(self.folder / "merged", merge_adapters=True)


class _Reads(Adapted):
    """Starts from them, in place of a checkpoint."""

    folder = None

    def on_train_start(self):
        load_pretrained(self, self.folder / "base")
        load_adapters(self, self.folder / "adapters")


def _optimizer(name):
    return {"AdamW": torch.optim.AdamW, "Muon": torch.optim.Muon}[name]


CHECKPOINTS = {
    "full": {"checkpoint": "full"},
    "sharded": {"checkpoint": "sharded"},
    "async": {"checkpoint": "sharded", "async_save": True},
}


def _fit(model, case, folder, ckpt_path=None, **options):
    strategy, kind, _, shard_size, *state_over = case
    saved = {**CHECKPOINTS[kind], "checkpoint_base": False, "shard_size": shard_size}
    if state_over:
        saved["state_over"] = state_over[0]
    options = {"max_epochs": 2, "max_steps": -1, **options}
    trainer = make_trainer(with_options(strategy, **saved), folder, **options)
    trainer.fit(model, adapted_loader(4 * dist.get_world_size()), ckpt_path=ckpt_path)
    return trainer


def _same(rank, world_size, case, folder):
    folder = Path(folder) / " ".join(map(str, case))
    make = {"kind": "bf16", "optimizer": _optimizer(case[2])}
    saves = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    model = _Saves(**make)
    model.folder = folder
    _fit(model, case, folder, callbacks=[saves], enable_checkpointing=True)
    expected = weights_of(model)
    resumed = Adapted(seed=3, **make)
    _fit(resumed, case, folder, folder / "epoch=0.ckpt")
    torch.testing.assert_close(weights_of(resumed), expected, atol=0, rtol=0)
    # Merged in the middle of the run: as peft merges what was saved there.
    found = load_file(folder / "merged" / "model.safetensors")
    plain = Adapted(**make)
    load_adapters(plain.model, folder / "adapters")
    merged = dict(plain.model.merge_and_unload().state_dict())
    torch.testing.assert_close(found, {n: merged[n] for n in found}, atol=0, rtol=0)
    before = load_file(folder / "adapters" / "adapter_model.safetensors")
    names = {n: n.replace(".default.", ".") for n in expected if ".lora_" in n}
    assert any(
        not torch.equal(expected[n], before[key.removeprefix("model.")]) for n, key in names.items()
    )
    dist.barrier()
    # From folders in place of a checkpoint, under the same ranks.
    if rank == 0:
        Adapted("bf16").model.unload().save_pretrained(folder / "base")
    dist.barrier()
    read = _Reads(seed=3, **make)
    read.folder = folder
    _fit(read, case, folder, max_steps=1)
    state = weights_of(read)
    base = weights_of(Adapted("bf16"))
    for name, parameter in read.named_parameters():
        if not parameter.requires_grad:
            assert torch.equal(state[name], base[name]), name


ENGINES = ("scratch_fsdp_zero3", "fsdp1_zero3", "fsdp2_zero3")


def test_merged_in_a_run_whose_checkpoints_hold_no_base(tmp_path):
    # Torch's engines save in the background, and train by AdamW, in the test below.
    cases = [(ENGINES[0], "async", "AdamW", None)]
    cases += [(name, kind, "Muon", None) for name, kind in zip(ENGINES, CHECKPOINTS, strict=True)]
    each_on_trainer_ranks(_same, 2, cases, str(tmp_path), timeout_s=280)


def test_and_with_replicas(tmp_path):
    cases = [(name, "async", "AdamW", 2) for name in ENGINES[1:]]
    cases += [("scratch_fsdp_zero2", "full", "Muon", 2)]
    cases += [("scratch_fsdp_zero3", "async", "Muon", 2, "all")]
    each_on_trainer_ranks(_same, 4, cases, str(tmp_path), timeout_s=280)


def _write(rank, world_size, folder):
    as_torchrun(rank, world_size)
    for kind in ("full", "sharded"):
        case = (ENGINES[0], kind, "AdamW", None)
        _fit(Adapted("bf16"), case, folder, max_steps=2).save_checkpoint(Path(folder) / kind)


def _go_on(rank, world_size, folder):
    as_torchrun(rank, world_size)
    found = []
    for path in ("full", "sharded", "to full", "to sharded"):
        model = Adapted("bf16", seed=3)
        _fit(model, (ENGINES[1], "full", "AdamW", None), folder, Path(folder) / path)
        found.append(weights_of(model))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=0, rtol=0)
    model, base = Adapted("bf16", seed=3), Adapted("bf16").state_dict()
    message = r"missing: \['model\.base_model\.\S+\.weight'.*strict=False.*checkpoint_base=False"
    with pytest.raises(RuntimeError, match=message):
        load_sharded(Path(folder) / "sharded", model)
    load_sharded(Path(folder) / "sharded", model, strict=False)
    saved = torch.load(Path(folder) / "full", weights_only=True)["state_dict"]
    expected = {**base, **saved}
    torch.testing.assert_close(dict(model.state_dict()), expected, atol=0, rtol=0)


def test_checkpoints_without_a_base_are_converted_into_each_other_and_not_to_safetensors(tmp_path):
    run_on_ranks(_write, 2, str(tmp_path), timeout_s=100)
    convert(tmp_path / "full", tmp_path / "to sharded", to="sharded")
    convert(tmp_path / "sharded", tmp_path / "to full", to="full")
    for source in ("full", "sharded"):
        with pytest.raises(NotImplementedError, match=r"without this one, .*checkpoint_base=False"):
            convert(tmp_path / source, tmp_path / "weights", to="safetensors", prefix="model.")
    run_on_ranks(_go_on, 2, str(tmp_path), timeout_s=100)
