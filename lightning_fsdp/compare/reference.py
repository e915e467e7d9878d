"""What is right: an unsharded model in one process, which does the work of every rank by itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_fsdp.compare.cases import Case
from lightning_fsdp.compare.models import batch_of, build, loss_of

Values = dict[str, Tensor]


class Reference:
    """A plain model. Its gradients on a rank's batch are that rank's own.

    Attributes:
        weights: By name, fp32; no communication, no sharding.
    """

    def __init__(self, case: Case, world_size: int, device: torch.device) -> None:
        self._case = case
        self._world_size = world_size
        self._device = device
        self._model = build(case.model, case.sizes).to(device)
        self._locals: dict[tuple[int, int], Values] = {}

    @property
    def weights(self) -> Values:
        """As they are now."""
        return {name: p.detach() for name, p in self._model.named_parameters()}

    def local(self, rank: int, micro_batch: int) -> Values:
        """A rank's own gradients, in the dtype that the model computes in.

        Raises:
            AssertionError: One of them is zero, so that no wrong value would be noticed.
        """
        key = (rank, micro_batch)
        if key not in self._locals:
            self._locals[key] = self._compute(*key)
        return self._locals[key]

    def mean(self, micro_batches: Sequence[int]) -> Values:
        """Over ranks, of the sum over some micro-batches; fp64, rounded once to fp32."""
        sums = [self.local_sum(rank, micro_batches) for rank in range(self._world_size)]
        return {
            name: torch.stack([s[name].double() for s in sums]).mean(0).float() for name in sums[0]
        }

    def local_sum(self, rank: int, micro_batches: Sequence[int]) -> Values:
        """A rank's own gradients over some micro-batches, added in their order in fp32."""
        return total([self.local(rank, index) for index in micro_batches])

    def move_to(self, weights: Mapping[str, Tensor]) -> None:
        """Take these weights from now on."""
        self._locals.clear()
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(weights[name])

    def _compute(self, rank: int, micro_batch: int) -> Values:
        dtype = self._case.policy.param_dtype or torch.float32
        model = copy.deepcopy(self._model).to(dtype)
        inputs, targets = (
            t.to(self._device) for t in batch_of(self._case.model, rank, micro_batch)
        )
        if inputs.is_floating_point():
            inputs = inputs.to(dtype)
        loss_of(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        gradients = {}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, f"{name}: the loss depends on every parameter"
            assert bool(parameter.grad.any()), f"{name}: a gradient of zeros shows nothing"
            gradients[name] = parameter.grad
        return gradients


def total(several: Sequence[Mapping[str, Tensor]]) -> Values:
    """The sum of several sets, added in their order in fp32."""
    result = {name: value.float() for name, value in several[0].items()}
    for values in several[1:]:
        result = {name: result[name] + value.float() for name, value in values.items()}
    return result
