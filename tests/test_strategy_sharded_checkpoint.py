"""``checkpoint="sharded"``: a folder to which each rank writes its slices, through the Trainer."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fsdp
from tests.support.checkpoints import verified_files
from tests.support.trainer import (
    SHARDED,
    Regressor,
    assert_like_ddp,
    make_loader,
    make_trainer,
    not_under,
    on_trainer_ranks,
    seeded,
    weights_of,
    with_options,
)
from tests.test_strategy_checkpoint import _Adamw, _NoOptimizer, _PlainSgd, _TwoOptimizers


def _trainer(strategy, folder, **options):
    return make_trainer(with_options(strategy, checkpoint="sharded"), folder, **options)


def _assert_same(found, expected):
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


# -- resuming --------------------------------------------------------------------------------------


def _resume(kind, *, at_step, accumulation=1, max_epochs=2):
    def scenario(strategy, folder, rank):
        keep = ModelCheckpoint(
            folder / "kept", every_n_train_steps=at_step, save_top_k=-1, filename="{step}"
        )
        options = {"accumulate_grad_batches": accumulation, "max_epochs": max_epochs}
        trainer = _trainer(strategy, folder, callbacks=[keep], enable_checkpointing=True, **options)
        uninterrupted = seeded(kind)
        trainer.fit(uninterrupted, make_loader())
        path = folder / "kept" / f"step={at_step}.ckpt"
        assert path.is_dir() == (strategy != "ddp")

        resumed = seeded(kind, seed=9)
        trainer = _trainer(strategy, folder, **options)
        trainer.fit(resumed, make_loader(), ckpt_path=path)
        outcome = {"resumed": weights_of(resumed), "losses": resumed.losses}
        if at_step % 4 == 0:  # at the end of an epoch: the same run, exactly
            _assert_same(outcome["resumed"], weights_of(uninterrupted))
        return outcome | {"step": trainer.global_step}

    return scenario


def _resume_at_epoch_end(strategy, folder, rank):
    return _resume(_Adamw, at_step=4)(strategy, folder, rank)


def _resume_mid_epoch(strategy, folder, rank):
    return _resume(_Adamw, at_step=6, max_epochs=3)(strategy, folder, rank)


def _resume_without_state(strategy, folder, rank):
    return _resume(_PlainSgd, at_step=4)(strategy, folder, rank)


def _resume_while_accumulating(strategy, folder, rank):
    return _resume(_Adamw, at_step=3, accumulation=2)(strategy, folder, rank)


@not_under("fsdp1", reason="refuses two optimizers by hand")
def _resume_by_hand(strategy, folder, rank):
    return _resume(_TwoOptimizers, at_step=8)(strategy, folder, rank)


def _resume_without_optimizer(strategy, folder, rank):
    trainer = _trainer(strategy, folder)
    trainer.fit(seeded(_NoOptimizer), make_loader())
    trainer.save_checkpoint(folder / "none.ckpt")
    model = seeded(_NoOptimizer, seed=2)
    _trainer(strategy, folder, max_epochs=2).fit(
        model, make_loader(), ckpt_path=folder / "none.ckpt"
    )
    return {"weights": weights_of(model)}


@pytest.mark.parametrize(
    "scenario",
    [
        _resume_at_epoch_end,
        _resume_mid_epoch,
        _resume_without_state,
        _resume_while_accumulating,
        _resume_by_hand,
        _resume_without_optimizer,
    ],
)
def test_a_run_resumed_from_a_folder_is_the_one_of_ddp(tmp_path, scenario):
    assert_like_ddp(scenario, tmp_path, atol=5e-6)


def _count_verified(rank, world_size, folder):
    path = folder / "run.ckpt"
    trainer = _trainer(SHARDED[0], folder)
    trainer.fit(seeded(_Adamw), make_loader())
    trainer.save_checkpoint(path)
    with verified_files() as names:
        _trainer(SHARDED[4], folder, max_epochs=2).fit(
            seeded(_Adamw, seed=9), make_loader(), ckpt_path=path
        )
    return names


def test_a_resume_verifies_each_file_once(tmp_path):
    names = [name for of_rank in on_trainer_ranks(_count_verified, 2, tmp_path) for name in of_rank]
    files = {path.name for path in (tmp_path / "run.ckpt" / "current").iterdir()}
    assert sorted(names) == sorted(files - {"complete.json"})


class _Dropout(_Adamw):
    """Draws in every step; the data are always the same, so that nothing else may differ."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return super().forward(self.drop(x))


def _draws(rank, world_size, folder, strategies, at_steps):
    loader = DataLoader(TensorDataset(torch.ones(32, 5), torch.ones(32, 3)), batch_size=4)
    for strategy in strategies:
        for kind in ("sharded", "full"):
            keep = ModelCheckpoint(
                folder / strategy / kind, every_n_train_steps=1, save_top_k=-1, filename="{step}"
            )
            whole = seeded(_Dropout, seed=1)
            torch.manual_seed(5 + rank)
            make_trainer(
                with_options(strategy, checkpoint=kind),
                folder,
                callbacks=[keep],
                enable_checkpointing=True,
                max_epochs=2,
            ).fit(whole, loader)
            for step in at_steps:
                resumed = seeded(_Dropout, seed=3)
                make_trainer(with_options(strategy, checkpoint=kind), folder, max_epochs=2).fit(
                    resumed, loader, ckpt_path=folder / strategy / kind / f"step={step}.ckpt"
                )
                assert len(resumed.losses) == 8 - step
                _assert_same(resumed.losses, whole.losses[step:])
                _assert_same(weights_of(resumed), weights_of(whole) | {"seen": resumed.seen})


def test_dropout_goes_on_where_it_was_on_every_rank(tmp_path):
    strategies = ("scratch_fsdp_zero3", "fsdp2_zero3")
    on_trainer_ranks(_draws, 2, tmp_path, strategies, (2, 4))


def _scaled(rank, world_size, folder):
    for strategy in ("scratch_fsdp_zero3", "fsdp1_zero3"):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
        trainer = _trainer(strategy, folder, plugins=plugins, max_epochs=1)
        trainer.fit(seeded(Regressor), make_loader())
        trainer.save_checkpoint(folder / f"{strategy}.ckpt")
        expected = trainer.precision_plugin.scaler.state_dict()
        assert expected["scale"] == 2.0**11
        plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]
        trainer = _trainer(strategy, folder, plugins=plugins, max_epochs=1)
        trainer.fit(seeded(Regressor), make_loader(), ckpt_path=folder / f"{strategy}.ckpt")
        assert trainer.precision_plugin.scaler.state_dict() == expected


def test_the_scale_of_losses_is_in_the_folder(tmp_path):
    on_trainer_ranks(_scaled, 2, tmp_path)


# -- best checkpoint, deletion, links --------------------------------------------------------------


def _best(strategy, folder, rank):
    kept = folder / "kept"
    keep = ModelCheckpoint(kept, monitor="val_loss", save_top_k=1, mode="max", save_last="link")
    trainer = _trainer(strategy, folder, max_epochs=3, callbacks=[keep], enable_checkpointing=True)
    model, loader = seeded(_Adamw), make_loader(16, seed=1)
    trainer.fit(model, make_loader(), loader)
    assert len([path for path in kept.iterdir() if not path.is_symlink()]) == 1
    assert (kept / "last.ckpt").is_symlink()
    tested = trainer.test(model, loader, ckpt_path="best", verbose=False)
    best = weights_of(model)
    fresh = seeded(_Adamw, seed=8)
    other = _trainer(strategy, folder)
    predicted = other.predict(fresh, loader, ckpt_path=kept / "last.ckpt")
    _assert_same(weights_of(fresh), best)
    validated = other.validate(fresh, loader, ckpt_path=keep.best_model_path, verbose=False)
    return {"tested": tested, "best": best, "predicted": predicted, "validated": validated}


def test_folders_are_kept_deleted_linked_and_evaluated_as_files_are(tmp_path):
    assert_like_ddp(_best, tmp_path, atol=5e-6)


# -- either kind, any engine -----------------------------------------------------------------------


def _across(rank, world_size, folder):
    names = (SHARDED[0], SHARDED[3], SHARDED[4])
    expected = seeded(_Adamw)
    make_trainer("ddp", folder, max_epochs=2).fit(expected, make_loader(16))
    expected = weights_of(expected)
    for writer in names:
        for kind, other in (("sharded", "full"), ("full", "sharded")):
            path = folder / f"{writer}-{kind}.ckpt"
            trainer = make_trainer(with_options(writer, checkpoint=kind), folder)
            trainer.fit(seeded(_Adamw), make_loader(16))
            trainer.save_checkpoint(path)  # after the fit, when the module is whole again
            for reader in names:
                found = seeded(_Adamw, seed=5)
                trainer = make_trainer(with_options(reader, checkpoint=other), folder, max_epochs=2)
                trainer.fit(found, make_loader(16), ckpt_path=path)
                torch.testing.assert_close(
                    weights_of(found),
                    expected,
                    atol=5e-6,
                    rtol=0,
                    msg=lambda text, what=f"{path.name} by {reader}": f"{what}: {text}",
                )


def test_either_kind_is_loaded_by_any_strategy(tmp_path):
    on_trainer_ranks(_across, 2, tmp_path, timeout_s=280)


# -- hooks -----------------------------------------------------------------------------------------


class _Counter(nn.Module):
    """State that is no tensor."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


class _TensorCounter(_Counter):
    """Its state is a tensor, but none that could be filled in place."""

    def get_extra_state(self):
        return torch.tensor([self.count])

    def set_extra_state(self, state):
        self.count = int(state)


class _EditsCheckpoints(_Adamw):
    def __init__(self):
        super().__init__()
        self.counter = _Counter()
        self.tensor_counter = _TensorCounter()

    def on_save_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        state["renamed"] = state.pop("head.weight")
        assert state["renamed"].shape == (3, 7)
        state["dropped"] = state.pop("head.bias")
        checkpoint["note"] = "kept"

    def on_load_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        assert state["renamed"].shape == (3, 7)
        state["head.weight"] = state.pop("renamed")
        del state["dropped"]
        state["head.bias"] = torch.arange(3.0)
        self.note = checkpoint["note"]


class _Computes(_EditsCheckpoints):
    def on_load_checkpoint(self, checkpoint):
        super().on_load_checkpoint(checkpoint)
        checkpoint["state_dict"]["head.weight"] = checkpoint["state_dict"]["head.weight"] + 1


def _edited(strategy, folder, rank):
    trained = seeded(_EditsCheckpoints)
    trained.counter.count = 7
    trained.tensor_counter.count = 8
    trainer = _trainer(strategy, folder)
    trainer.fit(trained, make_loader())
    trainer.save_checkpoint(folder / "edited.ckpt")
    model = seeded(_EditsCheckpoints, seed=4)
    trainer = _trainer(strategy, folder)
    trainer.validate(model, make_loader(), ckpt_path=folder / "edited.ckpt", verbose=False)
    assert model.note == "kept"
    assert model.counter.count == 7
    assert model.tensor_counter.count == 8
    found, expected = weights_of_tensors(model), weights_of_tensors(trained)
    assert found.pop("head.bias").tolist() == [0, 1, 2]
    expected.pop("head.bias")
    _assert_same(found, expected)
    if strategy != "ddp":
        with pytest.raises(RuntimeError, match=r"'head.weight' was computed from an entry"):
            _trainer(strategy, folder).validate(
                _Computes(), make_loader(), ckpt_path=folder / "edited.ckpt", verbose=False
            )
    return {"weights": found}


def weights_of_tensors(module):
    return {n: v.detach().clone() for n, v in module.state_dict().items() if torch.is_tensor(v)}


def test_hooks_rename_drop_and_put_in_and_may_not_compute(tmp_path):
    assert_like_ddp(_edited, tmp_path, atol=5e-6)


def _averaged(rank, world_size, folder):
    for strategy in ("scratch_fsdp_zero3", "fsdp1_zero3", "fsdp2_zero2"):
        keep = ModelCheckpoint(folder / strategy, save_top_k=-1, filename="{epoch}")
        average = lightning_fsdp.ShardedEMA(decay=0.5)
        whole = seeded(Regressor)
        _trainer(
            strategy, folder, callbacks=[keep, average], enable_checkpointing=True, max_epochs=2
        ).fit(whole, make_loader())
        resumed = seeded(Regressor, seed=3)
        path = folder / strategy / "epoch=0.ckpt"
        _trainer(
            strategy, folder, callbacks=[lightning_fsdp.ShardedEMA(decay=0.5)], max_epochs=2
        ).fit(resumed, make_loader(), ckpt_path=path)
        _assert_same(weights_of(resumed), weights_of(whole))


def test_an_average_of_weights_is_saved_beside_them(tmp_path):
    on_trainer_ranks(_averaged, 2, tmp_path)


# -- refusals --------------------------------------------------------------------------------------


class _Wider(Regressor):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(7, 4)


class _Another(Regressor):
    def __init__(self):
        super().__init__()
        self.tail = nn.Linear(3, 3)


class _OtherGroups(_Adamw):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def _wrong(rank, world_size, folder):
    path = folder / "saved.ckpt"
    trainer = _trainer(SHARDED[0], folder)
    trainer.fit(seeded(_Adamw), make_loader())
    trainer.save_checkpoint(path)
    for kind, error, message in (
        (_Wider, RuntimeError, r"'head.weight': saved with shape \(3, 7\), the module's is \(4, 7"),
        (_Another, RuntimeError, r"missing: \['tail.weight', 'tail.bias'\]; unexpected: \['seen'"),
        (_TwoOptimizers, RuntimeError, r"unexpected: \['seen'\]"),
        (_OtherGroups, ValueError, r"expected 1 parameter group\(s\) of optimizer 0, got 2"),
    ):
        with pytest.raises(error, match=message):
            _trainer(SHARDED[4], folder).fit(seeded(kind), make_loader(), ckpt_path=path)
    with pytest.raises(TypeError, match=r"storage_options=.*expected None with checkpoint='shar"):
        trainer.save_checkpoint(path, storage_options={})
    lightning_fsdp.save_sharded(folder / "by-hand", seeded(Regressor))
    with pytest.raises(ValueError, match=r"expected a checkpoint of a Trainer.*load_sharded"):
        trainer.validate(
            seeded(Regressor), make_loader(), ckpt_path=folder / "by-hand", verbose=False
        )


def test_a_folder_of_another_model_is_refused(tmp_path):
    on_trainer_ranks(_wrong, 2, tmp_path)
