"""Operations after sharding that mean the whole tensor: draws, comparisons, and what is refused."""

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import nn

from lightning_fsdp import gradients, shard_model
from tests.support.models import mlp, mlp_batch, mlp_loss
from tests.support.parity import whole
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")


def _reset(model):
    for module in (model.first, model.second, model.last):
        module.reset_parameters()


def _each(initialise):
    return lambda model: [initialise(parameter.detach()) for parameter in model.parameters()]


def _each_matrix(initialise):
    return lambda model: [initialise(p) for p in model.parameters() if p.ndim == 2]


DRAWS = {
    "reset_parameters": _reset,
    "init.normal_": _each(nn.init.normal_),
    "init.uniform_": _each(lambda p: nn.init.uniform_(p, -3, 5)),
    "init.trunc_normal_": _each(lambda p: nn.init.trunc_normal_(p, std=2.0, a=-1, b=1)),
    "init.xavier_normal_": _each_matrix(nn.init.xavier_normal_),
    "init.xavier_uniform_": _each_matrix(nn.init.xavier_uniform_),
    "init.kaiming_normal_": _each_matrix(nn.init.kaiming_normal_),
    "init.kaiming_uniform_": _each_matrix(nn.init.kaiming_uniform_),
    "init.constant_": _each(lambda p: nn.init.constant_(p, 0.5)),
    "init.ones_": _each(nn.init.ones_),
    "data.normal_": lambda model: [p.data.normal_(1.0, 2.0) for p in model.parameters()],
    "bernoulli_": _each(lambda p: p.bernoulli_(0.5)),
    "exponential_": _each(lambda p: p.exponential_()),
    "cauchy_": _each(lambda p: p.cauchy_()),
    "log_normal_": _each(lambda p: p.log_normal_()),
    "randn_like": _each(lambda p: p.add_(torch.randn_like(p), alpha=0.1)),
    "rand_like": _each(lambda p: p.mul_(torch.rand_like(p, dtype=torch.float64) > 0.5)),
    "geometric_": _each(lambda p: p.geometric_(0.5)),
    "random_": _each(lambda p: p.random_(3, 9)),
}


def _draw(rank, world_size):
    values = {}
    for name, draw in DRAWS.items():
        model = shard_model(mlp())
        torch.manual_seed(5 if rank == 0 else 100 + rank)
        draw(model)
        of_rank = torch.rand(1)
        values[name] = [p.full_tensor().detach() for p in model.parameters()], of_rank
    return values


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_drawn_after_sharding_are_those_of_one_process(world_size):
    by_rank = run_on_ranks(_draw, world_size)
    for name, draw in DRAWS.items():
        model = mlp()
        torch.manual_seed(5)
        draw(model)
        following = torch.rand(1)
        for rank, values in enumerate(by_rank):
            found, of_rank = values[name]
            for ours, theirs in zip(found, model.parameters(), strict=True):
                assert torch.equal(ours, theirs), (name, rank)
            torch.manual_seed(100 + rank)
            expected = following if rank == 0 else torch.rand(1)
            assert torch.equal(of_rank, expected), "the rank's own stream of numbers goes on"


def _draw_with_a_generator(rank, world_size):
    model = shard_model(mlp())
    generator = torch.Generator().manual_seed(7)
    nn.init.normal_(model.second.weight, generator=generator)
    return model.second.weight.full_tensor().detach()


def test_a_generator_may_be_given():
    plain = nn.init.normal_(torch.empty(15, 15), generator=torch.Generator().manual_seed(7))
    for ours in run_on_ranks(_draw_with_a_generator, 2):
        assert torch.equal(ours, plain)


def _draw_between_steps(rank, world_size):
    """ZeRO-2 keeps whole copies, which are not true after a draw."""
    from lightning_fsdp import ZERO2

    model, plain = shard_model(mlp(), ZERO2), mlp()
    for each in (model, plain):
        torch.manual_seed(3)
        mlp_loss(each, mlp_batch(0, 0, rank)).backward()
        each.zero_grad()
        _reset(each)
    found, expected = (mlp_loss(each, mlp_batch(0, 1, rank)) for each in (model, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_draw_is_seen_by_the_next_forward():
    run_on_ranks(_draw_between_steps, 2)


def _compare(rank, world_size):
    model = shard_model(mlp())
    weight, same = model.second.weight, copy.deepcopy(model).second.weight
    full = weight.full_tensor()
    torch.testing.assert_close(weight, same)
    torch.testing.assert_close(weight, full.clone(), check_device=False)
    found = [torch.equal(weight, same), torch.equal(weight, full), torch.equal(full, same)]
    found += [torch.equal(p, whole(p)) for p in model.parameters()]  # one without dimensions, too
    found += [bool((weight == same).all()), not weight.isnan().any(), bool(weight.any())]
    assert all(found), found
    with torch.no_grad():
        if rank == world_size - 1:
            same.to_local()[-1] = torch.nan
    assert not torch.equal(weight, same)
    assert not torch.equal(weight, torch.zeros(3))
    assert not (weight == same).all()
    assert same.isnan().any()
    assert not weight.isnan().any()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.testing.assert_close(weight, same)


def test_comparisons_are_of_whole_tensors_and_the_same_on_every_rank():
    run_on_ranks(_compare, 2)


def _advice(function):
    with pytest.raises(RuntimeError) as caught:
        function()
    return str(caught.value)


def _refuse(rank, world_size):
    model = shard_model(mlp())
    mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    gradient = model.second.weight.grad
    for refused in (gradient.argmax, gradient.median, lambda: gradient.std(0)):
        assert "full_tensor() (on every rank)" in _advice(refused)
    for array in (
        gradient.numpy,
        gradient.cpu().numpy,
        gradient.tolist,
        lambda: np.array(gradient),
        lambda: np.from_dlpack(gradient),
        lambda: gradient.apply_(lambda value: value),
        gradient.share_memory_,
        model.share_memory,
        lambda: save(model.state_dict()),  # asks for the memory of each
    ):
        advice = _advice(array)
        assert "full_tensor() on every rank" in advice
        assert "gradients(module).full()" in advice
    for name, full in gradients(model).full():  # the way that is named, and collective
        assert torch.equal(torch.from_numpy(full.numpy()), whole(model.get_parameter(name).grad))


def test_what_is_refused_names_the_way_that_fits():
    run_on_ranks(_refuse, 2)


def _print(rank, world_size):
    model = shard_model(mlp())
    with model.no_sync():
        mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    weight = model.second.weight
    shown = [str(weight), repr(weight.data), str(weight.grad)]
    mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    shown.append(f"{weight.grad}")
    for text in shown:
        assert "\n" not in text
        assert "'second.weight'" in text
        assert "(15, 15)" in text
    assert "not reduced" in shown[2]


def test_sharded_tensors_print_in_one_line():
    run_on_ranks(_print, 2)
