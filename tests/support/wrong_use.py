"""What tests of wrong use share."""

import torch
from torch import nn

from tests.support.models import mlp

# An answer within this many seconds is "at once"; runs of two ranks take well under one.
AT_ONCE_S = 15.0


def with_integer_parameter():
    model = mlp()
    model.second.table = nn.Parameter(torch.arange(5), requires_grad=False)
    return model
