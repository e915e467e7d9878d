"""The table of docs/a-step.md, row by row: what is true of one parameter when it says so."""

import pytest
import torch

from lightning_fsdp import gradients
from lightning_fsdp.core.engine.hooks import unit_of
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor
from tests.support.pages import PAGES, python_blocks
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

NUMEL = 64 * 64


def rows():
    lines = [line for line in PAGES["docs/a-step.md"].splitlines() if line.startswith("|")]
    head, _, *body = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [dict(zip(head, cells, strict=True)) for cells in body]


def see(model, parameter):
    (flat_param,) = unit_of(model[1]).flat_params
    held, gradient = model[1]._parameters["weight"], parameter.grad
    if gradient is not None:
        assert isinstance(gradient, ShardedTensor)
        assert gradient.to_local().shape == (NUMEL // 2,)
    return {
        "the module holds": "yours" if held is parameter else "leaf",
        "whole copy": flat_param.state,
        "bytes": str(flat_param.buffer.flat.untyped_storage().nbytes() // (4 * NUMEL)),
        "gradients": flat_param.gradients,
        "your `.grad`": "none" if gradient is None else "this rank's slice of the mean",
    }


def _follow(rank, world_size):
    torch.manual_seed(0)
    (code,), names = python_blocks("docs/a-step.md"), {}
    exec(code, names)
    model = names["model"]
    parameter, optimizer = model[1].weight, torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

    seen = {"before the step": see(model, parameter)}
    names = ["first", "second", "third"]
    for layer, name in zip(model, names, strict=True):
        layer.register_forward_pre_hook(
            lambda *_, name=name: seen.update({f"the {name} layer computes": see(model, parameter)})
        )
    arrived = {
        f"{i}.weight": f"the {name} layer's gradient arrives" for i, name in enumerate(names)
    }
    gradients(model).on_local(
        lambda name, gradient, _: seen.update({arrived[name]: see(model, parameter)})
    )
    model(torch.ones(2, 64)).square().mean().backward()
    seen["after the backward"] = see(model, parameter)
    optimizer.step()
    seen["after the step"] = see(model, parameter)
    optimizer.zero_grad()
    seen["after `zero_grad()`"] = see(model, parameter)
    return seen


@pytest.fixture(scope="module")
def seen():
    first, second = run_on_ranks(_follow, 2)
    assert first == second
    return first


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["when"])
def test_what_the_page_says_is_so(row, seen):
    assert {what: row[what] for what in seen[row["when"]]} == seen[row["when"]]


def test_the_page_has_all_that_was_seen_in_order(seen):
    assert [row["when"] for row in rows()] == list(seen)
