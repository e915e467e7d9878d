"""A program's training in plain torch and sharded, and the comparison.

The plain side does every rank's work and goes first, the sharded one this rank's. What 16 bits mean
is done by hand on the plain side: its forwards run in a second model of that dtype, whose gradients
are widened before they are added up.
"""

import contextlib
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fsdp import (
    GradientUnavailable,
    full_optimizer_state_dict,
    full_state_dict,
    gradients,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from tests.support.parity import assert_same_tensors
from tests.support.programs.drawing import MicroBatch, Program, Step
from tests.support.programs.modules import Moment, build, shard
from tests.support.programs.steps import (
    Side,
    Values,
    input_of,
    make_optimizers,
    named_parameters,
    write,
)

ATOL = 2e-5  # sums may come in another order


class NotAProgram(Exception):  # noqa: N818 (nothing is wrong)
    """Plain torch refuses it."""


def run_program(rank: int, world_size: int, program: Program) -> None:
    """Train plain and sharded, and compare all that can be seen.

    Raises:
        AssertionError: They differ.
        NotAProgram: Plain torch refuses what the program does.
    """
    if "is_compiled=True" in str(program):
        torch._dynamo.reset()  # graphs of other programs count against what may be compiled
    sharded = Sharded(program, rank, world_size)
    initial = named_parameters(sharded.model)
    try:
        expected = list(Plain(program, rank, world_size, initial).train())
        in_fp32 = expected
        if program.setup.dtype != "float32":
            same_in_fp32 = replace(program, setup=replace(program.setup, dtype="float32"))
            in_fp32 = list(Plain(same_in_fp32, rank, world_size, initial).train())
    except Exception as error:
        raise NotAProgram from error
    rounding = 0.0
    for seen, (what, values), (_, wide) in zip(sharded.train(), expected, in_fp32, strict=True):
        # In 16 bits last bits tip over: as near, or so, as these bits were to fp32 so far.
        rounding = max(rounding, _largest({n: v - wide[n] for n, v in _there(values).items()}))
        atol = ATOL * max(1.0, _largest(_there(values))) + 16 * rounding
        assert_same_tensors(seen[1], values, atol=atol, what=what)


def _there(values: Values) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if value is not None and value.numel()}


def _largest(values: dict[str, Tensor]) -> float:
    return max(
        (value.abs().max().nan_to_num(math.inf).item() for value in values.values()), default=0.0
    )


class Plain(Side):
    """The oracle.

    Attributes:
        low: Computes, in the compute dtype; the model's weights are copied there.
        own: This rank's local gradients.
    """

    def __init__(self, program: Program, rank: int, world_size: int, initial: Values) -> None:
        super().__init__(program, rank, world_size)
        self.ranks = range(world_size)
        self.model, self.low = build(program), build(program)
        self.model.load_state_dict(initial, strict=False)  # without second names
        if program.setup.dtype != "float32":
            self.low.to(getattr(torch, program.setup.dtype))
        self.optimizers = make_optimizers(program, self.model)
        self.own: Values = {}
        if program.setup.edits:
            for parameter in self.low.parameters():
                needed = parameter.requires_grad
                parameter.requires_grad_(True).register_hook(lambda gradient: gradient * 0.5)
                parameter.requires_grad_(needed)

    def mode(self, step: Step) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    no_sync = contextlib.nullcontext

    def begin(self) -> None:
        self.own = dict.fromkeys(named_parameters(self.model))
        self._copy_weights()

    def before_micro_batch(self, moment: tuple[int, int], batch: MicroBatch) -> Values:
        seen = super().before_micro_batch(moment, batch)
        if batch.event == "write":
            self._copy_weights()
        return seen

    @torch.no_grad()
    def _copy_weights(self) -> None:
        for low, main in zip(self.low.parameters(), self.model.parameters(), strict=True):
            low.copy_(main)
            low.requires_grad_(main.requires_grad)

    def compute(self, hidden: Tensor, moment: Moment) -> Tensor:
        dtype = getattr(torch, self.program.setup.dtype)
        return self.low(hidden.to(dtype), moment)

    def collect(self, rank: int) -> None:
        """Widen, average and add up what a backward left."""
        main = dict(self.model.named_parameters())
        for name, low in self.low.named_parameters():
            if low.grad is None:
                continue
            gradient, low.grad = low.grad.to(main[name].dtype), None
            if rank == self.rank:
                before = self.own[name]
                self.own[name] = gradient if before is None else before + gradient
            gradient = gradient / self.world_size
            before = main[name].grad
            main[name].grad = gradient if before is None else before + gradient

    def local_gradients(self) -> Values:
        return {n: None if g is None else g.double() for n, g in self.own.items()}

    def sum_of_kept(self) -> Values:
        return {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for n, p in self.model.named_parameters()
        }

    def clip(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def after_step(self, event: str) -> Values:
        if event == "whole state dict":
            return {n: p.detach().clone() for n, p in self.model.state_dict().items()}
        if event == "whole optimizer's state dict":
            return _states_of([o.state_dict() for o in self.optimizers])
        return super().after_step(event)


class Sharded(Side):
    """What is tested.

    Attributes:
        sharded: The modules that were sharded.
    """

    def __init__(self, program: Program, rank: int, world_size: int) -> None:
        super().__init__(program, rank, world_size)
        self.ranks = range(rank, rank + 1)
        setup = program.setup
        with torch.device("meta" if setup.is_meta else "cpu"):
            self.model = build(program)
        if setup.optimizer_first:
            self.optimizers = make_optimizers(program, self.model)
        self.sharded = shard(self.model, program, world_size)
        if not setup.optimizer_first:
            self.optimizers = make_optimizers(program, self.model)
        self._edit()

    def _edit(self) -> None:
        if self.program.setup.edits:
            gradients(self.model).on_local(lambda name, gradient, micro: gradient.mul_(0.5))

    def mode(self, step: Step) -> contextlib.AbstractContextManager[None]:
        if step.mode == "no_sync":
            return contextlib.nullcontext()
        return gradients(self.model).micro_batches(step.mode)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.model.no_sync()

    def begin(self) -> None:
        """Nothing to prepare."""

    def before_micro_batch(self, moment: tuple[int, int], batch: MicroBatch) -> Values:
        number = sum(moment)
        module = self.sharded[number % len(self.sharded)]
        moment = (*moment, self.rank)
        if batch.event == "unshard":
            module.unshard(async_op=number % 2 == 0)
        elif batch.event == "reshard":
            module.reshard()
        elif batch.event == "an inner call":
            with torch.no_grad():
                module(input_of(moment), moment)
        elif batch.event == "an exception":
            handle = module.register_forward_pre_hook(_fail)
            with contextlib.suppress(ZeroDivisionError):
                self.model(input_of(moment), moment)
            handle.remove()
        return super().before_micro_batch(moment[:2], batch)

    def compute(self, hidden: Tensor, moment: Moment) -> Tensor:
        return self.model(hidden, moment)

    def collect(self, rank: int) -> None:
        """The core does it."""

    def local_gradients(self) -> Values:
        found = gradients(self.model)
        return {
            name: found[name].local().double()
            if name in found and found[name].state == "local"
            else None
            for name, _ in self.model.named_parameters()
        }

    def sum_of_kept(self) -> Values:
        found = gradients(self.model)
        total = {n: torch.zeros(p.shape, dtype=p.dtype) for n, p in self.model.named_parameters()}
        for number in range(12):  # backwards of a step, at most
            with contextlib.suppress(GradientUnavailable):
                for name, gradient in found.full(number):
                    total[name] += gradient
        return total

    def clip(self, max_norm: float) -> Tensor:
        return self.model.clip_grad_norm_(max_norm)

    def after_step(self, event: str) -> Values:
        if event == "whole state dict":
            state = full_state_dict(self.model)
            write(self.model)  # and what is loaded takes it back
            load_full_state_dict(self.model, state)
            return state
        if event == "whole optimizer's state dict":
            states = [full_optimizer_state_dict(o) for o in self.optimizers]
            self.optimizers = make_optimizers(self.program, self.model)
            for optimizer, state in zip(self.optimizers, states, strict=True):
                load_full_optimizer_state_dict(optimizer, state)
            return _states_of(states)
        seen = super().after_step(event)
        if event == "go on with a copy":
            self.sharded = [m for m in self.model.modules() if hasattr(m, "unshard")]
            self._edit()
        return seen


def _states_of(states: list[dict[str, Any]]) -> Values:
    return {
        f"{number} {index} {key}": value.clone()
        for number, state in enumerate(states)
        for index, of_parameter in state["state"].items()
        for key, value in of_parameter.items()
        if isinstance(value, Tensor)
    }


def _fail(module: nn.Module, args: Any) -> None:
    raise ZeroDivisionError
