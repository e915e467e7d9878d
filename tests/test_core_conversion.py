"""A sharded module goes to another dtype as a plain one does; parameters keep their identity."""

import pytest
import torch
from torch import nn

from lightning_fsdp import fully_shard, gradients, shard_model
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor
from tests.support.models import TASKS, causal_lm, mlp, mlp_batch, mlp_loss
from tests.support.parity import PLANS, assert_same_tensors, whole
from tests.support.ranks import assert_errors, errors_on_ranks, run_on_ranks
from tests.support.wrong_use import AT_ONCE_S

pytestmark = pytest.mark.usefixtures("kept_ranks")


def _in_double(batch):
    """Not the targets: the loss is taken in fp32, and older torches mix no dtypes there."""
    return {**batch, "inputs": batch["inputs"].double()}


def _train(model, world, optimizer):
    """Two steps; of each the mean over ``world`` of the losses of its ranks."""
    for step in range(2):
        for rank in world:
            (mlp_loss(model, _in_double(mlp_batch(step, 0, rank))) / len(world)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _convert(rank, world_size, plan):
    model, plain = shard_model(mlp(), PLANS[plan]), mlp()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    before = list(model.parameters())
    seen = []
    gradients(model).on_local(lambda name, gradient, index: seen.append(gradient.dtype))
    mlp_loss(model, mlp_batch(0, 0, rank)).backward()  # ZeRO-2 keeps whole copies of it
    for each in range(world_size):
        (mlp_loss(plain, mlp_batch(0, 0, each)) / world_size).backward()
    for module in (model, plain):
        module.double()
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert_same_tensors(
        {name: whole(p.grad) for name, p in model.named_parameters()},
        {name: p.grad for name, p in plain.named_parameters()},
        atol=1e-6,
    )
    for module in (model, plain):
        module.zero_grad()
    seen.clear()
    _train(model, [rank], optimizers[0])
    _train(plain, range(world_size), optimizers[1])
    assert set(seen) == {torch.float64}
    assert_same_tensors(
        {name: whole(p) for name, p in model.named_parameters()},
        {name: whole(p) for name, p in plain.named_parameters()},
        atol=1e-12,
    )


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_module_in_double_trains_as_a_plain_one(world_size, plan):
    run_on_ranks(_convert, world_size, plan)


def _convert_a_unit(rank, world_size):
    task = TASKS["tied_lm"]
    model = shard_model(causal_lm(tied=True))
    model.blocks[1].to(torch.bfloat16).float()
    model.blocks[1].to(torch.bfloat16)
    assert {p.dtype for p in model.blocks[1].parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.blocks[0].parameters()} == {torch.float32}
    model.to(torch.bfloat16)
    task.loss(model, task.make_batch(0, 0, rank)).backward()
    for parameter in model.parameters():
        assert isinstance(parameter, ShardedTensor)
        assert parameter.grad.to_local().dtype == torch.bfloat16
    assert model.head.weight is model.embedding.weight


def test_units_and_tied_weights_can_be_converted():
    run_on_ranks(_convert_a_unit, 2)


def _assign(rank, world_size):
    model, other = fully_shard(mlp()), mlp(seed=4)
    before = list(model.parameters())
    model.load_state_dict(other.state_dict(), assign=True)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs)
    model.load_state_dict(fully_shard(mlp(seed=5)).state_dict(), assign=True)
    for ours, theirs in zip(model.parameters(), mlp(seed=5).parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs)
    mlp_loss(model, mlp_batch(0, 0, rank)).backward()


def test_a_state_that_is_assigned_is_taken_in():
    run_on_ranks(_assign, 2)


def _step_in_backward(rank, world_size, plan):
    """An optimizer for each parameter, which steps in its hook and drops the gradient."""
    model, plain = shard_model(mlp(), PLANS[plan]), mlp()
    called = []

    def hook_of(name, optimizer):
        def hook(parameter):
            called.append(name)
            optimizer.step()
            optimizer.zero_grad()

        return hook

    for name, parameter in model.named_parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        parameter.register_post_accumulate_grad_hook(hook_of(name, optimizer))
    expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        called.clear()
        # Rank 0 alone uses ``bonus``, and in the last step nobody.
        uses_bonus = [step < 2 and r == 0 for r in range(world_size)]
        with model.no_sync():
            model(mlp_batch(step, 0, rank)["inputs"], uses_bonus[rank]).sum().backward()
        assert not called
        model(mlp_batch(step, 1, rank)["inputs"], uses_bonus[rank]).sum().backward()
        names = {name for name, _ in model.named_parameters()}
        assert len(called) == len(set(called))
        assert set(called) == (names if step < 2 else names - {"bonus"})
        assert all(parameter.grad is None for parameter in model.parameters())
        for micro_batch in range(2):
            for each in range(world_size):
                outputs = plain(mlp_batch(step, micro_batch, each)["inputs"], uses_bonus[each])
                (outputs.sum() / world_size).backward()
        expected.step()
        expected.zero_grad()
        assert_same_tensors(
            {name: whole(p) for name, p in model.named_parameters()},
            {name: whole(p) for name, p in plain.named_parameters()},
            atol=1e-5,
        )


@pytest.mark.parametrize("plan", PLANS)
def test_an_optimizer_may_step_in_the_backward(plan):
    run_on_ranks(_step_in_backward, 2, plan)


def _remove(rank, world_size):
    model, called = fully_shard(mlp()), []
    handle = model.mix.register_post_accumulate_grad_hook(called.append)
    mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    assert len(called) == 1
    assert called[0] is model.mix
    assert called[0].grad.full_tensor().abs().sum() > 0
    handle.remove()
    mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    assert len(called) == 1


def test_the_hook_of_a_gradient_can_be_removed():
    run_on_ranks(_remove, 2)


def _hook_before_conversion(rank, world_size):
    model, called = fully_shard(mlp()), []
    model.mix.register_post_accumulate_grad_hook(called.append)
    model.double()
    mlp_loss(model, _in_double(mlp_batch(0, 0, rank))).backward()
    assert called == [model.mix]


def test_hooks_of_gradients_outlive_a_conversion():
    run_on_ranks(_hook_before_conversion, 2)


def _to_other_dtypes(rank, world_size, num_steps, ranks):
    """Of the same width: what they gathered of each other would be taken for numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    for module in (*model, model):
        fully_shard(module)
    for _ in range(num_steps):
        model(torch.ones(2, 6)).sum().backward()
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    try:
        if rank in ranks:
            model.to((torch.float16, torch.bfloat16)[rank])
        with torch.no_grad():
            model(torch.ones(2, 6, dtype=model[0].weight.dtype))
    finally:
        for parameter, local in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter.to_local(), local), "it is as it was"


@pytest.mark.parametrize(("num_steps", "ranks"), [(0, (1,)), (0, (0, 1)), (2, (0, 1))], ids=str)
def test_ranks_that_convert_to_other_dtypes_all_raise(num_steps, ranks):
    given = _to_other_dtypes, 2, num_steps, ranks
    errors = errors_on_ranks(*given, timeout_s=AT_ONCE_S)
    assert_errors(errors, "RuntimeError", "ranks disagree", "convert to torch.bfloat16")
