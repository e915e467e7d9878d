"""A weight that somebody kept from inside a forward: an error that names it, never a crash."""

import copy

import pytest
import torch
from torch import nn

from lightning_fsdp import fully_shard
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

USES = {
    "print": repr,
    "reduce": lambda weight: weight.sum(),
    "arithmetic": lambda weight: weight + 1,
    "operand": lambda weight: nn.functional.linear(torch.ones(1, 5), weight),
    "in a list": lambda weight: torch.stack([torch.ones(5, 5), weight]),
    "view": lambda weight: weight.t(),
    "data": lambda weight: weight.data,
    "detach": lambda weight: weight.detach(),
    "index": lambda weight: weight[0],
    "numpy": lambda weight: weight.detach().numpy(),
    "source": lambda weight: torch.zeros(5, 5).copy_(weight),
    "target": lambda weight: weight.zero_(),
    "deepcopy": copy.deepcopy,
}


class _Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, inputs):
        self.kept = [self.linear.weight]  # not an attribute: that would register it
        return self.linear(inputs)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(_Keeping(), nn.Tanh(), _Keeping())


def _use_kept(rank, world_size, moment):
    model = _model()
    for block in (model[0], model[2]):
        fully_shard(block)
    fully_shard(model)
    loss = model(torch.ones(2, 5)).sum()
    if moment == "after backward":
        loss.backward()
    (kept,) = model[0].kept
    assert kept.shape == (5, 5)
    assert kept.requires_grad
    assert kept.grad is None
    messages = {}
    for name, use in USES.items():
        with pytest.raises(RuntimeError) as caught:
            use(kept)
        messages[name] = str(caught.value)
    if moment == "after forward":
        loss.backward()
    reference = _model()
    reference(torch.ones(2, 5)).sum().backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), parameter.grad)
    return messages


@pytest.mark.parametrize("moment", ["after forward", "after backward"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_kept_weight_answers_nothing_once_it_is_freed(world_size, moment):
    for messages in run_on_ranks(_use_kept, world_size, moment):
        for name, message in messages.items():
            assert "parameter '0.linear.weight'" in message, name
            assert "weights(module)[name].full()" in message, name


class _ReadsOwnWeightInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, weight):
        ctx.weight = weight  # an attribute, not save_for_backward
        ctx.save_for_backward(inputs)
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        (inputs,) = ctx.saved_tensors
        return gradient @ ctx.weight, gradient.t() @ inputs


class _Custom(nn.Linear):
    def forward(self, inputs):
        return _ReadsOwnWeightInBackward.apply(inputs, self.weight)


def _read_in_backward(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(_Custom(5, 5, bias=False), _Custom(5, 5, bias=False))
    reference = copy.deepcopy(model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for each in (model, reference):
        each(torch.ones(2, 5)).sum().backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), parameter.grad)


def test_a_weight_kept_for_the_units_own_backward_is_whole_there():
    run_on_ranks(_read_in_backward, 2)
