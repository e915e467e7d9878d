"""Modules that several units call, or one and the model around it, train as in one process."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_fsdp.engines.gathered_alone import of_several_units, stands_alone
from lightning_fsdp.units import find_units
from tests.support.parity import assert_same_tensors
from tests.support.shared_modules import FORMS, CalledBetween, OfTwoBlocks, PartOfAPart, Tied
from tests.support.trainer import (
    SHARDED,
    make_data,
    make_trainer,
    on_trainer_ranks,
    with_options,
)

pytestmark = pytest.mark.usefixtures("kept_ranks")

BATCH, NUM_STEPS = 4, 3


def _batches(world_size):
    x, y = make_data(NUM_STEPS * world_size * BATCH).tensors
    return x.view(NUM_STEPS, world_size, BATCH, -1), y.view(NUM_STEPS, world_size, BATCH, -1)


def _in_one_process(form, world_size):
    """Losses of each rank, with that of an evaluation at the end, and gradients of each step."""
    model, losses, gradients = form(), [[] for _ in range(world_size)], []
    optimizer = model.configure_optimizers()
    xs, ys = _batches(world_size)
    for x, y in zip(xs, ys, strict=True):
        optimizer.zero_grad()
        for rank, batch in enumerate(zip(x, y, strict=True)):
            loss = model.training_step(batch, 0)
            losses[rank].append(loss.detach())
            (loss / world_size).backward()
        named = model.named_parameters()
        gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
        optimizer.step()
    for rank in range(world_size):
        losses[rank].append(F.mse_loss(model(xs[0, rank]), ys[0, rank]).detach())
    return losses, gradients


def _compare(rank, world_size, form, folder):
    losses, gradients = _in_one_process(form, world_size)
    xs, ys = _batches(world_size)
    loader = DataLoader(list(zip(xs[:, rank], ys[:, rank], strict=True)), batch_size=None)
    options = {"num_sanity_val_steps": 0, "limit_val_batches": 1, "use_distributed_sampler": False}
    for strategy in SHARDED:
        model, expected = form(), losses[rank]
        trainer = make_trainer(with_options(strategy, units=form.units), folder, **options)
        trainer.fit(model, loader, loader)
        for step, (ours, theirs) in enumerate(zip(model.losses, expected, strict=True)):
            torch.testing.assert_close(ours, theirs, msg=f"{strategy}, loss {step}")
        for found, whole in zip(model.gradients, gradients, strict=True):
            # FSDP1 has zeros where no rank has used a part of a unit.
            mine = {name: found.pop(name) for name in whole}
            assert not any(gradient.any() for gradient in found.values()), strategy
            assert_same_tensors(mine, whole, atol=1e-5, what=f"{strategy}: gradient")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_module_that_several_call_trains_as_in_one_process(form, tmp_path):
    on_trainer_ranks(_compare, 2, form, tmp_path)


def _names(model, modules):
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for module in modules]


@pytest.mark.parametrize(
    ("form", "alone", "left_to_the_root"),
    [
        (CalledBetween, ["blocks.0.gate"], []),
        (PartOfAPart, ["blocks.0.gate.2"], ["blocks.0", "blocks.2"]),
        (OfTwoBlocks, [], ["blocks.0", "blocks.2"]),
        (Tied, [], ["blocks.1", "blocks.1.gate", "again"]),
    ],
)
def test_only_what_is_called_around_a_unit_is_gathered_alone(form, alone, left_to_the_root):
    model = form()
    units = [modules for _, modules in find_units(model, None)]
    shared = of_several_units(model, units)
    assert _names(model, shared) == alone
    apart = {parameter for module in shared for parameter in module.parameters()}
    rest = [[m for m in modules if m not in shared] for modules in units]
    left = [unit[0] for unit in rest if unit and not stands_alone(model, unit, apart)]
    assert _names(model, left) == left_to_the_root
