"""Gradients and weights by name: what can be seen when, by value against plain torch."""

import contextlib

import pytest
import torch

from lightning_fsdp import (
    GradientUnavailable,
    gradients,
    shard_model,
)
from tests.support.by_name import assert_same_tensors
from tests.support.models import TASKS, mlp, mlp_batch, mlp_loss
from tests.support.parity import OPTIMIZERS, PLANS, whole
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

NUM_MICRO_BATCHES = 3
ASK = {"shard": lambda gradient: gradient.shard, "full": lambda gradient: gradient.full()}


def _plain_gradients(task, batches, scale=1.0):
    """Gradients by name of an unsharded model, summed over ``batches``."""
    model = task.build()
    for batch in batches:
        (task.loss(model, batch) * scale).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _mean_gradients(task, step, micro_batch, world_size):
    batches = [task.make_batch(step, micro_batch, rank) for rank in range(world_size)]
    return _plain_gradients(task, batches, 1 / world_size)


def _states(rank, world_size, task_name, plan):
    """none -> local -> local (of two) -> reduced -> none, each with its value."""
    task = TASKS[task_name]
    model = shard_model(task.build(), PLANS[plan])
    g = gradients(model)
    assert {g[name].state for name in g} == {"none"}
    batches = [task.make_batch(0, micro_batch, rank) for micro_batch in range(2)]
    with model.no_sync():
        for index, batch in enumerate(batches):
            task.loss(model, batch).backward()
            expected = _plain_gradients(task, batches[: index + 1])
            local = {name: g[name].local().clone() for name in g if g[name].state == "local"}
            assert_same_tensors(local, expected, atol=task.atol, what=f"local {index}")
    for ask in (*ASK, "norm"):
        with pytest.raises(
            GradientUnavailable, match="expected the reduced one, got state 'local'"
        ):
            g.norm() if ask == "norm" else ASK[ask](g[next(iter(expected))])
    task.loss(model, task.make_batch(0, 2, rank)).backward()
    every = [task.make_batch(0, m, r) for m in range(3) for r in range(world_size)]
    expected = _plain_gradients(task, every, 1 / world_size)
    singly = {name: g[name].full() for name in g if g[name].state == "reduced"}
    streamed = {name: tensor.clone() for name, tensor in g.full()}
    assert_same_tensors(singly, expected, atol=3 * task.atol, what="full")
    assert_same_tensors(streamed, singly, atol=0, what="streamed")
    norm = torch.nn.utils.get_total_norm(list(expected.values()))
    torch.testing.assert_close(g.norm(), norm, rtol=1e-5, atol=0)
    shards = {name: g[name].shard.clone() for name in singly}
    torch.testing.assert_close(g.dot(None, shards).sqrt().float(), norm, rtol=1e-5, atol=0)
    with pytest.raises(GradientUnavailable, match="on_local"):
        g[next(iter(expected))].local()
    model.zero_grad()
    assert {g[name].state for name in g} == {"none"}
    with pytest.raises(GradientUnavailable, match="got state 'none'"):
        _ = g[next(iter(expected))].shard
    return {name: tensor.numel() for name, tensor in shards.items()}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("task_name", ["mlp", "tied_lm"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_are_there_in_every_state_with_the_values_of_plain_torch(
    world_size, task_name, plan
):
    by_rank = run_on_ranks(_states, world_size, task_name, plan)
    for name, parameter in TASKS[task_name].build().named_parameters():
        assert sum(numel[name] for numel in by_rank) == parameter.numel()


def _hooks(rank, world_size):
    task = TASKS["tied_lm"]
    model = shard_model(task.build())
    g = gradients(model)
    seen_local, seen_reduced = {}, {}
    handles = [
        g.on_local(lambda name, grad, micro: seen_local.update({(name, micro): grad.clone()})),
        g.on_reduced(
            lambda name, shard, micro: seen_reduced.update({(name, micro): shard.clone()})
        ),
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    task.loss(model, task.make_batch(9, 0, rank)).backward()
    optimizer.step()  # from here on, micro-batches count from 0
    optimizer.zero_grad()
    for micro_batch in range(2):
        task.loss(model, task.make_batch(0, micro_batch, rank)).backward()
    for micro_batch in range(2):
        expected = _plain_gradients(task, [task.make_batch(0, micro_batch, rank)])
        local = {name: t for (name, micro), t in seen_local.items() if micro == micro_batch}
        assert_same_tensors(local, expected, atol=task.atol, what="on_local")
        mean = _mean_gradients(task, 0, micro_batch, world_size)
        for name, shard in g.parameters.items():
            piece = shard.spec.slice_of(mean[name])
            torch.testing.assert_close(
                seen_reduced[name, micro_batch], piece, rtol=0, atol=task.atol
            )
    for handle in handles:
        handle.remove()
    seen_local.clear()
    seen_reduced.clear()
    task.loss(model, task.make_batch(0, 0, rank)).backward()
    assert not seen_local
    assert not seen_reduced


@pytest.mark.parametrize("world_size", [2, 3])
def test_hooks_see_each_local_and_each_reduced_gradient_until_they_are_removed(world_size):
    run_on_ranks(_hooks, world_size)


def _edit(rank, world_size):
    """Local gradients scaled by rank, reduced ones by ten: the mean of the scaled, times ten."""
    model, batches = shard_model(mlp()), [mlp_batch(0, 0, r) for r in range(world_size)]
    g = gradients(model)
    g.on_local(lambda name, gradient, micro_batch: gradient.mul_(rank + 1))
    g.on_reduced(lambda name, shard, micro_batch: shard.mul_(10))
    mlp_loss(model, batches[rank]).backward()
    reference = mlp()
    for r, batch in enumerate(batches):
        (mlp_loss(reference, batch) * (r + 1) * 10 / world_size).backward()
    assert_same_tensors(
        dict(g.full()), {n: p.grad for n, p in reference.named_parameters()}, atol=1e-6
    )


def test_gradients_can_be_edited_on_their_way():
    run_on_ranks(_edit, 2)


def _modes(rank, world_size, optimizer_name):
    """The three modes end in the same weights; ``separate`` has each micro-batch's own mean."""
    task, ends = TASKS["tied_lm"], {}
    for mode in ("sum", "separate", "local"):
        model = shard_model(task.build())
        g, optimizer = gradients(model), OPTIMIZERS[optimizer_name](model.parameters())
        for step in range(2):
            with g.micro_batches(mode):
                for micro_batch in range(NUM_MICRO_BATCHES):
                    task.loss(model, task.make_batch(step, micro_batch, rank)).backward()
            if mode == "separate" and step == 0:
                for micro_batch in range(NUM_MICRO_BATCHES):
                    expected = _mean_gradients(task, step, micro_batch, world_size)
                    assert_same_tensors(
                        {name: g[name].full(micro_batch) for name in g},
                        expected,
                        atol=task.atol,
                        what=f"micro-batch {micro_batch}",
                    )
                    assert_same_tensors(
                        {n: t.clone() for n, t in g.full(micro_batch)}, expected, atol=task.atol
                    )
                flat = [
                    torch.cat(
                        [t.flatten() for t in _mean_gradients(task, 0, m, world_size).values()]
                    )
                    for m in (0, 1)
                ]
                torch.testing.assert_close(
                    g.dot(0, 1).float(), torch.dot(*flat), rtol=1e-4, atol=1e-7
                )
                with pytest.raises(
                    GradientUnavailable, match=r"of micro-batch 7.*kept: \[0, 1, 2\]"
                ):
                    g[next(iter(g))].full(7)
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(GradientUnavailable):
            g[next(iter(g))].full(0)
        ends[mode] = {name: whole(p) for name, p in model.named_parameters()}
    assert_same_tensors(ends["separate"], ends["sum"], atol=0, what="separate")
    assert_same_tensors(ends["local"], ends["sum"], atol=task.atol, what="local")


@pytest.mark.parametrize(
    ("world_size", "optimizer_name"), [(1, "sgd"), (2, "sgd"), (2, "adamw"), (3, "adamw")]
)
def test_micro_batches_are_kept_apart_and_change_nothing(world_size, optimizer_name):
    run_on_ranks(_modes, world_size, optimizer_name)


def _clear_kept(rank, world_size, how):
    model = shard_model(mlp())
    g, optimizer = gradients(model), OPTIMIZERS["sgd"](model.parameters())
    for first in (0, 2):  # the second round starts from what the first one left
        with g.micro_batches("separate"):
            for micro_batch in range(2):
                mlp_loss(model, mlp_batch(0, first + micro_batch, rank)).backward()
        for micro_batch in range(2):
            expected = _mean_gradients(TASKS["mlp"], 0, first + micro_batch, world_size)
            assert_same_tensors(dict(g.full(micro_batch)), expected, atol=1e-7, what=how)
        {
            "model": model.zero_grad,
            "optimizer": optimizer.zero_grad,
            "to zero": lambda: optimizer.zero_grad(set_to_none=False),
        }[how]()
        with pytest.raises(GradientUnavailable, match=r"micro-batch 0: expected one .* \[\]"):
            dict(g.full(0))


@pytest.mark.parametrize("how", ["model", "optimizer", "to zero"])
def test_clearing_gradients_clears_what_was_kept_apart(how):
    run_on_ranks(_clear_kept, 2, how)


def _unused(rank, world_size):
    """``bonus`` is used by rank 0 in micro-batch 1 only."""
    model = shard_model(mlp())
    g = gradients(model)
    with g.micro_batches("separate"):
        for micro_batch in range(3):
            batch = mlp_batch(0, micro_batch, rank)
            outputs = model(batch["inputs"], (rank, micro_batch) == (0, 1))
            torch.nn.functional.mse_loss(outputs, batch["targets"]).backward()
    assert sorted(dict(g.full(1))) == sorted(g)
    assert g["bonus"].full(1).abs().min() > 0
    for micro_batch in (0, 2):
        assert "bonus" not in dict(g.full(micro_batch))
        with pytest.raises(GradientUnavailable, match="no rank used"):
            g["bonus"].full(micro_batch)


def test_a_micro_batch_that_no_rank_used_a_parameter_in_has_no_gradient_of_it():
    run_on_ranks(_unused, 2)


def _leftover(rank, world_size):
    model = shard_model(mlp())
    with model.no_sync():
        mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    g = gradients(model)
    with pytest.raises(RuntimeError, match="no local gradients to wait"), g.micro_batches("local"):
        pass
    with pytest.raises(ValueError, match="sum, local or separate"), g.micro_batches("apart"):
        pass
    model.zero_grad()
    for mode in ("local", "separate"):
        with contextlib.suppress(ZeroDivisionError), g.micro_batches(mode):
            mlp_loss(model, mlp_batch(0, 0, rank)).backward()
            raise ZeroDivisionError
        model.zero_grad()
        mlp_loss(model, mlp_batch(0, 0, rank)).backward()
        mean = _mean_gradients(TASKS["mlp"], 0, 0, world_size)
        assert_same_tensors(dict(g.full()), mean, atol=1e-7)
        assert not any(parameter.grad.micro_batches for parameter in model.parameters())
        model.zero_grad()


def test_micro_batches_refuses_what_it_cannot_tell_apart_and_restores_what_it_changed():
    run_on_ranks(_leftover, 2)
