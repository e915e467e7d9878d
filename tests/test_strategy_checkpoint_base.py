"""Checkpoints without frozen parameters: a run goes on from them to the same bits."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fsdp import ShardedEMA
from lightning_fsdp.checkpoint.contents import LEFT_OUT
from tests.support.adapters import Adapted, adapted_loader
from tests.support.cases import each_on_trainer_ranks
from tests.support.ranks import run_on_ranks
from tests.support.trainer import (
    SHARDED,
    Regressor,
    as_torchrun,
    make_loader,
    make_trainer,
    seeded,
    weights_of,
    with_options,
)


class _WithBuffer(Adapted):
    def __init__(self, kind="bf16", seed=0):
        super().__init__(kind, seed)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return super().training_step(batch, batch_idx)


def _fit(strategy, folder, model, ckpt_path=None, **options):
    options = {"max_steps": 2, **options}
    trainer = make_trainer(strategy, folder, **options)
    trainer.fit(model, adapted_loader(8), ckpt_path=ckpt_path)
    return trainer


def _resumed(strategy, kind, saves_base, folder, rank):
    """Final weights of a run, and what it saved; without its base it is resumed as well."""
    options = {"checkpoint": kind, "checkpoint_base": saves_base}
    saves = ModelCheckpoint(folder / f"{strategy} {kind} {saves_base}", filename="{epoch}")
    during, path = (Path(saves.dirpath) / name for name in ("epoch=0.ckpt", "after.ckpt"))
    model, resumed = _WithBuffer(), _WithBuffer(seed=3)  # other adapters over the same base
    run = {"max_epochs": 2, "max_steps": -1, "enable_checkpointing": True}
    saves.save_top_k = -1
    trainer = _fit(with_options(strategy, **options), folder, model, callbacks=[saves], **run)
    trainer.save_checkpoint(path)  # the module is whole
    if not saves_base:
        run["enable_checkpointing"] = False
        _fit(with_options(strategy, **options), folder, resumed, during, **run)
        torch.testing.assert_close(weights_of(resumed), weights_of(model), atol=0, rtol=0)
    return weights_of(model), (path, during)


def _bytes_in(path):
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _same_bits(rank, world_size, case, folder):
    strategy, kind = case
    folder = Path(folder)
    expected, with_base = _resumed(strategy, kind, True, folder, rank)
    found, without = _resumed(strategy, kind, False, folder, rank)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert found["seen"] == 4
    base = sum(p.nbytes for p in _WithBuffer().parameters() if not p.requires_grad)
    for whole, part in zip(with_base, without, strict=True):
        assert _bytes_in(whole) - _bytes_in(part) > 0.9 * base, (strategy, kind)
    if kind == "full":
        saved = torch.load(without[1], weights_only=True)
        model = _WithBuffer()
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        assert saved["state_dict"].keys() == trained | {"seen"}
        assert saved[LEFT_OUT].keys() == model.state_dict().keys() - saved["state_dict"].keys()
        assert LEFT_OUT not in torch.load(with_base[1], weights_only=True)
    dist.barrier()


CASES = [(strategy, kind) for strategy in SHARDED[::2] for kind in ("full", "sharded")]


def test_a_run_goes_on_without_its_base_to_the_same_bits(tmp_path):
    each_on_trainer_ranks(_same_bits, 2, CASES, str(tmp_path), timeout_s=250)


def _load(rank, world_size, folder):
    """Saved on two ranks under the core, read elsewhere."""
    as_torchrun(rank, world_size)
    for kind in ("full", "sharded"):
        path = Path(folder) / f"{SHARDED[0]} {kind} False.ckpt"
        model = _WithBuffer(seed=5)
        trainer = _fit("fsdp1_zero2", Path(folder), model, path, max_steps=2)  # at its end
        assert trainer.global_step == 2
        found = weights_of(model)
        expected = torch.load(Path(folder) / f"{SHARDED[0]} full False.ckpt")["state_dict"]
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
        base = _WithBuffer().state_dict()
        assert all(torch.equal(found[n], base[n]) for n in found.keys() - expected.keys())
        again = Path(folder) / f"{kind} again.ckpt"
        trainer.save_checkpoint(again)
        states = [
            torch.load(Path(folder) / file, weights_only=True)["optimizer_states"][0]["state"]
            for file in (again, f"{SHARDED[0]} full False.ckpt")
        ]
        assert states[0]
        torch.testing.assert_close(*states, atol=0, rtol=0)


class _Other(_WithBuffer):
    """Over another base."""

    def __init__(self, change):
        super().__init__("bf16")
        base = self.model.get_base_model()
        if change == "shape":
            base.resize_token_embeddings(67)
        else:
            base.model.layers[0].another = torch.nn.Linear(2, 2)
            del base.model.norm


def _refuse(rank, world_size, folder):
    for kind in ("full", "sharded"):
        path = Path(folder) / f"{SHARDED[0]} {kind} False.ckpt"
        start = r"checkpoint_base=False.*expected the frozen parameters .*got others: "
        with pytest.raises(ValueError, match=start + r".*embed_tokens.*\(67, 24\), not \(61, 24\)"):
            _fit(SHARDED[0], Path(folder), _Other("shape"), path)
        with pytest.raises(ValueError, match=start + r".*norm\.weight' is not there"):
            _fit(SHARDED[2], Path(folder), _Other("name"), path)
        more = _WithBuffer()
        more.added = torch.nn.Linear(2, 2)
        with pytest.raises(RuntimeError, match=r"checkpoint_base=False.*missing: \['added.weight"):
            _fit(SHARDED[4], Path(folder), more, path)
    averaged = with_options(SHARDED[0], checkpoint_base=False)
    with pytest.raises(NotImplementedError, match=r"ShardedEMA with checkpoint_base=False"):
        _fit(averaged, Path(folder), _WithBuffer(), callbacks=[ShardedEMA()])
    with pytest.raises(TypeError, match=r"checkpoint_base: expected True or False, got 'no'"):
        with_options(SHARDED[0], checkpoint_base="no")


class _Thaws(Regressor):
    """The first block is frozen, and trained in the second batch alone; the head is frozen after
    it; the inlet always.
    """

    def __init__(self):
        super().__init__()
        self.inlet.requires_grad_(False)
        self.blocks[0].requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        self.blocks[0].requires_grad_(batch_idx == 1)
        self.head.requires_grad_(batch_idx < 2)


def _saved_names(model, path, ckpt_path=None, max_steps=3):
    strategy = with_options(SHARDED[0], checkpoint_base=False)
    trainer = make_trainer(strategy, path.parent, max_steps=max_steps)
    trainer.fit(model, make_loader(), ckpt_path=ckpt_path)
    trainer.save_checkpoint(path)
    return torch.load(path, weights_only=True)["state_dict"]


def _keep(rank, world_size, folder):
    folder = Path(folder)
    nothing = _saved_names(seeded(Regressor), folder / "nothing.ckpt")
    assert nothing.keys() == seeded(Regressor).state_dict().keys()
    names = {n for n in Regressor().state_dict() if not n.startswith("inlet")}
    saved = _saved_names(seeded(_Thaws), folder / "thaws.ckpt")
    assert saved.keys() == names
    resumed = seeded(_Thaws)
    resumed.head.requires_grad_(False)  # as it is from here on
    saved = _saved_names(resumed, folder / "again.ckpt", folder / "thaws.ckpt", max_steps=4)
    assert saved.keys() == names


def test_only_the_same_base_is_taken_and_nothing_trained_is_lost(tmp_path):
    for name in ("full", "sharded"):
        run_on_ranks(_save_once, 2, name, str(tmp_path))
    run_on_ranks(_load, 1, str(tmp_path))
    for check in (_refuse, _keep):
        each_on_trainer_ranks(_checked, 2, [check], str(tmp_path), timeout_s=120)


def _save_once(rank, world_size, kind, folder):
    as_torchrun(rank, world_size)
    strategy = with_options(SHARDED[0], checkpoint=kind, checkpoint_base=False)
    trainer = _fit(strategy, Path(folder), _WithBuffer())
    trainer.save_checkpoint(Path(folder) / f"{SHARDED[0]} {kind} False.ckpt")


def _checked(rank, world_size, check, folder):
    check(rank, world_size, folder)
