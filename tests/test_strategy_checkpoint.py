"""Full checkpoints: what is in the file, who can read it, and what hooks make of it."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn

from tests.support.checkpointed import Adamw, NoOptimizer, PlainSgd, TwoOptimizers, comparable
from tests.support.trainer import (
    SHARDED,
    Regressor,
    assert_each_like_ddp,
    assert_like_ddp,
    at_both_stages,
    make_loader,
    make_trainer,
    not_under,
    on_trainer_ranks,
    seeded,
    weights_of,
    with_options,
)

pytestmark = pytest.mark.usefixtures("kept_ranks")


def _whole(checkpoint):
    """A checkpoint file in comparable form."""
    return {
        "state_dict": checkpoint["state_dict"],
        "optimizers": [
            {**state, "state": {str(k): v for k, v in state.get("state", {}).items()}}
            for state in checkpoint["optimizer_states"]
        ],
        "schedules": [{"last_epoch": s["last_epoch"]} for s in checkpoint.get("lr_schedulers", [])],
    }


def _saved(kind):
    def scenario(strategy, folder, rank):
        model = seeded(kind)
        keep = ModelCheckpoint(
            folder, filename="during", every_n_epochs=1, save_on_train_epoch_end=True
        )
        trainer = make_trainer(
            strategy, folder, max_epochs=2, callbacks=[keep], enable_checkpointing=True
        )
        trainer.fit(model, make_loader(16))
        trainer.save_checkpoint(folder / "after.ckpt")  # the module is whole again by now
        files = [
            torch.load(folder / f"{name}.ckpt", weights_only=True) for name in ("during", "after")
        ]
        for file in files:
            assert list(file["state_dict"]) == list(model.state_dict())
            for value in file["state_dict"].values():
                assert type(value) is torch.Tensor
        return {"files": [comparable(_whole(file)) for file in files]}

    return scenario


def _saved_adamw(strategy, folder, rank):
    return _saved(Adamw)(strategy, folder, rank)


def _saved_sgd(strategy, folder, rank):
    return _saved(PlainSgd)(strategy, folder, rank)


def _saved_none(strategy, folder, rank):
    return _saved(NoOptimizer)(strategy, folder, rank)


@not_under("fsdp1", reason="refuses two optimizers by hand")
def _saved_two(strategy, folder, rank):
    return _saved(TwoOptimizers)(strategy, folder, rank)


def test_the_file_holds_what_ddp_saves(tmp_path):
    scenarios = [_saved_adamw, _saved_sgd, _saved_none, _saved_two]
    assert_each_like_ddp(scenarios, tmp_path, atol=5e-6)


def test_the_file_of_one_rank_where_fsdp1_shards_nothing_holds_what_ddp_saves(tmp_path):
    assert_like_ddp(_saved_adamw, tmp_path, world_size=1, atol=5e-6)


def _best(strategy, folder, rank):
    keep = ModelCheckpoint(folder / "kept", monitor="val_loss", save_top_k=2, save_last=True)
    trainer = make_trainer(
        strategy, folder, max_epochs=3, callbacks=[keep], enable_checkpointing=True
    )
    model = seeded(Adamw)
    loader = make_loader(16, seed=1)
    trainer.fit(model, make_loader(), loader)
    tested = trainer.test(model, loader, ckpt_path="best", verbose=False)
    best = weights_of(model)
    predicted = trainer.predict(model, loader, ckpt_path=keep.last_model_path)
    validated = trainer.validate(ckpt_path="best", dataloaders=loader, verbose=False)
    assert len(list((folder / "kept").glob("*.ckpt"))) == 3

    plain = Adamw.load_from_checkpoint(keep.best_model_path)
    torch.testing.assert_close(weights_of(plain), best, atol=0, rtol=0)
    assert plain.blocks[1].up.weight is plain.blocks[0].up.weight
    batch = next(iter(make_loader(4, seed=3)))
    return {
        "score": keep.best_model_score,
        "tested": tested,
        "validated": validated,
        "predicted": predicted,
        "best": best,
        "plain": plain(batch[0]).detach(),
    }


def test_the_best_checkpoint_is_tested_and_loads_in_plain_torch(tmp_path):
    assert_like_ddp(_best, tmp_path, atol=5e-6)


class _EditsCheckpoints(Regressor):
    """Renames in the file and back; drops an entry; stores something that is not a primitive."""

    def on_save_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        state["renamed"] = state.pop("head.bias")
        assert state["renamed"].shape == (3,)
        checkpoint["note"] = _Note("kept")

    def on_load_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        state["head.bias"] = state.pop("renamed") + 1
        self.note = checkpoint["note"].text


class _Note:
    def __init__(self, text):
        self.text = text


def _edited(strategy, folder, rank):
    trainer = make_trainer(strategy, folder)
    trainer.fit(seeded(_EditsCheckpoints), make_loader())
    trainer.save_checkpoint(folder / "edited.ckpt")
    during = ModelCheckpoint(folder, filename="during")
    trainer = make_trainer(strategy, folder, callbacks=[during], enable_checkpointing=True)
    trainer.fit(seeded(_EditsCheckpoints), make_loader())
    weights = []
    for name in ("edited", "during"):
        model = seeded(_EditsCheckpoints, seed=4)
        trainer = make_trainer(strategy, folder, max_epochs=1)
        trainer.validate(
            model,
            make_loader(),
            ckpt_path=folder / f"{name}.ckpt",
            weights_only=False,
            verbose=False,
        )
        assert model.note == "kept"
        weights.append(weights_of(model))
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        trainer.validate(model, make_loader(), ckpt_path=folder / "edited.ckpt", verbose=False)
    model = seeded(_EditsCheckpoints, seed=4)
    trainer = make_trainer(strategy, folder, max_epochs=2)
    trainer.fit(model, make_loader(), ckpt_path=folder / "during.ckpt", weights_only=False)
    assert trainer.global_step == 8
    weights.append(weights_of(model))
    return {"weights": weights}


def test_hooks_may_edit_checkpoints_on_every_rank_and_weights_only_is_obeyed(tmp_path):
    assert_like_ddp(_edited, tmp_path)


class _LoadsLoosely(Regressor):
    """Saves only what it trains, as adapters do."""

    def __init__(self):
        super().__init__()
        self.strict_loading = False
        self.blocks.requires_grad_(False)

    def state_dict(self):  # without arguments, as in Lightning's documentation
        state = super().state_dict()
        return {name: value for name, value in state.items() if not name.startswith("blocks")}


def _loose(strategy, folder, rank):
    keep = ModelCheckpoint(folder, filename="loose")
    trainer = make_trainer(strategy, folder, callbacks=[keep], enable_checkpointing=True)
    trainer.fit(seeded(_LoadsLoosely), make_loader())
    file = torch.load(folder / "loose.ckpt", weights_only=True)
    assert sorted(file["state_dict"]) == ["head.bias", "head.weight", "inlet.bias", "inlet.weight"]
    model = seeded(_LoadsLoosely)
    make_trainer(strategy, folder, max_epochs=2).fit(
        model, make_loader(), ckpt_path=folder / "loose.ckpt"
    )
    return {"weights": {n: p.detach() for n, p in model.named_parameters()}}


def test_a_module_that_saves_only_part_of_itself_is_obeyed(tmp_path):
    assert_like_ddp(_loose, tmp_path)


class _LogsPerRank(Regressor):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss_here", loss.detach())
        return loss


def _named_by_each_rank(strategy, folder, rank):
    keep = ModelCheckpoint(folder, filename="{loss_here:.6f}")
    trainer = make_trainer(strategy, folder, callbacks=[keep], enable_checkpointing=True)
    trainer.fit(seeded(_LogsPerRank), make_loader())
    (path,) = folder.glob("*.ckpt")
    if rank == 0:
        assert path.name == f"loss_here={trainer.callback_metrics['loss_here']:.6f}.ckpt"
    return {"weights": torch.load(path, weights_only=True)["state_dict"]}


def test_a_name_that_differs_by_rank_is_that_of_rank_0(tmp_path):
    assert_like_ddp(_named_by_each_rank, tmp_path)


class _CountingIO(TorchCheckpointIO):
    def __init__(self):
        self.saved = []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.saved.append(storage_options)
        super().save_checkpoint(checkpoint, path, storage_options)


def _custom_io(rank, world_size, folder):
    others = "fsdp1_zero3", "fsdp2_zero2", with_options(SHARDED[0], accumulation="sum")
    for strategy in (*SHARDED[:2], *others):
        io = _CountingIO()
        trainer = make_trainer(strategy, folder, plugins=[io])
        trainer.fit(seeded(Regressor), make_loader(16))
        trainer.save_checkpoint(folder / "io.ckpt")
        trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
        assert len(io.saved) == (2 if rank == 0 else 0)
        file = torch.load(folder / "weights.ckpt", weights_only=True)
        assert "optimizer_states" not in file
        assert "head.weight" in file["state_dict"]


def test_the_users_checkpoint_io_writes_on_rank_0(tmp_path):
    on_trainer_ranks(_custom_io, 2, tmp_path)


def _wrong_file(rank, world_size, folder):
    path = folder / "two.ckpt"
    trainer = make_trainer(SHARDED[0], folder)
    trainer.fit(seeded(TwoOptimizers), make_loader())
    trainer.save_checkpoint(path)
    with pytest.raises(ValueError, match=r"expected the state of 1 optimizer\(s\).*got 2"):
        make_trainer(SHARDED[0], folder).fit(seeded(Regressor), make_loader(), ckpt_path=path)
    model = seeded(Regressor)
    model.head = nn.Linear(7, 4)
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.weight"):
        make_trainer(SHARDED[0], folder).validate(
            model, make_loader(), ckpt_path=path, verbose=False
        )


def test_a_file_of_another_model_is_refused(tmp_path):
    on_trainer_ranks(_wrong_file, 2, tmp_path)


def _empty_init(strategy, folder, rank):
    trainer = make_trainer(strategy, folder)
    torch.manual_seed(3)
    with trainer.init_module(empty_init=strategy != "ddp"):
        model = Regressor()
    trainer.fit(model, make_loader())
    return {"weights": weights_of(model), "losses": model.losses}


def test_a_module_built_under_empty_init_is_initialised(tmp_path):
    assert_like_ddp(_empty_init, tmp_path)


class _WatchesDuringFit(pl.Callback):
    """Saves by hand in the middle of a fit, from every rank."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/by_hand.ckpt")


@at_both_stages
def _saved_by_hand(strategy, folder, rank):
    model = seeded(Adamw)
    make_trainer(strategy, folder, callbacks=[_WatchesDuringFit()]).fit(model, make_loader())
    file = torch.load(folder / "by_hand.ckpt", weights_only=True)
    return {"file": comparable(_whole(file)), "end": weights_of(model)}


def test_saving_by_hand_in_the_middle_of_a_fit_disturbs_nothing(tmp_path):
    assert_like_ddp(_saved_by_hand, tmp_path, atol=5e-6)


class _WatchesEvaluations(pl.Callback):
    """Saves by hand inside of one."""

    def on_predict_end(self, trainer, module):
        trainer.save_checkpoint(f"{trainer.default_root_dir}/predict.ckpt")

    def on_validation_epoch_end(self, trainer, module):
        if trainer.state.fn == "validate":
            trainer.save_checkpoint(f"{trainer.default_root_dir}/validate.ckpt")


def _saved_in_evaluations(strategy, folder, rank):
    model, outcome = seeded(Adamw), {}
    trainer = make_trainer(strategy, folder, callbacks=[_WatchesEvaluations()])
    trainer.fit(model, make_loader())
    trainer.validate(model, make_loader(16), verbose=False)
    trainer.predict(model, make_loader(16))
    trainer.save_checkpoint(folder / "after.ckpt")
    for name in ("validate", "predict", "after"):
        outcome[name] = comparable(_whole(torch.load(folder / f"{name}.ckpt", weights_only=True)))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, make_loader())
    return {**outcome, "end": weights_of(model)}


def _resumed_from_evaluations(strategy, folder, rank):
    trainer = make_trainer(
        with_options(strategy, checkpoint="sharded"), folder, callbacks=[_WatchesEvaluations()]
    )
    trainer.fit(seeded(Adamw), make_loader())
    trainer.validate(trainer.lightning_module, make_loader(16), verbose=False)
    resumed = seeded(Adamw, seed=1)
    again = make_trainer(strategy, folder, max_epochs=2)
    again.fit(resumed, make_loader(), ckpt_path=folder / "validate.ckpt")
    return {"end": weights_of(resumed)}


def test_saving_by_hand_in_an_evaluation_saves_the_optimizers_of_the_fit_before(tmp_path):
    scenarios = [_saved_in_evaluations, _resumed_from_evaluations]
    assert_each_like_ddp(scenarios, tmp_path, atol=5e-6)
