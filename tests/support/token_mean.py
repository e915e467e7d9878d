"""Sequences of other lengths on every rank, and one process on the joined batch of a step."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.support.trainer import Block, seeded

LENGTHS = [3, 17, 1, 9, 0, 0, 0, 2, 30, 4, 7, 0, 21, 6, 1, 8, 13, 2, 11, 5, 19, 3, 10, 4]

WIDTH, LONGEST, VOCABULARY = 6, 30, 11


class Sequences(Dataset):
    """Padded sequences of very different lengths; of some, no token has a label."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(LONGEST, WIDTH, generator=generator)
        labels = torch.randint(VOCABULARY, (LONGEST,), generator=generator)
        labels[LENGTHS[index] :] = -100
        return {"x": x, "labels": labels, "counts": torch.tensor(LENGTHS[index])}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tokens(pl.LightningModule):
    def __init__(self, says="num_tokens", lr=0.3):
        super().__init__()
        self.net = Net()
        self.says = says
        self.lr = lr
        self.step_losses = []
        self.seen = []

    def training_step(self, batch, batch_idx):
        logits = self.net(batch["x"].flatten(0, 1))
        labels = batch["labels"]
        loss = F.cross_entropy(logits.float(), labels.flatten())
        num_tokens = (labels != -100).sum()
        self.log(
            "epoch_loss",
            loss.nan_to_num(),
            on_step=False,
            on_epoch=True,
            sync_dist=True,
            batch_size=int(num_tokens),
        )
        if self.says is None:
            return loss
        return {"loss": loss, self.says: num_tokens} if self.says in KEYS else loss

    def on_before_optimizer_step(self, optimizer):
        self.step_losses.append(self.trainer.strategy.mean_loss)

    def on_after_backward(self):
        self.seen.append(self.trainer.strategy.gradients["net.head.bias"].state)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


KEYS = ("num_tokens", "weight")


def loader(batch_size=2):
    # Dealt out in order: the Trainer's own sampler shuffles what is trained on.
    sampler = DistributedSampler(Sequences(), shuffle=False)
    return DataLoader(Sequences(), batch_size=batch_size, sampler=sampler)


def reference(world_size, accumulation, *, batch_size=2, clip=None, make=None, lr=0.3):
    """Plain torch, one process: every step's tokens in one row, without padding."""
    model = seeded(Tokens).net
    optimizer = (make or torch.optim.SGD)(model.parameters(), lr=lr)
    data, losses, norms = Sequences(), [], []
    per_rank = len(LENGTHS) // world_size // batch_size  # batches of each rank; ranks alternate
    for start in range(0, per_rank, accumulation):
        rows = [
            (start + micro) * batch_size * world_size + k
            for micro in range(min(accumulation, per_rank - start))
            for k in range(batch_size * world_size)
        ]
        x = torch.cat([data[r]["x"][: LENGTHS[r]] for r in rows])
        labels = torch.cat([data[r]["labels"][: LENGTHS[r]] for r in rows])
        loss = F.cross_entropy(model(x), labels) if len(labels) else model(x).sum() * 0
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        losses.append(loss.detach())
    return dict(model.state_dict()), losses
