"""Replicas of a model, each sharded over some of the ranks, train as all ranks together."""

import torch

from tests.support.trainer import (
    SHARDED,
    Regressor,
    assert_like_ddp,
    make_loader,
    make_trainer,
    seeded,
    weights_of,
    with_options,
)


def _outcome(strategy, folder, kind=Regressor, options=None, **trainer_options):
    model = seeded(kind)
    strategy = with_options(strategy, **{"shard_size": 2, **(options or {})})
    trainer = make_trainer(strategy, folder, max_epochs=2, **trainer_options)
    trainer.fit(model, make_loader(40))
    assert getattr(trainer.strategy, "num_replicas", 2) == 2
    metrics = {name: value.clone() for name, value in trainer.callback_metrics.items()}
    losses = torch.stack(model.losses)
    return {"losses": losses, "metrics": metrics, "weights": weights_of(model)}


def _plain(strategy, folder, rank):
    return _outcome(strategy, folder)


def test_every_engine_and_stage_has_the_losses_of_ddp(tmp_path):
    assert_like_ddp(_plain, tmp_path, sharded=SHARDED, world_size=4)
