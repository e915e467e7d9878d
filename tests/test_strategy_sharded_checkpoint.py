"""``checkpoint="sharded"``: what hooks, averages and other strategies make of a folder."""

import warnings

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torchmetrics import MeanMetric

import lightning_fsdp
from tests.support.checkpointed import Adamw, TwoOptimizers, assert_same_bits, sharded_trainer
from tests.support.trainer import (
    SHARDED,
    Regressor,
    assert_like_ddp,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
    weights_of,
    with_options,
)


def _best(strategy, folder, rank):
    kept = folder / "kept"
    keep = ModelCheckpoint(kept, monitor="val_loss", save_top_k=1, mode="max", save_last="link")
    trainer = sharded_trainer(
        strategy, folder, max_epochs=3, callbacks=[keep], enable_checkpointing=True
    )
    model, loader = seeded(Adamw), make_loader(16, seed=1)
    trainer.fit(model, make_loader(), loader)
    assert len([path for path in kept.iterdir() if not path.is_symlink()]) == 1
    assert (kept / "last.ckpt").is_symlink()
    tested = trainer.test(model, loader, ckpt_path="best", verbose=False)
    best = weights_of(model)
    fresh = seeded(Adamw, seed=8)
    other = sharded_trainer(strategy, folder)
    predicted = other.predict(fresh, loader, ckpt_path=kept / "last.ckpt")
    assert_same_bits(weights_of(fresh), best)
    validated = other.validate(fresh, loader, ckpt_path=keep.best_model_path, verbose=False)
    return {"tested": tested, "best": best, "predicted": predicted, "validated": validated}


def test_folders_are_kept_deleted_linked_and_evaluated_as_files_are(tmp_path):
    assert_like_ddp(_best, tmp_path, atol=5e-6)


class _BestIsTheSecond(Adamw):
    def on_validation_epoch_end(self):
        self.log("from_best", abs(self.current_epoch - 1.0), sync_dist=True)


def _saved_where_a_link_was(strategy, folder, rank):
    """The resumed run's first epoch is none of the best, to which a link would be made."""
    last, loader = folder / "kept" / "last.ckpt", make_loader(16, seed=1)

    def fit(max_epochs, **resumed):
        keep = ModelCheckpoint(last.parent, monitor="from_best", save_last="link")
        options = {"callbacks": [keep], "enable_checkpointing": True, "max_epochs": max_epochs}
        model = seeded(_BestIsTheSecond)
        sharded_trainer(strategy, folder, **options).fit(model, make_loader(), loader, **resumed)
        return weights_of(model)

    best, linked = fit(2), last.with_name(last.readlink().name)
    ended = fit(3, ckpt_path=last)
    found = []
    for path in (linked, last):
        assert not path.is_symlink()
        model = seeded(_BestIsTheSecond, seed=8)
        sharded_trainer(strategy, folder).validate(model, loader, ckpt_path=path, verbose=False)
        found.append(weights_of(model))
    assert_same_bits(found, [best, ended])
    return {"found": found}


def test_a_link_to_the_best_is_replaced_by_the_last_as_under_ddp(tmp_path):
    assert_like_ddp(_saved_where_a_link_was, tmp_path, atol=5e-6)


def _last_of_another_kind(rank, world_size, folder):
    warnings.filterwarnings("ignore", "The dirpath has changed")
    for kind, other, word in (("sharded", "full", "file"), ("full", "sharded", "folder")):
        kept = folder / kind

        def trainer(kind, dirpath=kept, **options):
            keep = ModelCheckpoint(dirpath, save_last=True)
            strategy = with_options("scratch_fsdp", checkpoint=kind)
            options = {"callbacks": [keep], "enable_checkpointing": True, **options}
            return make_trainer(strategy, folder, **options)

        trainer(kind, max_epochs=1).fit(seeded(Adamw), make_loader(16))
        last = {"ckpt_path": kept / "last.ckpt"}
        with pytest.raises(ValueError, match=f"expected a {word}, as this strategy saves"):
            trainer(other, max_epochs=2).fit(seeded(Adamw), make_loader(16), **last)
        trainer(other, folder / f"then {other}", max_epochs=2).fit(
            seeded(Adamw), make_loader(16), **last
        )
        trainer(kind, max_epochs=2).fit(seeded(Adamw), make_loader(16), **last)


def test_the_last_checkpoint_is_not_replaced_by_one_of_another_kind(tmp_path):
    on_trainer_ranks(_last_of_another_kind, 2, tmp_path)


def _across(rank, world_size, folder):
    names = (SHARDED[0], SHARDED[3], SHARDED[4])
    expected = seeded(Adamw)
    make_trainer("ddp", folder, max_epochs=2).fit(expected, make_loader(16))
    expected = weights_of(expected)
    for writer in names:
        for kind, other in (("sharded", "full"), ("full", "sharded")):
            path = folder / f"{writer}-{kind}.ckpt"
            trainer = make_trainer(with_options(writer, checkpoint=kind), folder)
            trainer.fit(seeded(Adamw), make_loader(16))
            trainer.save_checkpoint(path)  # after the fit, when the module is whole again
            for reader in [name for name in names if name != writer]:
                found = seeded(Adamw, seed=5)
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


def _copy(module, state, prefix, metadata):
    for name in [f"{prefix}weight", f"{prefix}bias"]:
        state[name] = state[name].clone()


class _EditsCheckpoints(Adamw):
    def __init__(self):
        super().__init__()
        self.counter = _Counter()
        self.tensor_counter = _TensorCounter()
        self.metric = MeanMetric()  # its state dict holds copies
        self.metric.persistent(True)
        self.inlet.register_state_dict_post_hook(_copy)

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
    trained.metric.update(9.0)
    trainer = sharded_trainer(strategy, folder)
    trainer.fit(trained, make_loader())
    trainer.save_checkpoint(folder / "edited.ckpt")
    model = seeded(_EditsCheckpoints, seed=4)
    trainer = sharded_trainer(strategy, folder)
    trainer.validate(model, make_loader(), ckpt_path=folder / "edited.ckpt", verbose=False)
    assert model.note == "kept"
    assert model.counter.count == 7
    assert model.tensor_counter.count == 8
    found, expected = weights_of_tensors(model), weights_of_tensors(trained)
    assert found.pop("head.bias").tolist() == [0, 1, 2]
    expected.pop("head.bias")
    assert_same_bits(found, expected)
    if strategy != "ddp":
        with pytest.raises(RuntimeError, match=r"'head.weight' was computed from an entry"):
            sharded_trainer(strategy, folder).validate(
                _Computes(), make_loader(), ckpt_path=folder / "edited.ckpt", verbose=False
            )
    return {"weights": found}


def weights_of_tensors(module):
    return {n: v.detach().clone() for n, v in module.state_dict().items() if torch.is_tensor(v)}


def test_hooks_rename_drop_and_put_in_and_may_not_compute(tmp_path):
    assert_like_ddp(_edited, tmp_path, atol=5e-6)


def _double(module, state, prefix, metadata):
    state[f"{prefix}bias"] = state[f"{prefix}bias"] * 2


def _doubled(rank, world_size, folder):
    for strategy, kind in (("fsdp1_zero3", "sharded"), ("fsdp2_zero3", "full")):
        model = seeded(Regressor)
        model.inlet.register_state_dict_post_hook(_double)
        model.on_train_end = lambda: trainer.save_checkpoint(folder / "doubled.ckpt")  # noqa: B023
        trainer = make_trainer(with_options(strategy, checkpoint=kind), folder)
        with pytest.raises(RuntimeError, match=r"'inlet\.bias': expected a parameter in"):
            trainer.fit(model, make_loader())


def test_a_hook_that_computes_with_pieces_is_refused(tmp_path):
    on_trainer_ranks(_doubled, 1, tmp_path)


class _SavesTwice(Regressor):
    """Of another state dict, the name is that of the module's tensors in a folder."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["model"] = {name: 2 * p.detach() for name, p in self.named_parameters()}


def _averaged(rank, world_size, folder):
    for strategy in ("scratch_fsdp_zero3", "fsdp1_zero3", "fsdp2_zero2"):
        keep = ModelCheckpoint(folder / strategy, save_top_k=-1, filename="{epoch}")
        average = lightning_fsdp.ShardedEMA(decay=0.5)
        kind = _SavesTwice if strategy == "scratch_fsdp_zero3" else Regressor
        whole = seeded(kind)
        sharded_trainer(
            strategy, folder, callbacks=[keep, average], enable_checkpointing=True, max_epochs=2
        ).fit(whole, make_loader())
        resumed = seeded(kind, seed=3)
        path = folder / strategy / "epoch=0.ckpt"
        sharded_trainer(
            strategy, folder, callbacks=[lightning_fsdp.ShardedEMA(decay=0.5)], max_epochs=2
        ).fit(resumed, make_loader(), ckpt_path=path)
        assert_same_bits(weights_of(resumed), weights_of(whole))


def test_an_average_of_weights_is_saved_beside_them(tmp_path):
    on_trainer_ranks(_averaged, 2, tmp_path)


class _Wider(Regressor):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(7, 4)


class _Another(Regressor):
    def __init__(self):
        super().__init__()
        self.tail = nn.Linear(3, 3)


class _OtherGroups(Adamw):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def _wrong(rank, world_size, folder):
    path = folder / "saved.ckpt"
    trainer = sharded_trainer(SHARDED[0], folder)
    trainer.fit(seeded(Adamw), make_loader())
    trainer.save_checkpoint(path)
    for kind, error, message in (
        (_Wider, RuntimeError, r"'head.weight': saved with shape \(3, 7\), the module's is \(4, 7"),
        (_Another, RuntimeError, r"missing: \['tail.weight', 'tail.bias'\]; unexpected: \['seen'"),
        (TwoOptimizers, RuntimeError, r"unexpected: \['seen'\]"),
        (_OtherGroups, ValueError, r"expected 1 parameter group\(s\) of optimizer 0, got 2"),
    ):
        with pytest.raises(error, match=message):
            sharded_trainer(SHARDED[4], folder).fit(seeded(kind), make_loader(), ckpt_path=path)
    with pytest.raises(TypeError, match=r"storage_options=.*expected None with checkpoint='shar"):
        trainer.save_checkpoint(path, storage_options={})
    lightning_fsdp.save_sharded(folder / "by-hand", seeded(Regressor))
    with pytest.raises(ValueError, match=r"expected a checkpoint of a Trainer.*load_sharded"):
        trainer.validate(
            seeded(Regressor), make_loader(), ckpt_path=folder / "by-hand", verbose=False
        )


def test_a_folder_of_another_model_is_refused(tmp_path):
    on_trainer_ranks(_wrong, 2, tmp_path)
