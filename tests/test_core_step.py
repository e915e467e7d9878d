"""An optimizer's step computes on plain slices, and nothing outside of it can tell."""

import functools

import pytest
import torch
from torch import nn

from lightning_fsdp import full_optimizer_state_dict, shard_model
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor
from tests.support.models import mlp, mlp_batch, mlp_loss
from tests.support.parity import optional_batch, optional_loss
from tests.support.ranks import run_on_ranks
from tests.test_core_optimizers import ELEMENTWISE

pytestmark = pytest.mark.usefixtures("kept_ranks")

KINDS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}
OPTIMIZERS = ELEMENTWISE | {
    f"{name} {kind}": functools.partial(make, **options)
    for kind, options in KINDS.items()
    for name, make in {
        "adamw maximize": lambda p, **o: torch.optim.AdamW(p, lr=1e-3, maximize=True, **o),
        "sgd decayed": lambda p, **o: torch.optim.SGD(
            p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1, **o
        ),
        "sgd": lambda p, **o: torch.optim.SGD(p, lr=0.1, **o),
    }.items()
}
for kind in ("fused", "loop"):  # torch refuses it for foreach
    OPTIMIZERS[f"adamw tensor lr {kind}"] = functools.partial(
        lambda p, **o: torch.optim.AdamW(p, lr=torch.tensor(1e-3), **o), **KINDS[kind]
    )

# Users of the optional parameter, step by step; torch's fused SGD starts all momenta at once.
USERS = [set(), {0, 1}, set(), {0, 1}]
ALWAYS_USED = [{0, 1}] * 4


def _local(value):
    return value.to_local() if isinstance(value, ShardedTensor) else value


def _groups(parameters):
    """Two groups; a plain parameter among sharded ones, and one that has no gradient at first."""
    parameters = list(parameters)
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.2}]


def _step_beside_bare_slices(rank, world_size):
    for name, make in OPTIMIZERS.items():
        model = mlp()
        shard_model(model, ignored_params={model.mix})
        model.last.bias.requires_grad_(False)
        parameters = list(model.parameters())
        bare = [nn.Parameter(_local(p.detach()).clone()) for p in parameters]
        optimizer, reference = make(_groups(parameters)), make(_groups(bare))
        users = ALWAYS_USED if name.startswith("sgd") and name.endswith("fused") else USERS
        for step in range(4):
            optional_loss(model, optional_batch(users)(step, 0, rank)).backward()
            for parameter, each in zip(parameters, bare, strict=True):
                gradient = parameter.grad
                each.grad = None if gradient is None else _local(gradient).clone()
            assert (model.bonus.grad is not None) == bool(users[step])
            optimizer.step()
            reference.step()
            optimizer.zero_grad()
            for parameter, each in zip(parameters, bare, strict=True):
                assert torch.equal(_local(parameter.detach()), each.detach()), name
            _assert_same_state(optimizer, reference, name)


def _assert_same_state(optimizer, reference, name):
    ours, theirs = optimizer.state_dict(), reference.state_dict()
    assert ours["param_groups"] == theirs["param_groups"], name
    assert ours["state"].keys() == theirs["state"].keys(), name
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, expected in theirs["state"].items():
        found = ours["state"][index]
        assert found.keys() == expected.keys(), name
        for key, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(_local(found[key]), value), f"{name}: {key}"
                is_count = key in {"step", "eta", "mu", "mu_product"}
                is_sharded = isinstance(parameters[index], ShardedTensor) and not is_count
                assert isinstance(found[key], ShardedTensor) == is_sharded, f"{name}: {key}"
            else:
                assert found[key] == value, name


def test_every_step_gives_the_bits_and_the_state_of_a_step_over_plain_slices():
    run_on_ranks(_step_beside_bare_slices, 2)


def _operations_on_sharded(rank, world_size):
    """How many operations of the second step pass through ``ShardedTensor``, by optimizer."""
    counts = {}
    dispatch = ShardedTensor.__torch_dispatch__
    for name, make in OPTIMIZERS.items():
        model = shard_model(mlp())
        optimizer = make(model.parameters())
        for step in range(2):
            mlp_loss(model, mlp_batch(step, 0, rank)).backward()
            seen = []
            ShardedTensor.__torch_dispatch__ = classmethod(
                lambda cls, func, *rest, seen=seen: seen.append(func) or dispatch(func, *rest)
            )
            try:
                optimizer.step()
            finally:
                ShardedTensor.__torch_dispatch__ = dispatch
        counts[name] = seen
    return counts


def test_no_operation_of_a_step_passes_through_the_sharded_tensor():
    for name, seen in run_on_ranks(_operations_on_sharded, 1)[0].items():
        assert seen == [], name


def _raise_in_step(rank, world_size):
    """The second group's math fails; then the closure does. Afterwards all goes on."""
    for kind in (torch.optim.AdamW, functools.partial(torch.optim.SGD, momentum=0.9)):
        model = shard_model(mlp())
        parameters = list(model.parameters())
        optimizer = kind(_groups(parameters), lr=0.01)
        mlp_loss(model, mlp_batch(0, 0, rank)).backward()
        optimizer.step()
        optimizer.param_groups[1]["lr"] = "fast"
        with pytest.raises(TypeError):
            optimizer.step()
        optimizer.param_groups[1]["lr"] = 0.01
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        assert "step" not in vars(optimizer)
        assert "_init_group" not in vars(optimizer)
        found = [p for group in optimizer.param_groups for p in group["params"]]
        assert [id(p) for p in found] == [id(p) for p in parameters[::2] + parameters[1::2]]
        assert {id(p) for p in optimizer.state} == {id(p) for p in parameters}
        assert len(optimizer.state_dict()["state"]) == len(parameters)
        before = parameters[0].full_tensor()
        optimizer.step()
        assert not torch.equal(before, parameters[0].full_tensor())


def test_a_step_that_raises_leaves_the_optimizer_as_it_was():
    run_on_ranks(_raise_in_step, 2)


def _closure(rank, world_size):
    """A closure sees the user's optimizer and parameters; its unreduced gradients are refused."""
    model = shard_model(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def closure():
        optimizer.zero_grad()
        loss = mlp_loss(model, mlp_batch(0, 0, rank))
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses[2] < losses[0]
    before = {name: p.full_tensor() for name, p in model.named_parameters()}
    with model.no_sync(), pytest.raises(RuntimeError, match="expected a reduced gradient"):
        optimizer.step(closure)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), before[name]), name


def test_a_closure_runs_among_sharded_parameters_and_must_reduce():
    run_on_ranks(_closure, 2)


def _hooks_and_scheduler(rank, world_size):
    """Hooks get the optimizer itself, and a gradient that one replaces is the one that counts."""
    model = shard_model(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen = []

    def ones_for_gradients(stepping, args, kwargs):
        seen.append(stepping)
        for group in stepping.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)

    optimizer.register_step_pre_hook(ones_for_gradients)
    optimizer.register_step_post_hook(lambda stepping, args, kwargs: seen.append(stepping))
    before = {name: p.full_tensor() for name, p in model.named_parameters()}
    for _ in range(2):
        mlp_loss(model, mlp_batch(0, 0, rank)).backward()
        optimizer.step()
        scheduler.step()
    assert all(each is optimizer for each in seen)
    assert len(seen) == 4
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), before[name] - 1.5)


def test_step_hooks_and_schedulers_work_on_the_optimizer_itself():
    run_on_ranks(_hooks_and_scheduler, 2)


class NormedSGD(torch.optim.SGD):
    """Scales each gradient by its norm: on plain slices it would be another one."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            parameters, gradients, momenta = [], [], []
            self._init_group(group, parameters, gradients, momenta)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient / gradient.norm())


def _derived(rank, world_size):
    model, reference = shard_model(mlp()), mlp()
    optimizers = [NormedSGD(m.parameters(), lr=0.1) for m in (model, reference)]
    mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    for each in range(world_size):
        (mlp_loss(reference, mlp_batch(0, 0, each)) / world_size).backward()
    for optimizer in optimizers:
        optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)


def test_an_optimizer_derived_from_a_known_one_is_not_given_slices():
    run_on_ranks(_derived, 2)


def _set_by_hand(rank, world_size):
    """Whole state put in place of sharded state between steps counts, and is saved whole."""
    model, reference = shard_model(mlp()), mlp()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(3):
        mlp_loss(model, mlp_batch(step, 0, rank)).backward()
        for each in range(world_size):
            (mlp_loss(reference, mlp_batch(step, 0, each)) / world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:  # the state was looked through before
            for each, optimizer in zip((model, reference), optimizers, strict=True):
                for parameter in each.parameters():
                    optimizer.state[parameter]["exp_avg"] = torch.ones(parameter.shape)
    found, expected = full_optimizer_state_dict(optimizers[0]), optimizers[1].state_dict()
    torch.testing.assert_close(found["state"], expected["state"])


def test_state_set_by_hand_is_that_of_all_ranks():
    run_on_ranks(_set_by_hand, 2)
