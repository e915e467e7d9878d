"""One freshly sharded model on this rank, beside the plain one that says what is right."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from lightning_fsdp.compare.cases import Case, load_engine
from lightning_fsdp.compare.judge import (
    EXACT,
    Finding,
    Findings,
    Tolerance,
    judge,
    merge,
    tolerance_of,
)
from lightning_fsdp.compare.models import batch_of, build, loss_of
from lightning_fsdp.compare.reference import Reference, Values
from lightning_fsdp.engines.gradients import GradientUnavailable
from lightning_fsdp.engines.rank_grid import all_gather_objects

LEARNING_RATE = 0.25  # a power of two, so that a fused multiply-add rounds as two operations do


class Subject:
    """What a test works on.

    Attributes:
        names: Of all parameters, original.
        reference: What is right.
        tolerance: For reduced gradients.
        local_tolerance: For this rank's own.
    """

    def __init__(self, case: Case, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.reference = Reference(case, world_size, device)
        self.names = list(self.reference.weights)
        self.tolerance = tolerance_of(case.dtype, world_size)
        self.local_tolerance = tolerance_of(case.dtype, 1)
        # By name each is a collective of its own; the first, the last and one between will do.
        self._some = (self.names[0], self.names[len(self.names) // 2], self.names[-1])
        self._case = case
        self._device = device
        self.engine = load_engine(case.engine)(
            zero_stage=case.zero_stage, units=None, cpu_offload=False
        )
        self.model = build(case.model, case.sizes)
        parameters_before = list(self.model.parameters())
        self.engine.shard(self.model, device=device, precision=case.policy)
        # As the strategies do: where a parameter does not show its shape, its optimizer is older.
        parameters = self.model.parameters() if self.engine.shows_whole_shapes else None
        self.optimizer = SGD(parameters or parameters_before, lr=LEARNING_RATE)
        self.engine.watch_optimizer(self.optimizer)

    # -- what a training does ----------------------------------------------------------------------

    def forward(self, micro_batch: int) -> Tensor:
        """The loss of this rank's own batch."""
        inputs, targets = (
            t.to(self._device) for t in batch_of(self._case.model, self.rank, micro_batch)
        )
        outputs = self.engine.run(self.model.forward, inputs)
        return loss_of(outputs, targets)

    def backward(self, loss: Tensor) -> None:
        """As a strategy runs it."""
        self.engine.before_backward()
        loss.backward()  # type: ignore[no-untyped-call]
        self.engine.after_backward()

    def train(self, micro_batch: int) -> None:
        """Forward and backward."""
        self.backward(self.forward(micro_batch))

    def step(self, micro_batch: int) -> Values:
        """Step the optimizer on this micro-batch's gradients; what the weights should be then."""
        before, mean = self.reference.weights, self.reference.mean([micro_batch])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {name: before[name] - LEARNING_RATE * mean[name] for name in mean}

    def follow(self, right: Values) -> None:
        """Let the reference go on from the weights that the engine has now.

        Where those are wrong, it goes on from what is right: reported once is enough, and a
        reference that differed between ranks would end the test in another way on each. Collective.
        """
        shown_now = {name: whole.clone() for name, whole in self.engine.weights.full()}
        findings = judge(shown_now, right, self.tolerance)
        self.reference.move_to(
            {n: shown_now[n] if findings[n].complaint is None else right[n] for n in right}
        )

    def rest(self) -> None:
        """Ready for another test: no gradients, no micro-batches counted, weights as they are."""
        self.optimizer.zero_grad()
        self.optimizer.step()
        self.optimizer.zero_grad()

    # -- what is looked at -------------------------------------------------------------------------

    def look_at_weights(
        self,
        right: Values,
        tolerance: Tolerance = EXACT,
        since: Values | None = None,
    ) -> Findings:
        """All ways to read parameters: streamed, some by name, the ranks' pieces joined.

        Args:
            right: What they should be.
            tolerance: Of bf16: for the change, which is small beside the weight.
            since: What they were before that change.
        """
        weights = self.engine.weights
        streamed = {name: whole.clone() for name, whole in weights.full()}
        joined = join({name: weights[name].shard for name in self.names}, right)
        looks = [streamed, {**streamed, **{n: weights[n].full() for n in self._some}}, joined]
        if since is not None and tolerance.dtype == torch.bfloat16:
            looks = [{n: w - since[n] for n, w in look.items()} for look in looks]
            right = {name: value - since[name] for name, value in right.items()}
        return merge(*(judge(look, right, tolerance) for look in looks))

    def look_at_reduced(self, right: Values) -> Findings:
        """Likewise of reduced gradients; and what is reduced is no rank's own any more."""
        gradients = self.engine.gradients
        states = self.states_are("reduced")
        streamed = {name: whole.clone() for name, whole in gradients.full()}
        single = {**streamed, **{name: shown(gradients[name].full) for name in self._some}}
        joined = join(gradients.shards(), right)
        looks = [judge(found, right, self.tolerance) for found in (streamed, single, joined)]
        return merge(states, *looks, self.refused(lambda name: gradients[name].local()))

    def look_at_local(self, right: Values) -> Findings:
        """This rank's own gradients; and there is nothing reduced yet."""
        gradients = self.engine.gradients
        found = {name: shown(gradients[name].local) for name in self.names}
        return merge(
            self.states_are("local"),
            judge(found, right, self.local_tolerance),
            self.refused(lambda name: gradients[name].full()),
        )

    def states_are(self, expected: str) -> Findings:
        """What every gradient says about itself."""
        gradients = self.engine.gradients
        states = {name: gradients[name].state for name in self.names}
        return {
            name: Finding(None if state == expected else f"state {state}, expected {expected}")
            for name, state in states.items()
        }

    def refused(self, read: Callable[[str], Any]) -> Findings:
        """What does not exist is refused by name, never shown as something else."""
        return {
            name: Finding(
                None
                if isinstance(shown(functools.partial(read, name)), GradientUnavailable)
                else "a value was shown that does not exist in this state"
            )
            for name in self.names
        }


def shown(read: Callable[[], Any]) -> Any:
    """What a call gives, or its refusal."""
    try:
        return read()
    except GradientUnavailable as refusal:
        return refusal


def join(pieces: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All ranks' pieces of each tensor, one behind the other, in its shape. Collective."""
    mine = {name: piece.detach().cpu() for name, piece in pieces.items()}
    every = all_gather_objects(mine)
    joined = {}
    for name in dict.fromkeys(name for theirs in every for name in theirs):
        flat = torch.cat([theirs[name].view(-1) for theirs in every if name in theirs])
        is_whole = name in right and flat.numel() == right[name].numel()
        joined[name] = flat.view(right[name].shape) if is_whole else flat
        if name in right:
            joined[name] = joined[name].to(right[name].device)
    return joined
