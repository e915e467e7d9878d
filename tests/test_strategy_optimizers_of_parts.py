"""Optimizers that step a part of a unit's parameters."""

import lightning.pytorch as pl
import torch
from torch import nn

from tests.support.trainer import make_trainer, on_trainer_ranks

BATCH = torch.arange(24.0).view(3, 8) / 24


class OfWeightsAlone(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def training_step(self, batch, batch_idx):
        return self.net(BATCH).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD([layer.weight for layer in self.net], lr=0.1)


def _steps_weights_alone(rank, world_size, folder):
    plain = OfWeightsAlone()
    optimizer = plain.configure_optimizers()
    for _ in range(3):
        optimizer.zero_grad()
        plain.training_step(None, 0).backward()
        optimizer.step()
    for name in ("fsdp1_zero2", "fsdp1_zero3", "fsdp2_zero2", "scratch_fsdp_zero2"):
        model = OfWeightsAlone()
        trainer = make_trainer(name, folder, max_steps=3)
        trainer.fit(model, torch.utils.data.DataLoader(range(6)))
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.detach(), other.detach())


def test_an_optimizer_of_a_part_of_a_unit_clears_its_gradients(tmp_path):
    """The Trainer clears after the forward, where FSDP1 under ZeRO-2 has a whole copy."""
    on_trainer_ranks(_steps_weights_alone, 2, tmp_path)
