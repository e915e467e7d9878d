"""Saving and loading, where one rank cannot: the same error on every rank, at once."""

import pytest
import torch
from torch import nn

from lightning_fsdp import (
    async_save_sharded,
    checkpoint,
    load_adapters,
    load_pretrained,
    load_sharded,
    save_adapters,
    save_pretrained,
    save_sharded,
    shard_model,
)
from tests.support.models import mlp
from tests.support.ranks import errors_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

SOON_S = 10.0


def _adamw(model):
    return torch.optim.AdamW(model.parameters())


def save_with_a_sharded_tensor(path, model, rank):
    save_sharded(path, model, extra={"mix": 1 if rank else model.mix})


def async_save_with_a_sharded_tensor(path, model, rank):
    async_save_sharded(path, model, extra={"mix": 1 if rank else model.mix})


def save_other_optimizers(path, model, rank):
    save_sharded(path, model, [] if rank else [_adamw(model)])


def save_an_optimizer_of_another_module(path, model, rank):
    save_sharded(path, model, [_adamw(model if rank else nn.Linear(2, 2))])


def load_what_is_not_there(path, model, rank):
    save_sharded(path, model)
    load_sharded(path if rank else f"{path}-nowhere", model)


def load_other_optimizers(path, model, rank):
    optimizer = _adamw(model)
    save_sharded(path, model, [optimizer])
    load_sharded(path, model, [] if rank else [optimizer])


def load_into_an_optimizer_of_another_module(path, model, rank):
    save_sharded(path, model, [_adamw(model)])
    load_sharded(path, model, [_adamw(model if rank else nn.Linear(2, 2))])


def load_into_another_module(path, model, rank):
    save_sharded(path, model)
    if rank == 0:
        model.register_buffer("beside", torch.zeros(1))
    load_sharded(path, model)


def load_state_that_is_not_there(path, model, rank):
    save_sharded(path, model)
    checkpoint.load(path if rank else f"{path}-nowhere", {})


def save_pretrained_in_files_of_no_size(path, model, rank):
    save_pretrained(model, path, max_shard_size="5GB" if rank else "large")


def save_pretrained_merged(path, model, rank):
    save_pretrained(model, path, merge_adapters=rank == 0)


def load_pretrained_from_nowhere(path, model, rank):
    save_pretrained(model, path)
    load_pretrained(model, path if rank else f"{path}-nowhere")


def save_adapters_of_no_model(path, model, rank):
    save_adapters(model, path, adapter_name="default" if rank else "other")


def load_adapters_of_no_model(path, model, rank):
    load_adapters(model, path, adapter_name="default" if rank else "other")


SCENARIOS = {
    save_with_a_sharded_tensor: "(rank 0 of 2): extra['mix']",
    async_save_with_a_sharded_tensor: "(rank 0 of 2): extra['mix']",
    save_other_optimizers: "with 1 optimizers (rank 0); ",
    save_an_optimizer_of_another_module: "(rank 0 of 2): optimizer 0, group 0, parameter 0",
    load_what_is_not_there: "(rank 0 of 2): ",
    load_other_optimizers: "load with 1 optimizers, strict=True (rank 0); load with 0 optimizers",
    load_into_an_optimizer_of_another_module: "(rank 0 of 2): optimizer 0, group 0, parameter 0",
    load_into_another_module: "(rank 0 of 2): expected the names and shapes of the module; missing",
    load_state_that_is_not_there: "(rank 0 of 2): ",
    save_pretrained_in_files_of_no_size: "(rank 0 of 2): max_shard_size: expected",
    save_pretrained_merged: "(rank 0 of 2): MLP: expected one model of peft",
    load_pretrained_from_nowhere: "(rank 0 of 2): ",
    save_adapters_of_no_model: "(ranks 0, 1 of 2): MLP: expected one model of peft",
    load_adapters_of_no_model: "(ranks 0, 1 of 2): MLP: expected one model of peft",
}


def _one_in_trouble(rank, world_size, scenario, path):
    scenario(path, shard_model(mlp()), rank)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_what_one_rank_cannot_save_or_load_is_an_error_on_every_rank_at_once(scenario, tmp_path):
    path = str(tmp_path / "saved")
    errors = errors_on_ranks(_one_in_trouble, 2, scenario, path, timeout_s=SOON_S)
    for rank, error in enumerate(errors):
        assert error is not None, f"rank {rank} went on"
        assert SCENARIOS[scenario] in error.message, f"rank {rank}: {error}"
