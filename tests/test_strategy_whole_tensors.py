"""Optimizers over whole tensors under the strategies, against DDP."""

import pytest
import torch

from lightning_fsdp import FSDP1Strategy, FSDP2Strategy, ScratchFSDPStrategy
from tests.support.checkpointed import TwoOptimizers
from tests.support.optimizers import Normed
from tests.support.parity import assert_same_tensors
from tests.support.trainer import (
    Regressor,
    assert_like_ddp,
    make_loader,
    make_trainer,
    not_under,
    on_trainer_ranks,
    seeded,
    weights_of,
)


class Mixed(Regressor):
    """One optimizer, of which some groups step slices; a schedule."""

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.ndim == 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        optimizer = Normed(
            [{"params": matrices}, {"params": vectors, "elementwise": True, "lr": 0.02}], lr=0.05
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Adafactor(Regressor):
    def configure_optimizers(self):
        return torch.optim.Adafactor(self.parameters(), lr=0.02)


class MuonBesideAdamW(TwoOptimizers):
    def configure_optimizers(self):
        matrices = [p for p in self.blocks.parameters() if p.ndim == 2]
        ids = set(map(id, matrices))
        others = [p for p in self.parameters() if id(p) not in ids]
        # Large, so that a last bit of the gradient is a last bit of the step.
        return [
            torch.optim.Muon(matrices, lr=0.01, eps=1.0),
            torch.optim.AdamW(others, lr=0.01, eps=1e-3),
        ]


def _outcome(module):
    return {"weights": weights_of(module), "losses": list(module.losses)}


def _mixed(strategy, folder, rank):
    module = seeded(Mixed)
    trainer = make_trainer(
        strategy, folder, max_epochs=2, gradient_clip_val=0.5, accumulate_grad_batches=2
    )
    trainer.fit(module, make_loader())
    steps = trainer.optimizers[0].num_steps
    assert steps == trainer.global_step == trainer.optimizers[0].param_groups[0]["steps"] > 2
    return {**_outcome(module), "lr": [g["lr"] for g in trainer.optimizers[0].param_groups]}


def _adafactor(strategy, folder, rank):
    module = seeded(Adafactor)
    make_trainer(strategy, folder).fit(module, make_loader())
    return _outcome(module)


@not_under("fsdp1", reason="refuses two optimizers by hand")
def _muon(strategy, folder, rank):
    module = seeded(MuonBesideAdamW)
    make_trainer(strategy, folder).fit(module, make_loader())
    return _outcome(module)


@pytest.mark.parametrize(("scenario", "atol"), [(_mixed, 1e-5), (_adafactor, 1e-5), (_muon, 1e-3)])
def test_whole_tensors_train_as_under_ddp(scenario, atol, tmp_path):
    assert_like_ddp(scenario, tmp_path, atol=atol, rtol=1e-4)


# What writes; DDP reads files.
WRITERS = {
    "ddp": lambda: "ddp",
    "scratch": lambda: ScratchFSDPStrategy(zero_stage=2),
    "scratch slices": lambda: ScratchFSDPStrategy(checkpoint="sharded"),
    "fsdp1": FSDP1Strategy,
    "fsdp1 slices": lambda: FSDP1Strategy(checkpoint="sharded"),
    "fsdp2": FSDP2Strategy,
    "fsdp2 slices": lambda: FSDP2Strategy(checkpoint="sharded"),
}
# A file is the same whoever writes it, and so is a folder but for where slices end: each is read by
# two or more, each reader reads both kinds from two or more, and each what it has written itself.
READERS = {
    "ddp": ("ddp", "scratch", "fsdp1", "fsdp2"),
    "scratch": ("ddp", "scratch", "fsdp2"),
    "scratch slices": ("scratch", "fsdp1"),
    "fsdp1": ("scratch", "fsdp1"),
    "fsdp1 slices": ("fsdp1", "fsdp2"),
    "fsdp2": ("fsdp1", "fsdp2"),
    "fsdp2 slices": ("fsdp2", "scratch"),
}


def _write_and_read(rank, world_size, folder):
    for name, strategy in WRITERS.items():
        trainer = make_trainer(strategy(), folder / name, max_epochs=1)
        trainer.fit(seeded(Mixed), make_loader(16))
        trainer.save_checkpoint(folder / f"{name}.ckpt")
    outcomes = {}
    for source, names in READERS.items():
        for name in names:
            module = seeded(Mixed, seed=7)
            trainer = make_trainer(WRITERS[name](), folder / f"{source} {name}", max_epochs=2)
            trainer.fit(module, make_loader(16), ckpt_path=folder / f"{source}.ckpt")
            assert trainer.optimizers[0].param_groups[0]["steps"] == trainer.global_step
            outcomes[source, name] = weights_of(module)
    return outcomes


def test_checkpoints_move_between_engines_and_plain_training(tmp_path):
    found = on_trainer_ranks(_write_and_read, 2, tmp_path, timeout_s=280)
    expected = found[0]["ddp", "ddp"]
    for outcomes in found:
        for case, weights in outcomes.items():
            assert_same_tensors(weights, expected, atol=1e-5, what=str(case))
