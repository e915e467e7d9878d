"""The sum over ranks divided by a number of one's own, as torch's FSDP2 does it."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_fsdp import MixedPrecisionPolicy, fully_shard, gradients
from lightning_fsdp.core.ranks.agreement import ControlGroup
from tests.support.ranks import assert_errors, errors_on_ranks, run_on_ranks
from tests.support.wrong_use import AT_ONCE_S

pytestmark = pytest.mark.usefixtures("kept_ranks")

LENGTHS = (3, 8, 1, 5)  # tokens of each rank


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 4))


def _batch(rank):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(LENGTHS[rank], 5, generator=generator)
    return x, torch.randint(4, (LENGTHS[rank],), generator=generator)


def _sum(model, rank):
    x, labels = _batch(rank)
    return F.cross_entropy(model(x), labels, reduction="sum")


def _means_over_tokens(rank, world_size, shape, factor, num_backwards):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    plain = _model()
    loss = sum(_sum(plain, each) for each in range(world_size)) * num_backwards
    (loss / factor).backward()
    model = _model()
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh).set_gradient_divide_factor(factor)
    for index in range(num_backwards):
        model.set_requires_gradient_sync(index == num_backwards - 1)
        _sum(model, rank).backward()
    for (name, sharded), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            sharded.grad.full_tensor(), whole.grad, msg=lambda text, n=name: f"{n}: {text}"
        )
    return True


@pytest.mark.parametrize("num_backwards", [1, 2])
@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (2, 2)], ids=str)
def test_gradients_are_sums_divided_by_the_factor(shape, num_backwards):
    factor = float(sum(LENGTHS))
    world_size = shape[0] * (shape[1] if len(shape) > 1 else 1)
    run_on_ranks(_means_over_tokens, world_size, shape, factor, num_backwards)


def _beside_torch(rank, world_size):
    found = []
    for shard in (fully_shard, torch_fsdp.fully_shard):
        model = _model()
        shard(model[0])
        shard(model[2])
        shard(model)
        if shard is torch_fsdp.fully_shard:
            for module in (model[0], model[2], model):  # or it asks gloo for NCCL's own sum
                module.set_force_sum_reduction_for_comms(True)
        model[2].set_gradient_divide_factor(5.0)  # of this module alone
        model.set_gradient_divide_factor(3.0)
        _sum(model, rank).backward()
        found.append([p.grad.full_tensor() for p in model.parameters()])
    torch.testing.assert_close(*found)


def test_it_is_a_modules_own_as_with_torch():
    run_on_ranks(_beside_torch, 2)


def _narrow(rank, world_size):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for factor in (None, 1.0):
        model = fully_shard(_model(), mp_policy=policy)
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        _sum(model, rank).backward()
        found.append([p.grad.full_tensor() for p in model.parameters()])
    means, sums = found
    torch.testing.assert_close(sums, [world_size * mean for mean in means])


def test_narrow_gradients_are_divided_in_the_dtype_of_their_sum():
    run_on_ranks(_narrow, 2)


def _seen_and_copied(rank, world_size):
    model = fully_shard(_model())
    model.set_gradient_divide_factor(1.0)
    copied, seen = copy.deepcopy(model), {}
    gradients(model).on_reduced(lambda name, shard, _: seen.__setitem__(name, shard.clone()))
    for each in (model, copied):
        _sum(each, rank).backward()
    for (name, one), other in zip(model.named_parameters(), copied.parameters(), strict=True):
        assert torch.equal(seen[name], one.grad.to_local())
        assert torch.equal(one.grad.to_local(), other.grad.to_local())


def test_functions_see_the_divided_sum_and_copies_divide_alike():
    run_on_ranks(_seen_and_copied, 2)


def _no_number(rank, world_size):
    fully_shard(_model()).set_gradient_divide_factor(0.0)


def test_a_factor_that_is_not_positive_is_refused():
    errors = errors_on_ranks(_no_number, 1)
    assert_errors(errors, "ValueError", "set_gradient_divide_factor: expected a positive number")


def _own_counts(rank, world_size, num_agreed, ranks):
    """Some ranks divide by the tokens of their own, which they have not added up."""
    model = _model()
    for module in (model[0], model[2], model):
        fully_shard(module)
    for step in range(num_agreed + 1):
        if step == num_agreed and rank in ranks:
            for module in (model[0], model[2], model):
                module.set_gradient_divide_factor(LENGTHS[rank])
        elif num_agreed:
            model.set_gradient_divide_factor(10.0 + step)
        _sum(model, rank).backward()
        assert step < num_agreed, "ranks have divided by other numbers"
        model.zero_grad()


@pytest.mark.parametrize(("num_agreed", "ranks"), [(0, (0, 1)), (0, (1,)), (2, (0, 1))], ids=str)
def test_ranks_that_divide_by_other_numbers_all_raise(num_agreed, ranks):
    errors = errors_on_ranks(_own_counts, 2, num_agreed, ranks, timeout_s=AT_ONCE_S)
    assert_errors(errors, "RuntimeError", "ranks disagree", "set_gradient_divide_factor", "8.0")


def _one_changes_alone(rank, world_size):
    model = fully_shard(_model())
    for step in range(3):
        if step == 2 and rank == 1:
            model.set_gradient_divide_factor(5.0)
        _sum(model, rank).backward()
        model.zero_grad()


def test_a_rank_that_changes_its_number_alone_is_named_within_the_groups_timeout():
    options = {"timeout_s": AT_ONCE_S + 5, "group_timeout_s": 5.0}
    errors = errors_on_ranks(_one_changes_alone, 2, **options)
    assert_errors(errors, "RuntimeError", "within the group's timeout", "rank 1")
    assert "set_gradient_divide_factor (rank 1 of 2), about to: divide" in errors[1].message


def _in_turn(rank, world_size):
    """A number for each step, which ranks agree on once for each, and what units have of it."""
    asked = []
    model = fully_shard(_model())
    fully_shard(inner := nn.Linear(5, 5))
    agree = ControlGroup.agree

    def noted(control, occasion, statement):
        if occasion == "set_gradient_divide_factor":
            asked.append(statement)
        agree(control, occasion, statement)

    with mock.patch.object(ControlGroup, "agree", noted):
        for tokens in (None, 8.0, torch.tensor(8), 9.0):
            for module in (model, inner):
                if tokens is not None:
                    module.set_gradient_divide_factor(tokens)
            (_sum(model, rank) + inner(torch.ones(5)).sum()).backward()
    return len(asked)


def test_ranks_ask_each_other_once_for_a_new_number_only():
    assert run_on_ranks(_in_turn, 2) == [4, 4]  # of two models, two numbers
