"""A run resumed from a full checkpoint is the one of DDP, whichever strategy wrote it."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fsdp import load_sharded
from tests.support.cases import each_on_trainer_ranks
from tests.support.checkpointed import (
    Adamw,
    NoOptimizer,
    PlainSgd,
    TwoOptimizers,
    assert_same_bits,
    comparable,
    resumed_at,
)
from tests.support.trainer import (
    SHARDED,
    AdamwRegressor,
    assert_each_like_ddp,
    assert_like_ddp,
    fit,
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
        trainer, resumed, uninterrupted, _ = resumed_at(at_step, kind, strategy, folder, **options)
        state = trainer.strategy.optimizer_state(trainer.optimizers[0])
        outcome = {
            "uninterrupted": weights_of(uninterrupted),
            "resumed": weights_of(resumed),
            "losses": resumed.losses,
            "step": trainer.global_step,
        }
        if rank == 0:
            outcome["state"] = {str(k): comparable(v) for k, v in state["state"].items()}
        if at_step % 2 == 0:  # at the end of an epoch: the same run, exactly
            assert_same_bits(outcome["resumed"], outcome["uninterrupted"])
        return outcome

    return scenario


# Optimizers with state of each kind, and stops at each kind of place: what is read of the one is
# not asked for the other.
def _resume_at_epoch_end(strategy, folder, rank):
    return _resume(Adamw, at_step=2)(strategy, folder, rank)


def _resume_without_state_mid_epoch(strategy, folder, rank):
    return _resume(PlainSgd, at_step=3, accumulation=2, num_samples=32)(strategy, folder, rank)


def _resume_without_optimizer(strategy, folder, rank):
    trainer = make_trainer(strategy, folder)
    trainer.fit(seeded(NoOptimizer), make_loader(16))
    trainer.save_checkpoint(folder / "none.ckpt")
    model = seeded(NoOptimizer, seed=2)
    trainer = make_trainer(strategy, folder, max_epochs=2)
    trainer.fit(model, make_loader(16), ckpt_path=folder / "none.ckpt")
    return {"weights": weights_of(model)}


@not_under("fsdp1", reason="refuses two optimizers by hand")
def _resume_by_hand(strategy, folder, rank):
    return _resume(TwoOptimizers, at_step=4)(strategy, folder, rank)


class _BeginsAnew(AdamwRegressor):
    def on_load_checkpoint(self, checkpoint):
        checkpoint["optimizer_states"] = []


def _resume_with_a_new_optimizer(strategy, folder, rank):
    outcome = {}
    for form in ("full", "sharded"):
        chosen = with_options(strategy, checkpoint=form)
        trainer = make_trainer(chosen, folder)
        trainer.fit(seeded(AdamwRegressor), make_loader(16))
        trainer.save_checkpoint(folder / f"{form}.ckpt")
        chosen = with_options(strategy, checkpoint=form)
        model, trainer = seeded(_BeginsAnew, seed=2), make_trainer(chosen, folder, max_epochs=2)
        trainer.fit(model, make_loader(16), ckpt_path=folder / f"{form}.ckpt")
        outcome[form] = weights_of(model)
    return outcome


def test_a_resumed_run_is_the_one_of_ddp(tmp_path):
    scenarios = [
        _resume_at_epoch_end,
        _resume_without_state_mid_epoch,
        _resume_without_optimizer,
        _resume_by_hand,
        _resume_with_a_new_optimizer,
    ]
    assert_each_like_ddp(scenarios, tmp_path, atol=5e-6)


def _resume_on_one_rank(strategy, folder, rank):
    trainer, _ = fit(strategy, folder, seeded(AdamwRegressor), make_loader(8))
    trainer.save_checkpoint(folder / "one.ckpt")
    path, model = folder / "one.ckpt", seeded(AdamwRegressor, seed=1)
    return weights_of(fit(strategy, folder, model, make_loader(8), path, max_epochs=2)[1])


def test_so_it_is_on_one_rank(tmp_path):
    sharded = SHARDED[::2]
    assert_like_ddp(_resume_on_one_rank, tmp_path, sharded=sharded, world_size=1)


def _saved_after_an_epoch(strategy, folder, path):
    """Weights at the end of a run, of which a checkpoint was written after the first of two."""
    keep = ModelCheckpoint(path.parent, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    options = {"callbacks": [keep], "enable_checkpointing": True, "max_epochs": 2}
    model = seeded(Adamw)
    make_trainer(strategy, folder, **options).fit(model, make_loader(16))
    return weights_of(model)


def _across(rank, world_size, folder):
    """Files of one strategy, resumed by another, end like a run that never changed."""
    for writer, reader in (("ddp", SHARDED[0]), (SHARDED[0], "ddp"), (SHARDED[1], SHARDED[0])):
        path = folder / f"{writer}-{reader}" / "step=2.ckpt"
        expected = _saved_after_an_epoch(writer, folder, path)
        found = seeded(Adamw, seed=5)
        make_trainer(reader, folder, max_epochs=2).fit(found, make_loader(16), ckpt_path=path)
        torch.testing.assert_close(weights_of(found), expected, atol=5e-6, rtol=1e-5)


def test_a_run_may_change_its_strategy_at_a_checkpoint(tmp_path):
    on_trainer_ranks(_across, 2, tmp_path)


class _OneGroup(Adamw):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def _of_other_groups(rank, world_size, folder):
    trainer = make_trainer("ddp", folder, max_epochs=1)
    trainer.fit(seeded(Adamw), make_loader(16))
    trainer.save_checkpoint(folder / "two.ckpt")
    for strategy in SHARDED[::2]:
        trainer = make_trainer(strategy, folder, max_epochs=2)
        message = r"groups of optimizer 0 with \[15\] parameters.*got \[5, 10\]\. Resume with the"
        with pytest.raises(ValueError, match=message):
            trainer.fit(seeded(_OneGroup), make_loader(16), ckpt_path=folder / "two.ckpt")


def test_other_parameter_groups_are_told_with_their_sizes(tmp_path):
    on_trainer_ranks(_of_other_groups, 2, tmp_path)


def _another_kind(rank, world_size, folder):
    for checkpoint in ("full", "sharded"):
        path = folder / checkpoint
        strategy = with_options(SHARDED[0], checkpoint=checkpoint)
        trainer, _ = fit(strategy, folder, seeded(AdamwRegressor))
        trainer.save_checkpoint(path)
        with pytest.raises(ValueError, match=r"of SGD .* with \['momentum', 'dampening'\], got .*"):
            fit(with_options(SHARDED[0]), folder, seeded(PlainSgd), ckpt_path=path)
    plain = seeded(PlainSgd)
    with pytest.raises(ValueError, match=r"another kind, with \['lr', 'betas', 'eps', 'weight_dec"):
        load_sharded(path, plain, [plain.configure_optimizers()])


def test_an_optimizer_of_another_kind_is_refused_with_what_it_lacks(tmp_path):
    on_trainer_ranks(_another_kind, 2, tmp_path)


class _OtherOrder(Adamw):
    """Numbers its parameters in another way: of two of one shape the second comes first."""

    def __init__(self):
        super().__init__()
        for module in self.modules():
            module._parameters = dict(reversed(module._parameters.items()))


class _OtherNames(Adamw):
    renamed = ("state_dict",)

    def __init__(self):
        super().__init__()
        self.tail = self.head
        del self.head

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.tail(x)

    def on_load_checkpoint(self, checkpoint):
        def new(name):
            return name.replace("head", "tail")

        checkpoint["state_dict"] = {new(n): v for n, v in checkpoint["state_dict"].items()}
        if "names" in self.renamed:
            key = "optimizer_parameter_names"
            checkpoint[key] = [[[*map(new, g)] for g in groups] for groups in checkpoint[key]]


def _by_name(rank, world_size, strategy, folder):
    path = folder / strategy / "step=2.ckpt"
    expected = _saved_after_an_epoch(strategy, folder, path)
    for kind in (_OtherOrder, _OtherNames):
        found = seeded(kind, seed=5)
        trainer = make_trainer(strategy, folder, max_epochs=2)
        if kind is _OtherNames:
            with pytest.raises(ValueError, match=r"only in the optimizer: .*tail.*as we"):
                trainer.fit(found, make_loader(16), ckpt_path=path)
            found.renamed = ("state_dict", "names")
            trainer = make_trainer(strategy, folder, max_epochs=2)
        trainer.fit(found, make_loader(16), ckpt_path=path)
        ours = {name.replace("tail", "head"): value for name, value in weights_of(found).items()}
        torch.testing.assert_close(ours, expected, atol=5e-6, rtol=1e-5)


def test_state_goes_by_name_where_parameters_are_registered_in_another_order(tmp_path):
    each_on_trainer_ranks(_by_name, 2, SHARDED[::2], tmp_path)
