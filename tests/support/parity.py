"""Training in plain torch on one process, training of a sharded model on a rank, and the comparison
of the two.

Both give a ``Trace``: losses, gradients and parameters after every optimizer step, whole and in
their original shapes. The reference joins what the ranks had: ``batches[step][micro_batch][rank]``.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fsdp import ZERO2, ZERO3
from tests.support.models import TASKS, Batch, mlp_batch

PLANS = {"zero2": ZERO2, "zero3": ZERO3}

# Of kernels that other addresses in memory make choose another order of their sums.
ATOL_ON_CUDA = 3e-5

LossFunction = Callable[[nn.Module, Batch], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Its steps are proportional to the gradient: a wrong divisor shows."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Its weight decay moves parameters that got zeros for a gradient; a large eps keeps noise from
    being amplified.
    """
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, eps=1e-6)


OPTIMIZERS: dict[str, MakeOptimizer] = {"sgd": sgd, "adamw": adamw}


@dataclass
class Trace:
    """What a training run left, step by step; gradients are those the optimizer's step saw."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    parameters: list[dict[str, Tensor]] = field(default_factory=list)

    def record(self, model: nn.Module) -> None:
        self.gradients.append({name: whole(p.grad) for name, p in model.named_parameters()})

    def record_step(self, model: nn.Module, loss: float) -> None:
        self.losses.append(loss)
        self.parameters.append({name: whole(p) for name, p in model.named_parameters()})


def whole(tensor: Tensor | None) -> Tensor | None:
    """A plain copy in the original shape, whatever kind of sharded tensor it is; collective if it
    is one.
    """
    if tensor is None:
        return None
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def make_batches(
    make_batch: Callable[[int, int, int], Batch],
    *,
    num_steps: int,
    num_micro_batches: int,
    world_size: int,
) -> list[list[list[Batch]]]:
    """``batches[step][micro_batch][rank]``."""
    return [
        [
            [make_batch(step, micro, rank) for rank in range(world_size)]
            for micro in range(num_micro_batches)
        ]
        for step in range(num_steps)
    ]


def join(batches: Sequence[Batch]) -> Batch:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def train_reference(
    model: nn.Module,
    batches: list[list[list[Batch]]],
    loss_of: LossFunction,
    make_optimizer: MakeOptimizer,
    *,
    clip: tuple[float, float] | None = None,
    joined: bool = True,
) -> Trace:
    """Train unsharded on what all ranks had together.

    Args:
        clip: Maximal norm and its p.
        joined: One forward on the joined batch; else one per rank, and the mean of their losses.
    """
    trace, optimizer = Trace(), make_optimizer(model.parameters())
    for step in batches:
        loss_sum = 0.0
        for micro_batch in step:
            parts = [join(micro_batch)] if joined else micro_batch
            loss = sum(loss_of(model, part) for part in parts) / len(parts) / len(step)
            loss.backward()
            loss_sum += loss.item()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), *clip)
        _finish_step(trace, model, optimizer, loss_sum)
    return trace


def train_on_rank(
    model: nn.Module,
    batches: list[list[list[Batch]]],
    loss_of: LossFunction,
    optimizer: Optimizer,
    rank: int,
    *,
    accumulation: str = "local",
    clip: tuple[float, float] | None = None,
) -> Trace:
    """Train a sharded model on this rank's part of the batches.

    Args:
        accumulation: ``local`` reduces with the last micro-batch only, ``sum`` with each, and
            ``replica`` with each within the replica, over the replicas with the last only.
    """
    trace = Trace()
    for step in batches:
        loss_sum = 0.0
        for index, micro_batch in enumerate(step):
            is_last = index == len(step) - 1
            is_local = accumulation == "local" and not is_last
            if accumulation == "replica":
                model.set_requires_all_reduce(is_last)
            with model.no_sync() if is_local else contextlib.nullcontext():
                loss = loss_of(model, micro_batch[rank]) / len(step)
                loss.backward()
            loss_sum += loss.item()
        if clip:
            model.clip_grad_norm_(*clip)
        _finish_step(trace, model, optimizer, loss_sum)
    return trace


def _finish_step(trace: Trace, model: nn.Module, optimizer: Optimizer, loss: float) -> None:
    trace.record(model)
    optimizer.step()
    optimizer.zero_grad()
    trace.record_step(model, loss)


def assert_traces_match(actual: Trace, expected: Trace, *, atol: float, what: str = "") -> None:
    """Every gradient and parameter of every step within ``atol``; ``atol=0`` means bit for bit."""
    assert len(actual.parameters) == len(expected.parameters) > 0, (
        f"{what}: another number of steps"
    )
    for step, (ours, theirs) in enumerate(zip(actual.gradients, expected.gradients, strict=True)):
        assert_same_tensors(ours, theirs, atol=atol, what=f"{what} gradient, step {step}")
    for step, (ours, theirs) in enumerate(zip(actual.parameters, expected.parameters, strict=True)):
        assert_same_tensors(ours, theirs, atol=atol, what=f"{what} parameter, step {step}")


def assert_same_tensors(
    actual: dict[str, Tensor | None],
    expected: dict[str, Tensor | None],
    *,
    atol: float,
    what: str = "",
) -> None:
    """Same names, shapes, dtypes, the same ones None, and values within ``atol``; names the worst
    offender. On CUDA, values within ``ATOL_ON_CUDA`` at least.
    """
    atol = _atol_for(expected, atol)
    assert list(actual) == list(expected), (
        f"{what}: names {list(actual)}, expected {list(expected)}"
    )
    worst, worst_name = 0.0, ""
    for name, theirs in expected.items():
        ours = actual[name]
        if ours is None or theirs is None:
            assert ours is theirs, f"{what} {name!r}: {_word(ours)}, expected {_word(theirs)}"
            continue
        assert ours.shape == theirs.shape, f"{what} {name!r}: {ours.shape}, expected {theirs.shape}"
        assert ours.dtype == theirs.dtype, f"{what} {name!r}: {ours.dtype}, expected {theirs.dtype}"
        if atol == 0 and torch.equal(ours, theirs):
            continue
        difference = (ours.double() - theirs.double()).abs().max().item() if ours.numel() else 0.0
        difference = math.inf if math.isnan(difference) else difference
        if difference >= worst:
            worst, worst_name = difference, name
    matches = worst_name == "" if atol == 0 else worst <= atol
    assert matches, f"{what} {worst_name!r}: off by {worst:.3g}, allowed {atol:.3g}"


def assert_ranks_agree(traces: Sequence[Trace], what: str = "") -> None:
    """Whole gradients and parameters must be the same bits on every rank."""
    for rank, trace in enumerate(traces[1:], start=1):
        assert_traces_match(trace, traces[0], atol=0, what=f"{what} rank {rank} against rank 0:")


def assert_losses_match(traces: Sequence[Trace], expected: Trace, *, atol: float) -> None:
    """The ranks' mean loss is the reference's loss on the joined batch."""
    atol = _atol_for(expected.parameters[0], atol)
    for step, theirs in enumerate(expected.losses):
        mean = sum(trace.losses[step] for trace in traces) / len(traces)
        assert abs(mean - theirs) <= atol, f"step {step}: mean loss {mean}, expected {theirs}"


def _atol_for(expected: dict[str, Tensor | None], atol: float) -> float:
    is_on_cuda = any(tensor is not None and tensor.is_cuda for tensor in expected.values())
    return max(atol, ATOL_ON_CUDA) if is_on_cuda else atol


def on_host(trace: Trace) -> Trace:
    """The same with all tensors on the host."""
    gradients = [{n: None if g is None else g.cpu() for n, g in s.items()} for s in trace.gradients]
    parameters = [{name: p.cpu() for name, p in step.items()} for step in trace.parameters]
    return Trace(trace.losses, gradients, parameters)


def _word(tensor: Tensor | None) -> str:
    return "None" if tensor is None else "a tensor"


COMBINATIONS = list(itertools.product(PLANS, OPTIMIZERS))


def batches_for(task_name, world_size, *, num_steps=None, num_micro_batches=2):
    """Steps by default: three backwards at least, as the third of a model is as any later one."""
    num_steps = num_steps or (2 if num_micro_batches > 1 else 3)
    return make_batches(
        TASKS[task_name].make_batch,
        num_steps=num_steps,
        num_micro_batches=num_micro_batches,
        world_size=world_size,
    )


def optional_batch(users):
    """``users[step]``: the ranks that use ``bonus`` in that step."""

    def make(step, micro_batch, rank):
        return {**mlp_batch(step, micro_batch, rank), "use_bonus": rank in users[step]}

    return make


def optional_loss(model, batch):
    outputs = model(batch["inputs"], batch["use_bonus"])
    return 0.25 * torch.nn.functional.mse_loss(outputs, batch["targets"])
