"""Global norms over shards: every p, the same on all ranks, the same as without sharding."""

import math

import pytest
import torch
from torch import nn

from lightning_fsdp import NonfiniteGradient, shard_model
from lightning_fsdp.core.tensors.norms import global_norm, scale_to_norm
from tests.support.models import TASKS, mlp, mlp_batch, mlp_loss
from tests.support.one_exchange import train_on_rank
from tests.support.parity import (
    OPTIMIZERS,
    assert_traces_match,
    batches_for,
    optional_batch,
    optional_loss,
    train_reference,
)
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

NORMS = [1.0, 2.0, 3.5, math.inf]
MAX_NORM = 0.01  # far below the norms here: everything is clipped


def _norm_and_clipped(rank, world_size, task_name):
    task, results = TASKS[task_name], {}
    for p in NORMS:
        model = shard_model(task.build())
        task.loss(model, task.make_batch(0, 0, rank)).backward()
        norm = model.clip_grad_norm_(MAX_NORM, norm_type=p)
        clipped = {name: each.grad.full_tensor() for name, each in model.named_parameters()}
        again = model.clip_grad_norm_(1e9, norm_type=p)
        assert type(norm) is torch.Tensor
        assert norm.ndim == 0
        results[p] = norm, clipped, again
    return results


@pytest.mark.parametrize("task_name", ["mlp", "tied_lm"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_norm_and_clipping_equal_those_of_an_unsharded_model(world_size, task_name):
    task, by_rank = TASKS[task_name], run_on_ranks(_norm_and_clipped, world_size, task_name)
    for p in NORMS:
        model = task.build()
        losses = [task.loss(model, task.make_batch(0, 0, rank)) for rank in range(world_size)]
        (sum(losses) / world_size).backward()
        expected = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type=p)
        norm, clipped, again = by_rank[0][p]
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(again, torch.tensor(MAX_NORM), rtol=1e-3, atol=0)
        for name, each in model.named_parameters():
            torch.testing.assert_close(clipped[name], each.grad, rtol=1e-5, atol=1e-7)
        for results in by_rank[1:]:
            assert torch.equal(results[p][0], norm), f"p={p}: ranks have different norms"


def _double_loss(model, rank):
    return mlp_loss(model, {key: value.double() for key, value in mlp_batch(0, 0, rank).items()})


def _clipped_in_fp64(rank, world_size):
    model = shard_model(mlp().double())
    _double_loss(model, rank).backward()
    norm = model.clip_grad_norm_(MAX_NORM)
    return norm, {name: each.grad.full_tensor() for name, each in model.named_parameters()}


def test_what_is_fp64_is_clipped_by_a_norm_in_fp64():
    model = mlp().double()
    (sum(_double_loss(model, rank) for rank in range(2)) / 2).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    for norm, clipped in run_on_ranks(_clipped_in_fp64, 2):
        torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)
        for name, each in model.named_parameters():
            torch.testing.assert_close(clipped[name], each.grad, rtol=1e-13, atol=1e-17)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_the_norm_of_complex_gradients_is_real(dtype):
    gradient = torch.tensor([3 + 4j, 12], dtype=dtype)
    norm = global_norm([gradient], 2.0, None)
    torch.testing.assert_close(norm, torch.tensor(13.0, dtype=dtype.to_real()))
    scale_to_norm([gradient], norm, 1.0)
    assert torch.linalg.vector_norm(gradient).item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("p", [*NORMS, 0.0, -1.0, -math.inf])
@pytest.mark.parametrize("num_elements", [5, 1024, 2_000_003])
def test_the_norm_of_many_elements_is_right(p, num_elements):
    gradient = torch.rand(num_elements) + 0.5
    expected = torch.linalg.vector_norm(gradient.double(), p)
    norm = global_norm([gradient], p, None)
    rtol = 3e-7 if p >= 0 or math.isinf(p) else 1e-6  # negative powers are less exact in fp32
    torch.testing.assert_close(norm.double(), expected, rtol=rtol, atol=0)


IN_TRAINING = [2.0, math.inf]


def _clip_while_training(rank, world_size):
    task, traces = TASKS["tied_lm"], {}
    for p in IN_TRAINING:
        model = shard_model(task.build())
        traces[p] = train_on_rank(
            model,
            batches_for("tied_lm", world_size),
            task.loss,
            OPTIMIZERS["sgd"](model.parameters()),
            rank,
            clip=(0.3, p),
        )
    return traces


def test_training_with_clipping_equals_one_process():
    task, by_rank = TASKS["tied_lm"], run_on_ranks(_clip_while_training, 3)
    for p in IN_TRAINING:
        expected = train_reference(
            task.build(), batches_for("tied_lm", 3), task.loss, OPTIMIZERS["sgd"], clip=(0.3, p)
        )
        assert_traces_match(by_rank[0][p], expected, atol=task.atol, what=f"p={p}")


def _clip_special_cases(rank, world_size):
    task = TASKS["mlp"]
    model = shard_model(task.build())
    assert model.clip_grad_norm_(1.0).item() == 0.0  # no gradient at all
    optional_loss(model, optional_batch([set()])(0, 0, rank)).backward()
    assert model.bonus.grad is None
    norm = model.clip_grad_norm_(1e9)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(math.nan if rank == 0 else 1.0)
    return norm, model.clip_grad_norm_(1.0)


def test_norm_skips_missing_gradients_and_shows_nan_on_every_rank():
    by_rank = run_on_ranks(_clip_special_cases, 2)
    assert torch.equal(by_rank[0][0], by_rank[1][0])
    assert by_rank[0][0] > 0
    assert all(torch.isnan(with_nan) for _, with_nan in by_rank)


def _no_scale(rank, world_size):
    model = shard_model(TASKS["mlp"].build())
    for max_norm, p in ((1.0, math.nan), (1.0, 0), (1.0, -1.0), (-1.0, 2.0), (math.nan, 2.0)):
        with pytest.raises(ValueError, match=rf"max_norm={max_norm} and norm_type={p}"):
            model.clip_grad_norm_(max_norm, norm_type=p)


def test_a_norm_by_which_no_gradient_can_be_scaled_is_refused():
    run_on_ranks(_no_scale, 1)


def _not_finite(rank, world_size):
    model = shard_model(TASKS["mlp"].build())
    TASKS["mlp"].loss(model, TASKS["mlp"].make_batch(0, 0, rank)).backward()
    names = dict(model.named_parameters())
    broken = list(names)[-1]
    shard = names[broken].grad.to_local()
    if rank == world_size - 1 and shard.numel():
        shard[-1] = math.inf
    before = [p.grad.to_local().clone() for p in names.values()]
    with pytest.raises(NonfiniteGradient, match=rf"got inf \(not finite: '{broken}'\)"):
        model.clip_grad_norm_(MAX_NORM, error_if_nonfinite=True)
    for parameter, gradient in zip(names.values(), before, strict=True):
        assert torch.equal(parameter.grad.to_local(), gradient)
    # Without the argument it is as torch's: an infinite norm scales by zero.
    assert model.clip_grad_norm_(MAX_NORM).isinf()
    return any(g.isinf().any() for g in before)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_norm_that_is_not_finite_raises_on_every_rank_before_anything_is_scaled(world_size):
    assert any(run_on_ranks(_not_finite, world_size))


def _finite(rank, world_size):
    model = shard_model(TASKS["mlp"].build())
    TASKS["mlp"].loss(model, TASKS["mlp"].make_batch(0, 0, rank)).backward()
    norm = model.clip_grad_norm_(MAX_NORM, error_if_nonfinite=True)
    return norm.item(), model.clip_grad_norm_(1e9).item()


def test_a_finite_norm_clips_as_ever():
    for before, after in run_on_ranks(_finite, 2):
        assert before > MAX_NORM
        assert after == pytest.approx(MAX_NORM, rel=1e-4)
