"""Modules whose optimizers keep state of several kinds, or none, and runs of them that are resumed
from a checkpoint.
"""

import warnings

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.trainer import Regressor, make_loader, make_trainer, seeded, with_options


class Adamw(Regressor):
    """State of two kinds per parameter, two groups, a schedule, a tied weight and a buffer."""

    def __init__(self, lr=0.01):
        super().__init__(lr=lr)
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class PlainSgd(Regressor):
    """An optimizer without state."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class NoOptimizer(Regressor):
    """Lightning stands in with an optimizer whose state dict is empty."""

    def configure_optimizers(self):
        warnings.filterwarnings("ignore", ".*returned `None`, this fit will run with no optimizer")


class TwoOptimizers(Regressor):
    """Each is stepped by hand with every batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        self.losses.append(loss.detach().clone())

    def configure_optimizers(self):
        blocks = list(self.blocks.parameters())
        others = [*self.inlet.parameters(), *self.head.parameters()]
        return [torch.optim.Adam(blocks, lr=0.01), torch.optim.SGD(others, 0.05, momentum=0.9)]


def comparable(value):
    """``assert_close`` knows numbers, tensors and containers of them; drop all else."""
    if isinstance(value, dict):
        return {
            k: comparable(v) for k, v in value.items() if not isinstance(v, (str, bool, type(None)))
        }
    if isinstance(value, (list, tuple)):
        return [comparable(v) for v in value]
    return value


def sharded_trainer(strategy, folder, **options):
    return make_trainer(with_options(strategy, checkpoint="sharded"), folder, **options)


def assert_same_bits(found, expected):
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


def resumed_at(
    at_step,
    kind,
    strategy,
    folder,
    *,
    num_samples=16,
    accumulation=1,
    max_epochs=2,
    trainer_of=make_trainer,
):
    """A run, and a second one of other weights that goes on from the checkpoint at a step.

    Returns:
        The Trainer of the second run; its module; that of the first; the checkpoint.
    """
    keep = ModelCheckpoint(
        folder / "kept", every_n_train_steps=at_step, save_top_k=-1, filename="{step}"
    )
    options = {"accumulate_grad_batches": accumulation, "max_epochs": max_epochs}
    trainer = trainer_of(strategy, folder, callbacks=[keep], enable_checkpointing=True, **options)
    uninterrupted = seeded(kind)
    trainer.fit(uninterrupted, make_loader(num_samples))
    path = folder / "kept" / f"step={at_step}.ckpt"
    resumed = seeded(kind, seed=9)
    trainer = trainer_of(strategy, folder, **options)
    trainer.fit(resumed, make_loader(num_samples), ckpt_path=path)
    return trainer, resumed, uninterrupted, path
