"""A run resumed from a folder, to which each rank wrote its slices, is the one of DDP."""

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.checkpointed import (
    Adamw,
    NoOptimizer,
    PlainSgd,
    TwoOptimizers,
    assert_same_bits,
    resumed_at,
    sharded_trainer,
)
from tests.support.checkpoints import verified_files
from tests.support.trainer import (
    SHARDED,
    Regressor,
    assert_each_like_ddp,
    make_loader,
    make_trainer,
    not_under,
    on_trainer_ranks,
    seeded,
    weights_of,
    with_options,
)


def _resume(kind, *, at_step, **options):
    def scenario(strategy, folder, rank):
        trainer, resumed, uninterrupted, path = resumed_at(
            at_step, kind, strategy, folder, trainer_of=sharded_trainer, **options
        )
        assert path.is_dir() == (strategy != "ddp")
        outcome = {"resumed": weights_of(resumed), "losses": resumed.losses}
        if at_step % 2 == 0:  # at the end of an epoch: the same run, exactly
            assert_same_bits(outcome["resumed"], weights_of(uninterrupted))
        return outcome | {"step": trainer.global_step}

    return scenario


# Optimizers with state of each kind, and stops at each kind of place: what is read of the one is
# not asked for the other.
def _resume_at_epoch_end(strategy, folder, rank):
    return _resume(Adamw, at_step=2)(strategy, folder, rank)


def _resume_without_state_mid_epoch(strategy, folder, rank):
    return _resume(PlainSgd, at_step=3, accumulation=2, num_samples=32)(strategy, folder, rank)


@not_under("fsdp1", reason="refuses two optimizers by hand")
def _resume_by_hand(strategy, folder, rank):
    return _resume(TwoOptimizers, at_step=4)(strategy, folder, rank)


def _resume_without_optimizer(strategy, folder, rank):
    trainer = sharded_trainer(strategy, folder)
    trainer.fit(seeded(NoOptimizer), make_loader(16))
    trainer.save_checkpoint(folder / "none.ckpt")
    model = seeded(NoOptimizer, seed=2)
    sharded_trainer(strategy, folder, max_epochs=2).fit(
        model, make_loader(16), ckpt_path=folder / "none.ckpt"
    )
    return {"weights": weights_of(model)}


def test_a_run_resumed_from_a_folder_is_the_one_of_ddp(tmp_path):
    scenarios = [
        _resume_at_epoch_end,
        _resume_without_state_mid_epoch,
        _resume_by_hand,
        _resume_without_optimizer,
    ]
    assert_each_like_ddp(scenarios, tmp_path, atol=5e-6)


def _resume_in(precision, saved_in):
    def scenario(strategy, folder, rank):
        path = folder / "run.ckpt"
        trainer = sharded_trainer(strategy, folder, precision=saved_in)
        trainer.fit(seeded(Adamw), make_loader(16))
        trainer.save_checkpoint(path)
        saved = weights_of(trainer.lightning_module)

        def resumed(max_epochs):
            model = seeded(Adamw, seed=9)
            trainer = sharded_trainer(strategy, folder, precision=precision, max_epochs=max_epochs)
            trainer.fit(model, make_loader(16), ckpt_path=path)
            return model

        dtype = {"32-true": torch.float32, "bf16-true": torch.bfloat16}[precision]
        expected = {n: v.to(dtype if v.is_floating_point() else v.dtype) for n, v in saved.items()}
        assert saved["head.weight"].dtype != dtype
        assert_same_bits(weights_of(resumed(max_epochs=1)), expected)  # no step is left
        model = resumed(max_epochs=2)
        return {"weights": weights_of(model), "losses": model.losses}

    return scenario


def _resume_in_bf16(strategy, folder, rank):
    return _resume_in("bf16-true", saved_in="32-true")(strategy, folder, rank)


def _resume_in_fp32(strategy, folder, rank):
    return _resume_in("32-true", saved_in="bf16-true")(strategy, folder, rank)


def test_weights_of_another_dtype_are_converted_as_ddp_does(tmp_path):
    scenarios = [_resume_in_bf16, _resume_in_fp32]
    assert_each_like_ddp(scenarios, tmp_path, atol=2e-2, rtol=2e-2)


def _count_verified(rank, world_size, folder):
    path = folder / "run.ckpt"
    trainer = sharded_trainer(SHARDED[0], folder)
    trainer.fit(seeded(Adamw), make_loader())
    trainer.save_checkpoint(path)
    with verified_files() as names:
        sharded_trainer(SHARDED[4], folder, max_epochs=2).fit(
            seeded(Adamw, seed=9), make_loader(), ckpt_path=path
        )
    return names


def test_a_resume_verifies_each_file_once(tmp_path):
    names = [name for of_rank in on_trainer_ranks(_count_verified, 2, tmp_path) for name in of_rank]
    files = {path.name for path in (tmp_path / "run.ckpt" / "current").iterdir()}
    assert sorted(names) == sorted(files - {"complete.json"})


class _Dropout(Adamw):
    """Draws in every step; the data are always the same, so that nothing else may differ."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return super().forward(self.drop(x))


def _draws(rank, world_size, folder, at_steps):
    loader = DataLoader(TensorDataset(torch.ones(16, 5), torch.ones(16, 3)), batch_size=4)
    for strategy, steps_by_kind in at_steps.items():
        for kind, step in steps_by_kind.items():
            keep = ModelCheckpoint(
                folder / strategy / kind, every_n_train_steps=step, save_top_k=-1, filename="{step}"
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
            resumed = seeded(_Dropout, seed=3)
            make_trainer(with_options(strategy, checkpoint=kind), folder, max_epochs=2).fit(
                resumed, loader, ckpt_path=folder / strategy / kind / f"step={step}.ckpt"
            )
            assert len(resumed.losses) == 4 - step
            assert_same_bits(resumed.losses, whole.losses[step:])
            assert_same_bits(weights_of(resumed), weights_of(whole) | {"seen": resumed.seen})


def test_dropout_goes_on_where_it_was_on_every_rank(tmp_path):
    """In the middle of an epoch and at its end, by each kind of checkpoint and each engine."""
    at_steps = {
        "scratch_fsdp_zero3": {"sharded": 1, "full": 2},
        "fsdp2_zero3": {"sharded": 2, "full": 1},
    }
    on_trainer_ranks(_draws, 2, tmp_path, at_steps)


def _scaled(rank, world_size, folder):
    for strategy in ("scratch_fsdp_zero3", "fsdp1_zero3"):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
        trainer = sharded_trainer(strategy, folder, plugins=plugins, max_epochs=1)
        trainer.fit(seeded(Regressor), make_loader())
        trainer.save_checkpoint(folder / f"{strategy}.ckpt")
        expected = trainer.precision_plugin.scaler.state_dict()
        assert expected["scale"] == 2.0**11
        plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]
        trainer = sharded_trainer(strategy, folder, plugins=plugins, max_epochs=1)
        trainer.fit(seeded(Regressor), make_loader(), ckpt_path=folder / f"{strategy}.ckpt")
        assert trainer.precision_plugin.scaler.state_dict() == expected


def test_the_scale_of_losses_is_in_the_folder(tmp_path):
    on_trainer_ranks(_scaled, 2, tmp_path)
