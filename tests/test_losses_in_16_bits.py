"""Gradients of a head's loss in fp16, whose smallest number is 6e-8 and whose largest is 65,504."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fsdp import linear_cross_entropy

VOCABULARY, WIDTH, POSITIONS = 4000, 64, 256
SCALE = 2.0**8  # of a gradient scaler


def _plain(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits.float() if logits.dtype is torch.float16 else logits, labels)


@pytest.mark.parametrize(
    ("of_label", "size"),
    [
        pytest.param(18.5, 1.0, id="all but one class have a probability of 1e-8"),
        pytest.param(0.0, 200.0, id="the gradients of a chunk add up to 51,200"),
    ],
)
def test_it_loses_no_probability_that_is_small_and_no_sum_that_is_large(
    of_label: float, size: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = size + torch.randn(POSITIONS, WIDTH, generator=generator) / 10
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator) / 1000
    bias = torch.zeros(VOCABULARY)
    bias[0] = of_label
    inputs, labels = [x.half() for x in (hidden, weight, bias)], torch.zeros(POSITIONS).long()

    def gradients(loss: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        hidden, weight, bias = given = [x.to(dtype).requires_grad_() for x in inputs]
        scaled = SCALE * loss(hidden, weight, labels, bias)
        return [gradient.double() for gradient in torch.autograd.grad(scaled, given)]

    exact = gradients(_plain, torch.float64)
    plains, ours = (gradients(loss, torch.float16) for loss in (_plain, linear_cross_entropy))
    for name, found, plain, wanted in zip(
        ("hidden", "weight", "bias"), ours, plains, exact, strict=True
    ):
        error, plains_error = ((x - wanted).norm() / wanted.norm() for x in (found, plain))
        assert error <= max(1.1 * plains_error, 1e-2), name
    assert not ours[1].eq(0).all(1).any()
