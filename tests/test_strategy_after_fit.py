"""A module as a fit leaves it: plain, right, and in a host's memory once for all of its ranks."""

import copy
import gc

import torch
import torch.distributed as dist
from torch import nn

from tests.support.cases import each_on_trainer_ranks
from tests.support.own_memory import MIB, bytes_in_files, in_files, needs_proc
from tests.support.trainer import (
    STRATEGIES,
    Regressor,
    make_loader,
    make_trainer,
    seeded,
    weights_of,
)

pytestmark = needs_proc

NAMES = [name for name in STRATEGIES if name != "ddp"]


class _Wide(Regressor):
    """4 MiB in one block, whose weight another module has, too; and a buffer."""

    def __init__(self):
        super().__init__(num_blocks=0)
        self.wide = nn.Linear(7, 150_000)
        self.same = nn.Linear(7, 150_000, bias=False)
        self.same.weight = self.wide.weight
        self.register_buffer("mark", torch.zeros(3))

    def forward(self, x):
        x = self.inlet(x)
        return self.head(x + 0.001 * (self.wide(x) + self.same(x))[:, :7])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _fit_twice(rank, world_size, strategy, folder):
    expected = seeded(_Wide)
    model = seeded(_Wide)
    objects = list(model.parameters())
    for _ in range(2):
        for strategy_, module in (("ddp", expected), (strategy, model)):
            trainer = make_trainer(strategy_, folder, limit_train_batches=2)
            trainer.fit(module, make_loader())
        torch.testing.assert_close(weights_of(model), weights_of(expected), atol=1e-6, rtol=1e-5)
        assert all(p is before for p, before in zip(model.parameters(), objects, strict=True))
        assert model.same.weight is model.wide.weight
        assert all(in_files(model.parameters()))
    del trainer
    gc.collect()
    dist.barrier()
    shares, own = bytes_in_files("Pss"), bytes_in_files("Anonymous")
    dist.barrier()
    if rank == 0:
        with torch.no_grad():
            model.inlet.weight.zero_()
    dist.barrier()
    is_zero = not model.inlet.weight.any()
    assert is_zero == (rank == 0)
    apart = copy.deepcopy(model)
    assert not any(in_files(apart.parameters()))
    assert model(torch.ones(2, 5)).isfinite().all()
    return shares, own


def test_a_fit_leaves_one_copy_per_host_which_trains_on(tmp_path):
    for strategy, found in each_on_trainer_ranks(_fit_twice, 2, NAMES, tmp_path).items():
        assert sum(shares for shares, _ in found) < 6 * MIB, strategy
        assert max(own for _, own in found) < MIB / 4, strategy


def _stays_once(rank, world_size, strategy, folder):
    """A run that starts from such a module reads it, and does not write to it."""
    model = seeded(_Wide)
    make_trainer(strategy, folder, limit_train_batches=1).fit(model, make_loader())
    trainer = make_trainer(strategy, folder, limit_val_batches=1)
    sharding = trainer.strategy.engine.shard
    own = []

    def shard(module, **options):
        kept = [p.data for p in module.parameters()]
        sharding(module, **options)
        own.append(bytes_in_files("Anonymous"))
        del kept

    trainer.strategy.engine.shard = shard
    trainer.validate(model, make_loader(), verbose=False)
    assert all(in_files(model.parameters()))
    return own


def test_the_next_run_starts_from_it_without_copying_it(tmp_path):
    for strategy, found in each_on_trainer_ranks(_stays_once, 2, NAMES, tmp_path).items():
        assert max(max(own) for own in found) < MIB / 4, strategy
