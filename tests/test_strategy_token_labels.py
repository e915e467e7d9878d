"""Batches of any kind, and labels that are left out, where nobody gives a number of tokens."""

import dataclasses
import warnings
from collections.abc import Mapping

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.token_mean import LONGEST, WIDTH, Net, Tokens
from tests.support.trainer import fit, on_trainer_ranks, seeded


@dataclasses.dataclass(frozen=True)
class _Frozen:
    x: torch.Tensor

    def to(self, *args, **kwargs):
        return _Frozen(self.x.to(*args, **kwargs))


class _Own(Mapping):
    """A mapping that is not built from its items alone."""

    def __init__(self, x, note):
        self.content, self.note = {"x": x}, note

    def to(self, *args, **kwargs):
        return _Own(self.content["x"].to(*args, **kwargs), self.note)

    def __getitem__(self, key):
        return self.content[key]

    def __iter__(self):
        return iter(self.content)

    def __len__(self):
        return len(self.content)


def _in(kind, x):
    if kind == "frozen":
        return _Frozen(x)
    if kind == "mapping":
        return _Own(x, "a note")
    if kind == "nested":
        return torch.nested.nested_tensor([x, (10 * x).long()[:1]], dtype=torch.int64)
    return getattr(x, kind)()  # a sparse one


class _Any(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, batch_idx):
        return self.net(torch.ones(1, WIDTH)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _any_batch(rank, world_size, folder):
    warnings.simplefilter("ignore")  # torch's, of sparse and nested tensors
    for kind in ("frozen", "mapping", "nested", "to_sparse", "to_sparse_csr"):
        batches = DataLoader([_in(kind, torch.ones(2, 3))] * 2, batch_size=None)
        trainer, _ = fit("scratch_fsdp_zero3", folder, seeded(_Any), batches)
        assert trainer.global_step == 1, kind


def test_without_a_number_a_batch_may_be_anything(tmp_path):
    on_trainer_ranks(_any_batch, 2, tmp_path)


def _labelled(num_tokens, shift):
    labels = torch.where(torch.arange(LONGEST) < num_tokens, shift, -100)
    return {"x": torch.ones(1, LONGEST, WIDTH), "index": torch.tensor([shift]), "labels": labels}


def _warned(rank, world_size, folder, of_ranks):
    batches = [_labelled(num, i) for i, num in enumerate(of_ranks[rank])]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(
            "scratch_fsdp_zero3",
            folder,
            seeded(lambda: Tokens(None)),
            DataLoader(batches, batch_size=None),
            accumulate_grad_batches=2 if world_size == 1 else 1,
            use_distributed_sampler=False,
        )
    return [str(w.message) for w in caught if "labels that are not -100" in str(w.message)]


@pytest.mark.parametrize(
    ("of_ranks", "message"),
    [
        ([[4, 9, 3], [26, 5, 7]], "Ranks have 4 to 26 labels that are not -100 in a micro-batch"),
        ([[30, 30, 30], [2, 2, 2]], "Ranks have 2 to 30 labels"),
        ([[5, 30, 30], [5, 2, 2]], "Micro-batches of rank 0 have 5 to 30 labels"),
        ([[30, 2, 30]], "Micro-batches of rank 0 have 2 to 30 labels"),
        ([[7, 7, 7], [7, 7, 7]], None),
        ([[30, 30, 30], [30, 30, 30]], None),
    ],
    ids=["", "one full", "later", "one rank", "equal", "all full"],
)
def test_labels_that_are_left_out_without_a_number_are_warned_of_once(tmp_path, of_ranks, message):
    of_rank_0, *others = on_trainer_ranks(_warned, len(of_ranks), tmp_path, of_ranks)
    assert not any(others)
    assert len(of_rank_0) == (message is not None)
    for warned in of_rank_0:
        assert message in warned
        low, high = map(int, message.split(" have ")[1].split(" labels")[0].split(" to "))
        assert f"{high / low:.1f} times" in warned
        assert '"num_tokens"' in warned
