"""A module and a dataset that draw random numbers, and runs of them."""

import random

import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import Dataset

from lightning_fsdp import ResumableLoader
from tests.support.trainer import Regressor, make_data, make_trainer, seeded


class NoisySamples(Dataset):
    """Samples with their number; noise from all three generators, if wanted."""

    def __init__(self, length, *, is_noisy=True):
        self.data = make_data(length)
        self.is_noisy = is_noisy

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        if self.is_noisy:
            x = x + torch.rand(()) + np.random.random() + random.random()
        return x.float(), y, index


class Dropping(Regressor):
    def __init__(self, probability=0.3):
        super().__init__(lr=0.003)
        self.drop = nn.Dropout(probability)
        self.numbers = []

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        self.numbers.append(index.tolist())
        loss = nn.functional.mse_loss(self(self.drop(x)), y)
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def run_dropping(
    strategy, folder, *, seed=0, length=32, loader=None, is_noisy=True, model=None, **options
):
    """Train; return the module. ``ckpt_path`` among the options resumes."""
    ckpt_path = options.pop("ckpt_path", None)
    loaders = options.pop("loaders", {})
    random.seed(seed)
    np.random.seed(seed)
    model = seeded(model or Dropping, seed)
    trainer = make_trainer(strategy, folder, **{"accumulate_grad_batches": 2, **options})
    loader = loader or ResumableLoader(NoisySamples(length, is_noisy=is_noisy), 2, seed=7)
    trainer.fit(model, loader, ckpt_path=ckpt_path, **loaders)
    return model


def keep_checkpoints(folder, every=1):
    return ModelCheckpoint(
        folder / "kept", every_n_train_steps=every, save_top_k=-1, filename="{step}"
    )
