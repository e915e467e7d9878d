"""What a user holds after sharding: the same Parameter objects, original shapes outside, a 1-D
slice inside.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_fsdp import ZERO2, ZERO3, fully_shard, shard_model
from tests.support.models import (
    TASKS,
    causal_lm,
    lm_loss,
    mlp,
    mlp_batch,
    mlp_loss,
    tied_lm,
    token_batch,
)
from tests.support.parity import assert_same_tensors, whole
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")


def _look_at_parameters(rank, world_size, plan):
    for build in (mlp, causal_lm, tied_lm):
        model, reference = build(), build()
        before = dict(model.named_parameters())
        for name, parameter in before.items():
            parameter.mark = name
        assert shard_model(model, plan) is model
        _assert_sharded_like(model, reference, before, world_size)
    batch = token_batch(0, 0, rank)
    with torch.no_grad():
        lm_loss(model, batch)
    _assert_sharded_like(model, reference, before, world_size)
    loss = lm_loss(model, batch)
    _assert_sharded_like(model, reference, before, world_size)
    loss.backward()
    _assert_sharded_like(model, reference, before, world_size)
    for name, parameter in model.named_parameters():
        assert type(parameter.grad).__name__ == "ShardedTensor", name
        assert parameter.grad.shape == parameter.shape
        assert parameter.grad.to_local().shape == parameter.to_local().shape


def _assert_sharded_like(model, reference, before, world_size):
    parameters, expected = dict(model.named_parameters()), dict(reference.named_parameters())
    assert list(parameters) == list(expected)
    for name, parameter in parameters.items():
        theirs = expected[name]
        assert parameter is before[name], f"{name}: another object"
        assert parameter.mark == name, "what the user put on it"
        assert isinstance(parameter, nn.Parameter), name
        assert type(parameter).__name__ == "ShardedTensor", name
        assert parameter.shape == theirs.shape, name
        assert parameter.ndim == theirs.ndim, name
        assert parameter.numel() == theirs.numel(), name
        assert parameter.dtype == theirs.dtype, name
        assert parameter.device == theirs.device, name
        assert parameter.requires_grad == theirs.requires_grad, name
        assert parameter.is_leaf, name
        local = parameter.to_local()
        assert local.ndim == 1, name
        assert local.numel() <= theirs.numel(), name
        assert not hasattr(local, "to_local"), name
        whole = parameter.full_tensor()
        assert torch.equal(whole, theirs), f"{name}: another value"
        assert not hasattr(whole, "full_tensor"), name


@pytest.mark.parametrize("plan", [ZERO2, ZERO3], ids=["zero2", "zero3"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameters_keep_identity_shape_and_value(world_size, plan):
    run_on_ranks(_look_at_parameters, world_size, plan)


def _collect_slices(rank, world_size):
    model = fully_shard(mlp())
    return {name: p.to_local().detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_slices_of_all_ranks_are_the_tensor(world_size):
    """Every element is on exactly one rank, in order, and the ranks' loads differ by little."""
    by_rank = run_on_ranks(_collect_slices, world_size)
    for name, parameter in mlp().named_parameters():
        joined = torch.cat([slices[name] for slices in by_rank])
        assert torch.equal(joined, parameter.detach().contiguous().flatten()), name
    loads = [sum(piece.numel() for piece in slices.values()) for slices in by_rank]
    num_elements = sum(loads)
    assert max(loads) <= num_elements / world_size + 64


def _padding_of(tensors):
    """The elements of the tensors' storages that belong to none of them."""
    by_storage = {}
    for tensor in tensors:
        local = tensor.to_local().detach()
        by_storage.setdefault(local.untyped_storage().data_ptr(), []).append(local)
    rest = []
    for pieces in by_storage.values():
        whole = pieces[0].new_empty(0).set_(pieces[0].untyped_storage())
        is_padding = torch.ones(whole.numel(), dtype=torch.bool)
        for piece in pieces:
            is_padding[piece.storage_offset() : piece.storage_offset() + piece.numel()] = False
        rest.append(whole[is_padding])
    return torch.cat(rest)


def _look_at_padding(rank, world_size):
    model, padding = fully_shard(mlp()), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for step in range(2):
        poison = [torch.full((size,), torch.nan) for size in range(50, 400, 3)]
        del poison  # what is allocated next and not written to is not zero
        mlp_loss(model, mlp_batch(step, 0, rank)).backward()
        padding["gradients"] = _padding_of([p.grad for p in model.parameters()])
        optimizer.step()
        padding["parameters"] = _padding_of(model.parameters())
        optimizer.zero_grad()
    return padding


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_padding_is_zero(world_size):
    by_rank = run_on_ranks(_look_at_padding, world_size)
    for name in ("parameters", "gradients"):
        padding = torch.cat([padding[name] for padding in by_rank])
        # Up to 32 elements for each of ten parameters and each shard.
        assert 0 < padding.numel() <= 32 * (10 + world_size), name
        assert torch.equal(padding, torch.zeros_like(padding)), name


def _freeze_some(rank, world_size):
    task = TASKS["lm"]
    model, reference = causal_lm(), causal_lm()
    for each in (model, reference):
        each.embedding.requires_grad_(False)
        each.blocks[1].requires_grad_(False)
        each.blocks[2].norm_1.requires_grad_(False)
    shard_model(model)
    task.loss(model, task.make_batch(0, 0, 0)).backward()
    task.loss(reference, task.make_batch(0, 0, 0)).backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert ours.requires_grad == theirs.requires_grad, name
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            assert torch.allclose(ours.grad.full_tensor(), theirs.grad, atol=1e-6), name


def test_frozen_parameters_stay_frozen():
    run_on_ranks(_freeze_some, 2)


def _ignore_some(rank, world_size, plan, shard):
    """Ignored parameters stay plain and whole; their gradients are this rank's own."""
    model, reference, alone = mlp(), mlp(), mlp()
    model.second.table = nn.Parameter(torch.arange(5), requires_grad=False)
    names = {"second.weight", "scale", "second.table"}
    ignored = {model.get_parameter(name) for name in names}
    if shard == "shard_model":
        shard_model(model, plan, ignored_params=ignored)
    else:
        reshard_after_forward = plan is ZERO3
        fully_shard(
            model.second, reshard_after_forward=reshard_after_forward, ignored_params=ignored
        )
        fully_shard(model, reshard_after_forward=reshard_after_forward, ignored_params=ignored)
    assert {n for n, p in model.named_parameters() if type(p) is nn.Parameter} == names
    assert ignored == {model.get_parameter(name) for name in names}
    for micro_batch in range(2):
        mlp_loss(model, mlp_batch(0, micro_batch, rank)).backward()
        mlp_loss(alone, mlp_batch(0, micro_batch, rank)).backward()
        for r in range(world_size):
            (mlp_loss(reference, mlp_batch(0, micro_batch, r)) / world_size).backward()
    for name, expected in reference.named_parameters():
        ours = model.get_parameter(name).grad
        if name in names:
            assert torch.equal(ours, alone.get_parameter(name).grad), name
            assert not torch.allclose(ours, expected.grad), "the ranks' data differ"
        else:
            torch.testing.assert_close(ours.full_tensor(), expected.grad, rtol=0, atol=1e-7)


@pytest.mark.parametrize("shard", ["shard_model", "fully_shard"])
@pytest.mark.parametrize("plan", [ZERO2, ZERO3], ids=["zero2", "zero3"])
def test_ignored_parameters_stay_plain_and_are_not_reduced(plan, shard):
    run_on_ranks(_ignore_some, 2, plan, shard)


def _pointwise(rank, world_size, mode):
    model, reference = shard_model(mlp()), mlp()
    with mode():
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            got = (ours * 2 + ours.abs().sqrt()).full_tensor()
            assert torch.equal(got, theirs * 2 + theirs.abs().sqrt())
            assert torch.equal(torch.zeros_like(ours).full_tensor(), torch.zeros_like(theirs))
            assert torch.equal(ours.detach().clone().full_tensor(), theirs)
            # A whole tensor beside a sharded one: each rank uses its slice of it.
            plain = torch.arange(theirs.numel(), dtype=torch.float32).view(theirs.shape)
            assert torch.equal((ours + plain).full_tensor(), theirs + plain)
            assert torch.equal((plain - ours).full_tensor(), plain - theirs)
            (power,) = torch._foreach_pow(2.0, [ours])
            assert torch.equal(power.full_tensor(), 2.0**theirs)
            masked = ours.clone().masked_fill_(ours > 0.1, 3.0)
            assert torch.equal(masked.full_tensor(), theirs.masked_fill(theirs > 0.1, 3.0))
            # What torch composes of other operations.
            assert torch.equal(torch.negative(ours).double().full_tensor(), -theirs.double())
            assert torch.isclose(ours, theirs).all()
            with pytest.raises(RuntimeError, match="expected a whole tensor"):
                ours.view_as(torch.zeros(1, theirs.numel()))
            with pytest.raises(RuntimeError, match="expected a whole tensor"):
                nn.functional.rrelu(ours, training=True)  # draws
            before = plain.clone()
            for write in (plain.add_, plain.copy_):
                with pytest.raises(RuntimeError, match="expected a whole tensor"):
                    write(ours)  # a part of it is here
            assert torch.equal(plain, before)
    mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    assert "ShardedTensor" in repr(next(model.parameters()))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_pointwise_operations_run_on_slices(mode):
    run_on_ranks(_pointwise, 2, mode)


def _shard_what_is_held(rank, world_size):
    """Rank 0 alone keeps a broadcast that has ended, whose work refers to the parameters."""
    model = causal_lm(seed=rank)
    works = [dist.broadcast(p, 0, async_op=True) for p in model.parameters()]
    for work in works:
        work.wait()
    if rank > 0:
        works.clear()
    shard_model(model)
    lm_loss(model, token_batch(0, 0, rank)).backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def test_parameters_that_another_thread_may_hold_are_sharded_on_every_rank():
    """As a transport's thread does for a moment after a broadcast."""
    reference = causal_lm(seed=0)
    for rank in range(2):
        (lm_loss(reference, token_batch(0, 0, rank)) / 2).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    for gradients in run_on_ranks(_shard_what_is_held, 2):
        assert_same_tensors(gradients, expected, atol=1e-6)


def _keep_a_graph(rank, world_size):
    model = mlp()
    losses = [mlp_loss(model, mlp_batch(0, 0, rank)) for _ in range(2)]
    losses[0].backward()
    model.zero_grad()
    shard_model(model)
    expected = [p.full_tensor() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"before fully_shard.*Run the forward again"):
        losses[1].backward()
    mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    assert all(p.grad is not None for p in model.parameters())
    for parameter, before in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.full_tensor(), before)


def test_the_backward_of_a_graph_from_before_sharding_is_refused():
    run_on_ranks(_keep_a_graph, 2)


def _differentiate_outside(rank, world_size, how):
    model = mlp()
    model.bonus.requires_grad_(how != "thawed")
    model = shard_model(model)
    if how == "copied":
        model = copy.deepcopy(model)
    elif how == "converted":
        model.double()
    term = model.requires_grad_().bonus.exp() * (rank + 1)
    with pytest.raises(RuntimeError, match=r"'bonus'.*outside of its unit's forward.*call_with"):
        term.backward(torch.ones(term.shape, dtype=term.dtype))
    assert model.bonus.grad is None


@pytest.mark.parametrize("how", ["sharded", "thawed", "copied", "converted"])
def test_a_backward_to_what_was_read_outside_of_a_forward_is_refused(how):
    """Its gradient would be that of each rank's own loss, not the mean."""
    run_on_ranks(_differentiate_outside, 2, how)


def _shard_without_gradients(rank, world_size):
    for context in (torch.no_grad, torch.inference_mode):
        model, reference = mlp(), mlp()
        with context():
            shard_model(model)
        mlp_loss(model, mlp_batch(0, 0, rank)).backward()
        for other in range(world_size):
            (mlp_loss(reference, mlp_batch(0, 0, other)) / world_size).backward()
        for name, parameter in reference.named_parameters():
            ours = model.get_parameter(name).grad
            assert (ours is None) == (parameter.grad is None), name
            if ours is not None:
                torch.testing.assert_close(ours.full_tensor(), parameter.grad, rtol=0, atol=1e-6)
        torch.optim.AdamW(model.parameters()).step()


def test_a_model_that_is_sharded_where_gradients_are_off_trains():
    run_on_ranks(_shard_without_gradients, 2)
