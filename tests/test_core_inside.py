"""What user code does to its module inside of a forward, or makes of its parameters."""

import pytest
import torch
from torch import nn

from lightning_fsdp import (
    call_with,
    full_state_dict,
    fully_shard,
    gradients,
    shard_model,
    weights,
)
from tests.support.cases import each_on_ranks
from tests.support.parity import PLANS
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")


class _Net(nn.Module):
    """With a parameter of its own, and two units below."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        self.scale = nn.Parameter(torch.full((5,), 0.5))

    def forward(self, x):
        return self.layers(x) * self.scale


def _sharded(kind=_Net):
    model = kind()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def _by_hand(model, optimizer, x):
    """A step inside of a forward, as of a ``training_step``."""
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    model.clip_grad_norm_(0.1) if hasattr(model, "clip_grad_norm_") else nn.utils.clip_grad_norm_(
        model.parameters(), 0.1
    )
    optimizer.step()
    return loss.detach()


def _step_inside(rank, world_size):
    plain, model = _Net(), _sharded()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        x = torch.full((2, 5), 1.0 + step)
        expected = _by_hand(plain, optimizers[0], x)
        found = call_with(model, lambda x: _by_hand(model, optimizers[1], x), x)
        torch.testing.assert_close(found, expected)
    for name, value in full_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name])


def test_a_step_taken_inside_of_a_forward_is_that_of_a_plain_module():
    run_on_ranks(_step_inside, 2)


def _clear_inside_of_another(rank, world_size):
    model = _sharded()
    model.later = fully_shard(nn.Linear(2, 2))  # run by a schedule of its own
    model.later.register_forward_pre_hook(lambda *_: model.zero_grad())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    model.later(torch.ones(1, 2))
    return [name for name, parameter in model.named_parameters() if parameter.grad is not None]


def test_a_module_that_was_attached_after_the_sharding_is_cleared_with_the_model():
    assert run_on_ranks(_clear_inside_of_another, 2) == [[], []]


def _freeze_inside(rank, world_size):
    model = _sharded()
    call_with(model, lambda: model.requires_grad_(False))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.requires_grad_(True)
    model(torch.ones(2, 5)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_is_frozen_inside_of_a_forward_can_be_thawed_outside():
    run_on_ranks(_freeze_inside, 2)


def _frozen_as_the_optimizer_has_them(model, own, x):
    """As ``toggle_optimizer``: each of two optimizers has a backward for itself."""
    rest = list(model.layers.parameters())
    for frozen in (own, rest):
        _set_requires_grad(frozen, False)
        model(x).square().sum().backward()
        _set_requires_grad(frozen, True)


def _frozen_as_the_module_has_them(model, own, x):
    _frozen_as_the_optimizer_has_them(model, [model.scale], x)


def _frozen_for_one_of_two_graphs(model, own, x):
    _set_requires_grad(own, False)
    first = model(x).square().sum()
    _set_requires_grad(own, True)
    (first + model(2 * x).square().sum()).backward()


def _thawed(model, own, x):
    model.scale.requires_grad_(True)
    model(x).square().sum().backward()


def _frozen_for_good(model, own, x):
    model.scale.requires_grad_(False)
    model(x).square().sum().backward()


def _set_requires_grad(parameters, value):
    for parameter in parameters:
        parameter.requires_grad = value


def _freeze_and_thaw(rank, world_size, step):
    plain, model = _Net(), _sharded()
    for each in (plain, model):
        each.scale.requires_grad_(step is not _thawed)
    own, whole = [model.scale], call_with(model, lambda: model.scale)
    for scale in (1.0, 3.0):
        inputs = [torch.full((2, 5), scale + r) for r in range(world_size)]
        for x in inputs:
            step(plain, [plain.scale], x)
        call_with(model, lambda x: step(model, own, x), inputs[rank])
        assert model.scale.requires_grad == plain.scale.requires_grad == whole.requires_grad
    for each in (plain, model):  # and what was frozen inside trains again
        each.requires_grad_(True)
    for x in inputs:
        plain(x).sum().backward()
    model(inputs[rank]).sum().backward()
    for name, parameter in plain.named_parameters():
        found = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(found * world_size, parameter.grad, msg=name)


def test_what_is_frozen_or_thawed_inside_of_a_forward_is_so_from_there_on():
    steps = (_frozen_as_the_optimizer_has_them, _frozen_as_the_module_has_them)
    steps += (_frozen_for_one_of_two_graphs, _thawed, _frozen_for_good)
    each_on_ranks(_freeze_and_thaw, 2, steps)


def _build_inside(rank, world_size):
    model = _sharded()
    optimizer = call_with(model, lambda: torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(2, 5)).sum().backward()
    with pytest.raises(RuntimeError, match=r"sharded parameter 'scale', got the whole copy.*Build"):
        optimizer.step()


def test_an_optimizer_that_was_built_inside_of_a_forward_is_refused():
    run_on_ranks(_build_inside, 2)


class _Renormed(_Net):
    """As some keep the rows of a weight short."""

    def forward(self, x):
        self.scale.data = torch.renorm(self.scale.data[None], 2, 0, 1.0)[0]
        self.kept = [leaf for leaf in self.parameters(recurse=True) if leaf is not self.scale]
        return super().forward(x)


def _assign_inside(rank, world_size, plan):
    model = _Renormed()
    fully_shard(model, reshard_after_forward=plan == "zero3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match=r"'scale'.* written to in place, got another tensor"):
        train()
    assert model.kept
    for leaf in model.kept:  # others of the unit are without memory all the same
        with pytest.raises(RuntimeError, match="somebody kept the weight"):
            leaf.sum()


def test_another_tensor_for_the_data_of_a_weight_is_refused():
    each_on_ranks(_assign_inside, 2, ["zero2", "zero3"])


class _Derives(nn.Module):
    """Its state has values that are made of a parameter, and are not it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0))
        self.tied = self.weight
        self.register_state_dict_post_hook(_add_half)

    def get_extra_state(self):
        return self.weight.detach() * 2

    def set_extra_state(self, state):
        pass


def _add_half(module, state, prefix, _):
    state[prefix + "half"] = module.weight.detach().double() / 2


def _save_derived(rank, world_size):
    model = fully_shard(_Derives())
    model.copy = nn.Parameter(model.weight.detach().clone() * 3)  # made of one, after sharding
    state = full_state_dict(model)
    expected = torch.arange(6.0)
    factors = {"weight": 1, "tied": 1, "copy": 3, "half": 0.5, "_extra_state": 2}
    for name, factor in factors.items():
        wanted = (expected * factor).to(torch.float64 if name == "half" else torch.float32)
        torch.testing.assert_close(state[name], wanted, atol=0, rtol=0, msg=name)
    assert state["weight"] is state["tied"]


@pytest.mark.parametrize("world_size", [2, 4])  # some of four have no element of it
def test_values_that_are_made_of_a_parameter_are_saved_as_they_are(world_size):
    run_on_ranks(_save_derived, world_size)


def _keep_apart_twice(rank, world_size):
    model = _sharded()
    access = gradients(model)
    for scale in (1.0, 2.0):
        with access.micro_batches("separate"):
            model(torch.full((2, 5), scale)).sum().backward()
    plain = _Net()
    for number, scale in enumerate((1.0, 2.0)):
        plain.zero_grad()
        plain(torch.full((2, 5), scale)).sum().backward()
        found = access["scale"].full(micro_batch=number)
        torch.testing.assert_close(found, plain.scale.grad)


def test_micro_batches_that_are_kept_apart_in_two_contexts_have_numbers_of_their_own():
    run_on_ranks(_keep_apart_twice, 2)


_kinds = []


class _Registered(nn.Module):
    def __init_subclass__(cls, *, tag):
        _kinds.append(cls)


class _Tagged(_Registered, tag="own"):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def load_state_dict(self, state, strict=False):
        return super().load_state_dict(state, strict=strict)


def _make_anew(rank, world_size, what):
    if what == "a class with an argument":
        model = fully_shard(_Tagged())
        assert _kinds == [_Tagged]
        model.load_state_dict({"linear.bias": torch.ones(2)})  # not strict, as its class has it
        assert weights(model)["linear.bias"].full().tolist() == [1, 1]
    else:
        model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        assert type(model[:1]) is nn.Sequential
        model[:1].to(torch.float32)
        for cls in (type(model), type("Derived", (type(model),), {})):  # as parametrize derives
            assert type(cls(nn.ReLU())) is nn.Sequential


def test_classes_of_sharded_modules_serve_those_who_derive_from_them_or_call_them():
    each_on_ranks(_make_anew, 2, ["a class with an argument", "a module made anew"])


def _shared(rank, world_size):
    model = nn.Linear(3, 3)
    model.part = nn.Parameter(model.weight.data[:2])
    with pytest.raises(ValueError, match=r"own memory, got that of '(part|weight)' for"):
        fully_shard(model)


def test_parameters_that_overlap_in_memory_are_refused():
    run_on_ranks(_shared, 2)


class _Marked(_Net):
    """Reads what was set on a parameter, and sets something itself."""

    def __init__(self):
        super().__init__()
        self.scale.factor, self.scale.num_uses = 2.0, 0

    def forward(self, x):
        self.scale.num_uses += 1
        return super().forward(x) * self.scale.factor


def _read_marks(rank, world_size, plan):
    plain, model = _Marked(), shard_model(_Marked(), PLANS[plan], units=["Linear"])
    for step in range(4):
        x = torch.full((2, 5), 1.0 + step)
        for each in (plain, model):
            each.scale.factor += step
            if step == 2:
                each.double()
        x = x.to(model.scale.dtype)
        losses = [each(x).square().sum() for each in (plain, model)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(gradients(model)["scale"].full(), plain.scale.grad)
        assert model.scale.num_uses == plain.scale.num_uses == step + 1


@pytest.mark.parametrize("plan", PLANS)
def test_what_is_set_on_a_parameter_is_there_inside_of_its_forward_and_after_it(plan):
    run_on_ranks(_read_marks, 2, plan)
