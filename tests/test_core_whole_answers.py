"""Sums, norms and extremes of sharded tensors: one answer for the whole, the same on every rank."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fsdp import shard_model
from lightning_fsdp.core.tensors import whole_values
from tests.support.models import mlp, mlp_batch, mlp_loss
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

QUESTIONS = {
    "sum": lambda t: t.sum(),
    "sum in fp64": lambda t: t.sum(dtype=torch.float64),
    "mean": lambda t: t.mean(),
    "torch.mean": torch.mean,
    "max": lambda t: t.max(),
    "min": lambda t: t.min(),
    "largest": lambda t: t.abs().amax(),
    "smallest": lambda t: torch.amin(t.abs()),
    "std": lambda t: t.std(),
    "var": lambda t: t.var(correction=0),
    "std of a layer norm's": lambda t: (t * 0.01 + 1).std(),
    "norm": lambda t: t.norm(),
    "norm in fp64": lambda t: torch.linalg.vector_norm(t, dtype=torch.float64),
    "torch.norm": lambda t: torch.norm(t, p=3),
    "norm 1": lambda t: t.norm(1),
    "norm 0": lambda t: t.norm(0),
    "norms in fp64": lambda t: torch._foreach_norm([t], 2, torch.float64)[0],
    "norm inf": lambda t: t.norm(float("inf")),
    "norm -inf": lambda t: torch.linalg.vector_norm(t, float("-inf")),
    "how many": lambda t: (t > 0.1).sum(),
    "inner product": lambda t: (t * t.abs()).sum(),
}


def _answer(rank, world_size, dtype):
    """Some slices are empty: a parameter has one element."""
    model, plain = shard_model(mlp().to(dtype)), mlp().to(dtype)
    for (name, parameter), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        for question, ask in QUESTIONS.items():
            found, expected = ask(parameter.detach()), ask(whole.detach())
            said = f"{question} of {name}"
            assert type(found) is torch.Tensor, said
            torch.testing.assert_close(found, expected, equal_nan=True, msg=lambda m, s=said: s + m)
            with torch.no_grad():
                assert torch.equal(ask(parameter).nan_to_num(), found.nan_to_num()), said


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [
        *((2, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)),
        *((1, torch.bfloat16), (4, torch.float32)),
    ],
)
def test_an_answer_is_that_of_the_whole(world_size, dtype):
    run_on_ranks(_answer, world_size, dtype)


def _ask_of_nan(rank, world_size):
    weight = shard_model(mlp()).second.weight.detach()
    if rank == world_size - 1:
        weight.to_local()[-1] = torch.nan
    for question in ("sum", "mean", "max", "largest", "std", "norm", "norm inf"):
        assert QUESTIONS[question](weight).isnan(), question
    assert weight.isnan().sum() == 1


def test_nan_on_one_rank_is_in_the_answer_on_each():
    run_on_ranks(_ask_of_nan, 2)


def _clip(rank, world_size, foreach):
    for norm_type, num_beside in ((2.0, 0), (1.0, 1), (float("inf"), 0), (2.0, 1)):
        model, plain = shard_model(mlp()), mlp()
        mlp_loss(model, mlp_batch(0, 0, rank)).backward()
        sum(mlp_loss(plain, mlp_batch(0, 0, r)) / world_size for r in range(world_size)).backward()
        arguments = {"max_norm": 0.01, "norm_type": norm_type, "foreach": foreach}
        beside = [nn.Parameter(torch.ones(3)) for _ in range(2 * num_beside)]  # not sharded
        for parameter in beside:
            parameter.grad = torch.full((3,), 0.5)
        ours, theirs = beside[:num_beside], beside[num_beside:]
        found = nn.utils.clip_grad_norm_([*model.parameters(), *ours], **arguments)
        expected = nn.utils.clip_grad_norm_([*plain.parameters(), *theirs], **arguments)
        torch.testing.assert_close(found, expected)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        assert expected > 0.01, "it clips"
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("foreach", [None, True])
def test_torch_clips_by_the_norm_of_whole_gradients(foreach):
    run_on_ranks(_clip, 2, foreach)


class _Operations(TorchDispatchMode):
    """Counts operations as they are called, not what handlers of sharded tensors make of them."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def _count_of_clipping(rank, world_size, clip):
    """Operations and exchanges, with 4 and with 20 gradients."""
    found, gather = [], whole_values.all_gather_slices
    for num_layers in (2, 10):
        model = shard_model(nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers))))
        model(torch.ones(1, 4)).sum().backward()
        with (
            mock.patch.object(whole_values, "all_gather_slices", side_effect=gather) as exchange,
            _Operations() as operations,
        ):
            clip(model.parameters())
        found.append((operations.count, exchange.call_count))
    return found


def _by_norm(parameters):
    nn.utils.clip_grad_norm_(parameters, 0.01)


def _by_value(parameters):
    nn.utils.clip_grad_value_(parameters, 0.01)


@pytest.mark.parametrize(("clip", "num_exchanges"), [(_by_norm, 1), (_by_value, 0)])
def test_torch_clips_all_gradients_at_once(clip, num_exchanges):
    """As under FSDP2: no operation, and no exchange, for each parameter."""
    for few, many in run_on_ranks(_count_of_clipping, 2, clip):
        assert few == many
        assert few[0] <= 8
        assert few[1] == num_exchanges


def _ask_for_more(rank, world_size):
    model = shard_model(mlp())
    weight = model.second.weight
    for refused in (weight.sum, weight.norm, lambda: (weight * 2).max()):
        with pytest.raises(RuntimeError, match=r"detach\(\) first"):
            refused()  # a penalty: each rank would have a gradient of its own
    assert weight.any()  # has no graph anyway
    for by_rows in (
        lambda t: t.sum(0),
        lambda t: t.amax(dim=1),
        lambda t: t.std(0),
        lambda t: t.norm(dim=0),
        lambda t: t.amax(keepdim=True),
    ):
        with pytest.raises(RuntimeError, match=r"full_tensor\(\) \(on every rank\)"):
            by_rows(weight.detach())
    with model.no_sync():
        mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    for unreduced in (
        weight.grad.norm,
        weight.grad.sum,
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True),
    ):
        with pytest.raises(RuntimeError, match="not reduced over the ranks"):
            unreduced()
    for of_numbers in ("mean", "std"):  # torch's own: of whole numbers
        with pytest.raises(RuntimeError, match=of_numbers):
            getattr(copy.deepcopy(weight.detach()).to(torch.int64), of_numbers)()


def test_what_has_a_graph_or_is_by_rows_or_waits_is_refused():
    run_on_ranks(_ask_for_more, 2)
