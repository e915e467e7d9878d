"""The chunked loss beside ``num_tokens``: the mean over all tokens of a step, on all ranks.

Judged against one process that runs the joined, unpadded batch of the step through plain torch.
"""

import functools

import pytest
import torch

from lightning_fsdp import call_with, linear_cross_entropy
from tests.support.token_mean import LENGTHS, Tokens, loader, reference
from tests.support.trainer import SHARDED, fit, on_trainer_ranks, seeded, weights_of, with_options

BATCH_SIZE = 4  # three batches for each of two ranks, two for each of three


class _Chunked(Tokens):
    """Without logits: the head's weight and bias are read as in its forward."""

    def training_step(self, batch, batch_idx):
        net, x, labels = self.net, batch["x"].flatten(0, 1), batch["labels"].flatten()
        x = net.inlet(x)
        for block in net.blocks:
            x = block(x)
        loss_of = functools.partial(linear_cross_entropy, chunk_size=7)
        loss = call_with(
            net.head, lambda hidden: loss_of(hidden, net.head.weight, labels, net.head.bias), x
        )
        return {"loss": loss, "num_tokens": (labels != -100).sum()}


def _compare(rank, world_size, folder, names, accumulation, options, batch_size=BATCH_SIZE):
    expected, losses = reference(world_size, accumulation, batch_size=batch_size)
    for name in names:
        _, model = fit(
            with_options(name, **options),
            folder,
            seeded(_Chunked),
            loader(batch_size),
            accumulate_grad_batches=accumulation,
            use_distributed_sampler=False,
        )
        found = {key.removeprefix("net."): value for key, value in weights_of(model).items()}
        torch.testing.assert_close(
            found, expected, atol=2e-6, rtol=2e-5, msg=lambda text, n=name: f"{n}: {text}"
        )
        torch.testing.assert_close(model.step_losses, losses, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"accumulation": "sum"}])
def test_windows_of_two_and_a_shorter_last_one(tmp_path, options):
    assert len(LENGTHS) // 2 // BATCH_SIZE == 3
    on_trainer_ranks(_compare, 2, tmp_path, SHARDED, 2, options, timeout_s=120)


def test_three_ranks(tmp_path):
    names = ("scratch_fsdp_zero3", "fsdp2_zero2")
    on_trainer_ranks(_compare, 3, tmp_path, names, 2, {}, timeout_s=120)


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (("scratch_fsdp_zero2", "scratch_fsdp_zero3"), {"state_over": "all"}),
        (("scratch_fsdp_zero3", "fsdp2_zero3"), {}),
    ],
    ids=["state over all", "replicas"],
)
def test_two_hosts_whose_shards_add_up(tmp_path, names, options):
    options = {"shard_size": 2, "accumulation": "sum", **options}
    assert len(LENGTHS) // 4 // 2 == 3  # the second step gathers what the first wrote
    on_trainer_ranks(_compare, 4, tmp_path, names, 2, options, 2, timeout_s=120)
