"""A program's steps, as a plain and a sharded model take them alike.

``Side.train`` reads the program. It yields what there is to see on the way: gradients, parameters,
copies; each with a name for messages.
"""

import contextlib
import copy
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support.parity import whole
from tests.support.programs.drawing import MicroBatch, Program, Step
from tests.support.programs.modules import WIDTH, Moment

Values = dict[str, Tensor | None]
Observation = tuple[str, Values]


class Side:
    """A model with all that trains it.

    Attributes:
        ranks: Whose work is done here.
    """

    model: nn.Module
    ranks: range

    def __init__(self, program: Program, rank: int, world_size: int) -> None:
        self.program, self.rank, self.world_size = program, rank, world_size
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=program.setup.scales)
        self.optimizers: list[torch.optim.Optimizer] = []

    def train(self) -> Iterator[Observation]:
        average = None
        if self.program.setup.averages:
            average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        for number, step in enumerate(self.program.steps):
            yield from self.run_micro_batches(number, step)
            yield from self.step_optimizers(number, step)
            yield f"parameters after step {number}", named_parameters(self.model)
            yield f"{step.event} after step {number}", self.after_step(step.event)
            if average is not None:
                average.update_parameters(self.model)
        yield "parameters", named_parameters(self.model)
        if average is not None:
            yield "averages", named_parameters(average.module)

    def run_micro_batches(self, number: int, step: Step) -> Iterator[Observation]:
        forwards: list[tuple[int, dict[int, tuple[Tensor, Tensor]]]] = []
        is_local = step.mode == "no_sync"
        with self.mode(step):
            self.begin()
            for micro, batch in enumerate(step.micro_batches):
                what = f"step {number}, micro-batch {micro}"
                yield f"{batch.event} in {what}", self.before_micro_batch((number, micro), batch)
                by_rank = {r: self.forward((number, micro, r), step) for r in self.ranks}
                forwards.append((micro, by_rank))
                if step.in_flight:
                    continue
                yield f"input's gradient of {what}", self.backward(step, *forwards.pop())
                is_local &= not _syncs(step, micro) and batch.event not in ("clear", "zero")
                if is_local:
                    yield f"local gradients of {what}", self.local_gradients()
            for micro, by_rank in forwards:
                yield f"an input's gradient of step {number}", self.backward(step, micro, by_rank)
        if step.mode == "separate" and not self.overflows(step):
            yield f"gradients kept apart in step {number}", self.sum_of_kept()

    def step_optimizers(self, number: int, step: Step) -> Iterator[Observation]:
        optimizers = self.optimizers
        if self.scaler.is_enabled():  # torch's raises for an optimizer without gradients
            optimizers = [o for o in optimizers if _has_gradients(o)]
            for optimizer in optimizers:
                self.scaler.unscale_(optimizer)
        if not self.overflows(step):
            if step.max_norm is not None:
                yield f"norm of step {number}", {"norm": self.clip(step.max_norm)}
            yield f"gradients of step {number}", _gradients(self.model)
        for optimizer in optimizers:
            self.scaler.step(optimizer)
        if optimizers:
            self.scaler.update()
        for each in [self.model] if step.clears_module else self.optimizers:
            each.zero_grad(set_to_none=step.sets_to_none)

    def overflows(self, step: Step) -> bool:
        return step.overflows and self.scaler.is_enabled()

    def forward(self, moment: Moment, step: Step) -> tuple[Tensor, Tensor]:
        """The input, and the losses, one per column."""
        _, micro, rank = moment
        hidden = input_of(moment).requires_grad_(self.program.setup.input_needs_grad)
        evaluates = step.micro_batches[micro].evaluates
        if evaluates != "none":
            with getattr(torch, evaluates)():
                self.compute(hidden, moment)
        losses = torch.tanh(self.compute(hidden, moment).float()).square().mean(0)
        is_last = micro == len(step.micro_batches) - 1 and rank == self.world_size - 1
        return hidden, losses * (math.inf if is_last and self.overflows(step) else 1.0)

    def backward(self, step: Step, micro: int, by_rank: dict[int, tuple[Tensor, Tensor]]) -> Values:
        """Returns the gradient of this rank's input."""
        batch = step.micro_batches[micro]
        is_local = step.mode == "no_sync" and not _syncs(step, micro)
        with self.no_sync() if is_local else contextlib.nullcontext():
            for rank, (hidden, losses) in by_rank.items():
                if not losses.requires_grad:
                    continue
                losses = losses / len(step.micro_batches)
                if batch.has_penalty:
                    (slope,) = torch.autograd.grad(losses.sum(), hidden, create_graph=True)
                    losses = losses + 0.1 * slope.square().sum()
                losses = self.scaler.scale(losses)
                parts = [losses[:2], losses[2:]] if batch.num_backwards == 2 else [losses]
                for number, part in enumerate(parts):
                    part.sum().backward(retain_graph=number < len(parts) - 1)
                    self.collect(rank)
        return {} if self.overflows(step) else {"input": by_rank[self.rank][0].grad}

    def before_micro_batch(self, moment: tuple[int, int], batch: MicroBatch) -> Values:
        if batch.event == "write":
            write(self.model)
        elif batch.event in ("clear", "zero"):
            self.model.zero_grad(set_to_none=batch.event == "clear")
        copied = copy.deepcopy(self.model) if batch.event == "copy" else self.model
        return named_parameters(copied) if batch.event == "copy" else {}

    def after_step(self, event: str) -> Values:
        if event == "write":
            write(self.model)
        elif event == "freeze":
            first = next(self.model.parameters())
            first.requires_grad_(not first.requires_grad)
        elif event == "go on with a copy":
            self.model, self.optimizers = copy.deepcopy((self.model, self.optimizers))
        elif event == "state dict":
            self.model.load_state_dict(self.model.state_dict())
        elif event == "optimizer's state dict":
            states = copy.deepcopy([optimizer.state_dict() for optimizer in self.optimizers])
            self.optimizers = make_optimizers(self.program, self.model)
            for optimizer, state in zip(self.optimizers, states, strict=True):
                optimizer.load_state_dict(state)
        elif event == "copy":
            return named_parameters(copy.deepcopy(self.model))
        return {}


def make_optimizers(program: Program, model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters, number = list(model.parameters()), program.setup.num_optimizers
    kinds: dict[str, Any] = {
        "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "adamw": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3),
        "fused adamw": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, fused=True),
        "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, eps=1e-2),
    }
    parts = [parameters[start::number] for start in range(number)]
    return [kinds[program.setup.optimizer](part) for part in parts if part]


def named_parameters(model: nn.Module) -> Values:
    """Whole, and copies. Collective, if they are sharded."""
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def _gradients(model: nn.Module) -> Values:
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _syncs(step: Step, micro: int) -> bool:
    return step.micro_batches[micro].syncs or micro == len(step.micro_batches) - 1


def input_of(moment: Moment) -> Tensor:
    number, micro, rank = moment
    generator = torch.Generator().manual_seed(100 * number + 10 * micro + rank)
    return torch.randn(3, WIDTH, generator=generator)


@torch.no_grad()
def write(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.9)
