"""A checkpoint that is saved inside of ``training_step``, where weights are whole."""

import functools

import pytest
import torch

from lightning_fsdp import load_sharded
from tests.support.own_parameter import ScaledRegressor
from tests.support.trainer import (
    AdamwRegressor,
    assert_each_like_ddp,
    make_loader,
    make_trainer,
    not_under,
    on_trainer_ranks,
    seeded,
    weights_of,
    with_options,
)


class _SavesInStep(ScaledRegressor, AdamwRegressor):
    """Its own parameter is whole as long as the step lasts."""

    def training_step(self, batch, batch_idx):
        if self.global_step == 2:
            self.trainer.save_checkpoint(self.path)
        return super().training_step(batch, batch_idx)


def _fit(strategy, folder, checkpoint):
    model = seeded(_SavesInStep)
    model.path = folder / "saved"
    strategy = with_options(strategy, checkpoint=checkpoint)
    make_trainer(strategy, folder, max_steps=4).fit(model, make_loader())
    return model


def _saved(checkpoint, strategy, folder, rank):
    trained = _fit(strategy, folder, checkpoint)
    model = _SavesInStep()
    optimizer = model.configure_optimizers()
    if trained.path.is_dir():
        load_sharded(trained.path, model, [optimizer])
    else:
        state = torch.load(trained.path, weights_only=True)
        model.load_state_dict(state["state_dict"])
        optimizer.load_state_dict(state["optimizer_states"][0])
    averages = {n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}
    return {"trained": weights_of(trained), "saved": weights_of(model), "averages": averages}


def test_what_is_saved_in_a_step_is_as_under_ddp(tmp_path):
    full = functools.partial(_saved, "full")
    sharded = functools.partial(_saved, "sharded")
    not_under("fsdp2", reason="torch's state_dict() would take the weights away")(sharded)
    assert_each_like_ddp([full, sharded], tmp_path)


def _save_sharded_under_fsdp2(rank, world_size, folder):
    with pytest.raises(RuntimeError, match=r"inside of one that reads 'scale'.*checkpoint='full'"):
        _fit("fsdp2_zero3", folder, "sharded")


def test_fsdp2_refuses_to_save_shards_in_a_step(tmp_path):
    on_trainer_ranks(_save_sharded_under_fsdp2, 2, tmp_path)
