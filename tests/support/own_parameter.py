"""A LightningModule with a parameter itself, beside those of its modules."""

import torch
from torch import Tensor, nn

from tests.support.trainer import Regressor


class ScaledRegressor(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale
