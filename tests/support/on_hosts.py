"""What each rank of ``tests/test_hosts.py`` does: ``python -m tests.support.on_hosts FOLDER``.

torchrun starts the ranks that train ``whole``, and write weights; then again, with checkpoints,
until the other host is gone. Those that go on from such a checkpoint are forked from a process
that has torch.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import torch

from lightning_fsdp import ScratchFSDPStrategy
from tests.support.processes import told_by_torchrun
from tests.support.resumed import keep_checkpoints, run_dropping
from tests.support.trainer import (
    Regressor,
    make_loader,
    make_trainer,
    seeded,
    strict_warnings,
    weights_of,
)

TIMEOUT_S = 8.0
NUM_HOSTS, NUM_RANKS = 2, 2  # on each
LAST_STEP = 2  # before a host is gone


class UntilCut(pl.Callback):
    """Says that a checkpoint is there, and goes on when a host is gone."""

    def __init__(self, folder):
        self._folder = folder

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == LAST_STEP:
            (self._folder / f"waits{trainer.global_rank}").touch()
            while not (self._folder / "cut").exists():
                time.sleep(0.02)


def _strategy():
    return ScratchFSDPStrategy(shard_size="host", timeout=timedelta(seconds=TIMEOUT_S))


def _options():
    return {"devices": NUM_RANKS, "num_nodes": NUM_HOSTS}


def _drop(folder, **options):
    return run_dropping(_strategy(), folder, max_epochs=2, **_options(), **options)


def _write(folder, name, model):
    torch.save(weights_of(model), folder / f"{name}{os.environ['RANK']}.pt")


def whole(folder):
    model = seeded(Regressor)
    trainer = make_trainer(_strategy(), folder, max_epochs=2, **_options())
    trainer.fit(model, make_loader(32, batch_size=2))
    grid = trainer.strategy.engine.grid.mesh.mesh.tolist()
    (folder / f"grid{os.environ['RANK']}").write_text(str(grid))
    _write(folder, "values", model)
    _write(folder, "whole", _drop(folder))
    callbacks = [keep_checkpoints(folder), UntilCut(folder)]
    _drop(folder, callbacks=callbacks, enable_checkpointing=True)


def resumed(rank, world_size, folder):
    place = {"host": rank // NUM_RANKS, "num_hosts": NUM_HOSTS}
    os.environ.update(told_by_torchrun(rank, world_size, port=29500, **place))
    path = folder / "kept" / f"step={LAST_STEP}.ckpt"
    strict_warnings()
    return weights_of(_drop(folder, seed=1 + rank, ckpt_path=path))


if __name__ == "__main__":
    torch.set_num_threads(1)
    strict_warnings()
    whole(Path(sys.argv[1]))
