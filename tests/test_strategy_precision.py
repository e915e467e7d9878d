"""What autocast leaves alone is left alone under sharding, too."""

from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.support.trainer import make_trainer, on_trainer_ranks


class Lookup(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.dtypes = {}

    def training_step(self, batch, batch_idx):
        looked_up = self.embedding(batch)
        stream = looked_up
        for block in self.blocks:
            stream = stream + block(stream)
        self.dtypes = {"embedding": looked_up.dtype, "stream": stream.dtype}
        return stream.float().square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _dtypes(rank, world_size, folder):
    seen = []
    for strategy in ("ddp", "scratch_fsdp_zero3"):
        model = Lookup()
        trainer = make_trainer(strategy, Path(folder), precision="bf16-mixed", max_steps=1)
        trainer.fit(model, DataLoader(torch.arange(8), batch_size=2))
        seen.append(model.dtypes)
    return seen


def test_the_residual_stream_has_the_dtype_that_it_has_under_ddp(tmp_path):
    for ddp, scratch in on_trainer_ranks(_dtypes, 2, str(tmp_path)):
        assert scratch == ddp
        assert scratch["stream"] == torch.float32
