"""Ranks that disagree about models, plans, the order of units or collectives: an error on each."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_fsdp import (
    ZERO2,
    ZERO3,
    fully_shard,
    gradients,
    shard_model,
)
from tests.support.models import MLP, causal_lm, lm_loss, mlp, mlp_batch, mlp_loss, token_batch
from tests.support.ranks import assert_errors, errors_on_ranks, run_on_ranks
from tests.support.wrong_use import AT_ONCE_S, with_integer_parameter


class _Wider(MLP):
    def __init__(self):
        super().__init__()
        self.second = nn.Linear(15, 15, bias=False)


def _other_shape():
    model = mlp()
    model.first = nn.Linear(7, 16)
    return model


def _other_order():
    model = mlp()
    model.first, first = nn.Identity(), model.first
    del model.first
    model.first = first
    return model


def _frozen():
    model = mlp()
    model.second.requires_grad_(False)
    return model


OTHER_MODELS = {
    "another shape": _other_shape,
    "a missing parameter": _Wider,
    "another order": _other_order,
    "another dtype": lambda: mlp().double(),
    "frozen elsewhere": _frozen,
    "an integer parameter": with_integer_parameter,
}


def _ranks_differ(rank, world_size, what, shard):
    """The last rank has another model. Whatever happens, the model must be what it was."""
    model = OTHER_MODELS[what]() if rank == world_size - 1 else mlp()
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    try:
        (shard_model if shard == "shard_model" else fully_shard)(model)
    finally:
        for name, parameter in model.named_parameters():
            same, value = before[name]
            assert parameter is same, f"half-sharded: {name} is another object"
            assert type(parameter) is nn.Parameter, f"half-sharded: {name} is a {type(parameter)}"
            assert torch.equal(parameter, value), f"half-sharded: {name} has another value"
        if what == "another shape" and rank == 0:
            mlp_loss(model, mlp_batch(0, 0, rank)).backward()  # no hook is left


@pytest.mark.parametrize("shard", ["shard_model", "fully_shard"])
@pytest.mark.parametrize("what", OTHER_MODELS)
def test_ranks_with_different_models(what, shard):
    errors = errors_on_ranks(_ranks_differ, 3, what, shard, timeout_s=AT_ONCE_S)
    assert_errors(errors, "RuntimeError ValueError TypeError", "rank")
    if what == "an integer parameter":
        assert_errors(errors, "RuntimeError ValueError TypeError", "second.table")


def _ranks_differ_in_policy(rank, world_size, what):
    model = mlp()
    if what == "precision":
        dtype = torch.bfloat16 if rank else torch.float16
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    elif what == "stage":
        shard_model(model, ZERO2 if rank else ZERO3)
    elif rank:
        fully_shard(model)
    else:
        fully_shard(model.first)


@pytest.mark.parametrize("what", ["precision", "stage", "units"])
def test_ranks_with_different_plans(what):
    errors = errors_on_ranks(_ranks_differ_in_policy, 2, what, timeout_s=AT_ONCE_S)
    assert_errors(errors, "RuntimeError ValueError", "rank")


class _Branches(nn.Module):
    """Two layers whose order a rank may choose."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, inputs, swapped=False):
        first, second = (self.right, self.left) if swapped else (self.left, self.right)
        return second(torch.tanh(first(inputs)))


def _mesh_of_two(rank, world_size, timeout_s):
    """Over each two ranks: pairs wait at once."""
    pairs, timeout = torch.arange(world_size).view(-1, 2).tolist(), timedelta(seconds=timeout_s)
    groups = [dist.new_group(pair, backend="gloo", timeout=timeout) for pair in pairs]
    return DeviceMesh.from_group(groups[rank // 2], "cpu")


HOWS = ["swaps", "skips one", "leaves out the last reduction"]


def _disagree_in_order(rank, world_size, num_agreed_steps, timeout_s):
    """Of each two ranks, the second disagrees, in the way of the pair."""
    mesh, how, rank = _mesh_of_two(rank, world_size, timeout_s), HOWS[rank // 2], rank % 2
    torch.manual_seed(0)
    model = _Branches()
    for module in (model.left, model.right, model):
        fully_shard(module, mesh=mesh)
    values = {name: p.full_tensor() for name, p in model.named_parameters()}
    inputs = torch.ones(2, 32) * (rank + 1)
    for _ in range(num_agreed_steps):
        model(inputs).sum().backward()
        model.zero_grad()
    dist.barrier()
    try:
        if how == "leaves out the last reduction":
            model.left.set_requires_gradient_sync(rank != 1)
            model(inputs).sum().backward()
        elif how == "skips one":
            (model(inputs) if rank != 1 else model.left(inputs)).sum().backward()
        else:
            model(inputs, swapped=rank == 1).sum().backward()
    finally:
        if num_agreed_steps == 0:
            # Nothing moved: what a rank holds is still a slice of the old values.
            for name, parameter in model.named_parameters():
                local = parameter.to_local()
                flat = values[name].flatten()
                start = 0 if rank == 0 else flat.numel() - local.numel()
                assert torch.equal(local, flat[start : start + local.numel()]), name


def test_ranks_that_disagree_in_the_first_step():
    given = _disagree_in_order, 2 * len(HOWS), 0, 2 * AT_ONCE_S
    errors = errors_on_ranks(*given, timeout_s=AT_ONCE_S)
    assert_errors(errors[:4], "RuntimeError", "rank", "right")
    assert_errors(errors[4:], "RuntimeError", "rank", "left", "ask about 2 parameters")


def test_a_rank_that_leaves_the_order_later_is_named_within_the_groups_timeout():
    given = _disagree_in_order, 2 * len(HOWS), 2, 5.0
    assert_errors(errors_on_ranks(*given, timeout_s=AT_ONCE_S + 5), "RuntimeError", "rank 1")


def _freeze_in_turn(rank, world_size, how):
    """The second rank trains less, or another part, of as many elements in a region of its own."""
    model = _Branches()
    model.right.requires_grad_(how == "less")
    fully_shard(model)
    model.left.requires_grad_(rank == 0)
    model.right.requires_grad_(how == "less" or rank == 1)
    model(torch.ones(2, 32)).sum().backward()


@pytest.mark.parametrize("how", ["less", "another part"])
def test_ranks_that_freeze_other_parameters_of_a_unit(how):
    errors = errors_on_ranks(_freeze_in_turn, 2, how, timeout_s=AT_ONCE_S)
    assert_errors(errors, "RuntimeError", "right.weight", "left.weight", "freeze the same")


COLLECTIVES = {
    "norm of gradients": lambda model: model.clip_grad_norm_(1.0),
    "dot of gradients": lambda model: gradients(model).dot(None),
    "full_tensor of 'head.weight'": lambda model: model.head.weight.full_tensor(),
    "GradScaler's search for inf": lambda model: _unscale(model),
    "order of units": lambda model: _ask_who_used(model),
}


def _unscale(model):
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(model.parameters()))


def _ask_who_used(model):
    model.head.weight.spec.communicator.any_rank([False])()


def _enter_alone(rank, world_size):
    """Of each two ranks, the first enters the collective of the pair."""
    what, timeout_s = list(COLLECTIVES)[rank // 2], 5.0  # of groups that shard and train before
    model = shard_model(causal_lm(), mesh=_mesh_of_two(rank, world_size, timeout_s))
    dist.barrier()
    lm_loss(model, token_batch(0, 0, rank)).backward()
    dist.barrier()
    if rank % 2 == 0:
        with pytest.raises(RuntimeError, match=rf"^{what} \(rank 0 of 2\).*: expected every rank"):
            COLLECTIVES[what](model)
    dist.barrier()


def test_a_collective_that_another_rank_does_not_enter_names_itself():
    run_on_ranks(_enter_alone, 2 * len(COLLECTIVES))
