"""What each rank of ``tests/test_hosts.py`` does: ``python -m tests.support.on_hosts WHAT FOLDER``.

torchrun starts the ranks; or, where a third argument names the host, its ranks are forked here, so
that what they import is imported once.

================ ================================================================================
``whole``        trains, and writes weights; then trains again, with checkpoints, until the other
                 host is gone
``resumed``      goes on from a checkpoint of that, and writes weights
================ ================================================================================
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import torch

from lightning_fsdp import ScratchFSDPStrategy
from tests.support.hosts import PORT, Hosts
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


def resumed(folder):
    path = folder / "kept" / f"step={LAST_STEP}.ckpt"
    model = _drop(folder, seed=1 + int(os.environ["RANK"]), ckpt_path=path)
    _write(folder, "resumed", model)


def _fork_ranks(host):
    """Return on each rank of a host, which is told what torchrun tells; exit where all began."""
    pids, world_size = [], NUM_HOSTS * NUM_RANKS
    place = {"host": host, "num_hosts": NUM_HOSTS, "address": Hosts.address(0), "port": PORT}
    for rank in range(NUM_RANKS * host, NUM_RANKS * (host + 1)):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ.update(told_by_torchrun(rank, world_size, **place))
            return
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids))


if __name__ == "__main__":
    what, folder, *on_host = sys.argv[1:]
    torch.set_num_threads(1)
    if on_host:
        _fork_ranks(int(on_host[0]))
    strict_warnings()
    {"whole": whole, "resumed": resumed}[what](Path(folder))
