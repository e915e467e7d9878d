"""A save at an exception that one rank alone raises is refused there, before anything is sent."""

import os
from datetime import timedelta
from unittest import mock

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_fsdp.checkpoint.ranks import LostRankError
from lightning_fsdp.strategies import saves_at_exceptions
from tests.support.ranks import ends_on_ranks
from tests.support.trainer import Regressor, as_torchrun, fit, seeded


class _RaisesAlone(Regressor):
    def on_train_batch_start(self, batch, batch_idx):
        if self.global_step == 2 and self.global_rank == 1:
            raise ZeroDivisionError


class _RaisesAloneBeforeIt(Regressor):
    def setup(self, stage):
        if self.global_rank == 1:
            raise ZeroDivisionError


class _RaisesAloneFirst(Regressor):
    def configure_callbacks(self):  # before the strategy looks for its process group
        if self.global_rank == 1:
            raise ZeroDivisionError
        return []


def _saves_alone(rank, world_size, strategy, kind, folder):
    as_torchrun(rank, world_size)
    callback = ModelCheckpoint(folder, save_on_exception=True, every_n_epochs=100)
    if kind is not _RaisesAlone:
        callback = OnExceptionCheckpoint(folder / "saved")  # the other waits for a step
    options = {"callbacks": [callback], "enable_checkpointing": True}
    try:
        with mock.patch.object(saves_at_exceptions, "LIMIT", timedelta(seconds=0.5)):
            fit(strategy, folder, seeded(kind), **options)
    except LostRankError as error:
        raised = error.__cause__.__context__
        (folder / "told").write_text(f"{type(raised).__name__}; {error}")
        os._exit(1)  # what the others hear of, with the connections that end


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("scratch_fsdp_zero3", _RaisesAlone),
        ("scratch_fsdp_zero3", _RaisesAloneBeforeIt),
        ("scratch_fsdp_zero3", _RaisesAloneFirst),
        ("fsdp1_zero3", _RaisesAlone),
        ("fsdp2_zero2", _RaisesAlone),
    ],
)
def test_a_rank_that_raises_alone_saves_nothing_and_waits_for_nobody(tmp_path, strategy, kind):
    assert ends_on_ranks(_saves_alone, 2, strategy, kind, tmp_path) == ["RuntimeError", "died"]
    told = (tmp_path / "told").read_text()
    assert "ZeroDivisionError; checkpoint at an exception (rank 1 of 2): expected every" in told
    assert not list(tmp_path.glob("*.ckpt"))
