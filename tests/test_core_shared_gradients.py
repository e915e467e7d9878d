"""A gradient may be a view of another one that the backward still needs: it is not written to."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_fsdp import gradients, shard_model
from tests.support.one_exchange import wholes
from tests.support.parity import assert_same_tensors
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

POSITIONS, WIDTH = 64, 32


class _Shift(nn.Module):
    """The gradient of ``shift`` is that of the output, seen without its first dimension."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(POSITIONS, WIDTH))

    def forward(self, x):
        return x + self.shift.unsqueeze(0)


class _Net(nn.Module):
    """Two units below the shift, of which the upper one is left before the lower one is reached."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.shift = _Shift()

    def forward(self, x):
        x = self.first(x)
        return self.head(self.shift(x + self.second(x).tanh()))


def _net():
    torch.manual_seed(0)
    return _Net()


def _double(name, gradient, micro_batch):
    if name == "shift.shift":
        gradient.mul_(2)


def _halve_the_divisor(model):
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(0.5)


# What is done to the sharded model, and how much larger gradients are then: all, or the shift's.
CHANGES = {
    "nothing": (lambda model: None, 1, 1),
    "divided": (_halve_the_divisor, 2, 2),
    "edited_on_arrival": (lambda model: gradients(model).on_local(_double), 1, 2),
    "edited_when_reduced": (lambda model: gradients(model).on_reduced(_double), 1, 2),
}


def _compare(rank, world_size, shape):
    batches = torch.randn(
        world_size, 1, POSITIONS, WIDTH, generator=torch.Generator().manual_seed(3)
    )
    for change, (apply, factor, factor_of_shift) in CHANGES.items():
        if change == "divided" and world_size > 1:
            continue  # here the factor is that of one rank
        model, reference = _net(), _net()
        shard_model(model, units=["Linear", "_Shift"], mesh=init_device_mesh("cpu", shape))
        apply(model)
        for _ in range(3):  # the order of the units is known from the second on
            model.zero_grad()
            model(batches[rank]).square().sum().backward()
        for batch in batches:
            (reference(batch).square().sum() / world_size).backward()
        names = [name for name, _ in reference.named_parameters()]
        found = dict(zip(names, wholes([p.grad for p in model.parameters()]), strict=True))
        expected = {
            name: p.grad * (factor_of_shift if name == "shift.shift" else factor)
            for name, p in reference.named_parameters()
        }
        assert_same_tensors(found, expected, atol=1e-4, what=f"{change}: gradient")


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1)], ids=str)
def test_gradients_that_are_views_leave_others_alone(shape):
    run_on_ranks(_compare, shape[0] * shape[1], shape)
