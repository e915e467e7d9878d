"""What the probes work on: a small model, and three engines called as their users call them.

    fsdp1   torch's ``FullyShardedDataParallel``, with ``use_orig_params=True``
    fsdp2   torch's ``fully_shard``
    here    this package's ``fully_shard``

No strategy and no engine of this package is between a probe and torch. What is right is said by
plain torch in one process: the mean over ranks of an unsharded model's gradients, each on its own
rank's batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

import lightning_fsdp

LEARNING_RATE = 0.25
CPU = torch.device("cpu")
HANGS = "**hangs** until the process group's timeout"
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Two linear layers beside a residual, scaled by a buffer."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, hidden: Tensor) -> Tensor:
        scale = self.scale.to(hidden.dtype)
        return hidden + scale * self.down(torch.tanh(self.up(hidden)))


class Net(nn.Module):
    """``5 -> width -> blocks -> 3``; by default no size divides another."""

    def __init__(self, width: int = 7, inner: int = 9, depth: int = 2) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.inlet(inputs))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def encode(self, inputs: Tensor) -> Tensor:
        """A method other than forward."""
        return torch.tanh(self.inlet(inputs))


def net() -> Net:
    """The same at every call, on every rank."""
    torch.manual_seed(3)
    return Net()


def batch_of(rank: int, index: int = 0) -> Batch:
    """``(4, 5)`` inputs and ``(4, 3)`` targets; no two are alike."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return F.mse_loss(model(inputs).float(), targets)


Loss = Callable[[nn.Module, Batch], Tensor]
Units = Callable[[nn.Module], Iterable[nn.Module]]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """What each engine is told to gather at a time, beside the rest of the model."""
    return list(model.blocks)


# -- the engines -----------------------------------------------------------------------------------


class FSDP1:
    """A wrapper around each unit and around the whole."""

    name = "fsdp1"
    Precision = fsdp.MixedPrecision

    @staticmethod
    def shard(
        model: nn.Module, *, stage: int = 3, units: Units = blocks_of, **options: Any
    ) -> nn.Module:
        chosen = set(units(model))
        strategies = {2: ShardingStrategy.SHARD_GRAD_OP, 3: ShardingStrategy.FULL_SHARD}
        policy = CustomPolicy(lambda module: module in chosen)
        defaults = {"use_orig_params": True, "device_id": CPU, "auto_wrap_policy": policy}
        return FullyShardedDataParallel(
            model, sharding_strategy=strategies[stage], **(defaults | options)
        )

    @staticmethod
    def no_sync(model: nn.Module) -> AbstractContextManager[None]:
        return model.no_sync()

    @staticmethod
    def whole_weights(model: nn.Module) -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(model):
            return {_original(n): p.detach().clone() for n, p in model.named_parameters()}

    @staticmethod
    def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return {
                _original(n): p.grad.clone()
                for n, p in model.named_parameters()
                if p.grad is not None
            }


class _Composable:
    """What FSDP2 and this core have in common."""

    fully_shard: Callable[..., nn.Module]

    @classmethod
    def shard(
        cls, model: nn.Module, *, stage: int = 3, units: Units = blocks_of, **options: Any
    ) -> nn.Module:
        options = {"reshard_after_forward": None if stage == 3 else False} | options
        for unit in units(model):
            cls.fully_shard(unit, **options)
        return cls.fully_shard(model, **options)

    @staticmethod
    def whole_weights(model: nn.Module) -> dict[str, Tensor]:
        return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}

    @staticmethod
    def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
        return {
            name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None
        }


class FSDP2(_Composable):
    name = "fsdp2"
    fully_shard = staticmethod(fsdp.fully_shard)
    Precision = fsdp.MixedPrecisionPolicy

    @staticmethod
    @contextmanager
    def no_sync(model: nn.Module) -> Any:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)


class Here(_Composable):
    name = "here"
    fully_shard = staticmethod(lightning_fsdp.fully_shard)
    Precision = lightning_fsdp.MixedPrecisionPolicy

    @staticmethod
    def no_sync(model: nn.Module) -> AbstractContextManager[None]:
        return model.no_sync()


Engine = type[FSDP1] | type[FSDP2] | type[Here]
ENGINES: dict[str, Engine] = {engine.name: engine for engine in (FSDP1, FSDP2, Here)}


def _original(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


# -- what is right ---------------------------------------------------------------------------------


def mean_gradients(
    build: Callable[[], nn.Module], loss: Loss = loss_of, indices: Iterable[int] = (0,)
) -> dict[str, Tensor]:
    """Gradients of the mean over ranks, summed over micro-batches; without those of nobody."""
    total: dict[str, Tensor] = {}
    world_size = dist.get_world_size()
    for rank in range(world_size):
        model = build()
        for index in indices:
            loss(model, batch_of(rank, index)).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                mine = parameter.grad / world_size
                total[name] = total[name] + mine if name in total else mine
    return total


def weights_after_step(
    build: Callable[[], nn.Module], gradients: dict[str, Tensor]
) -> dict[str, Tensor]:
    """After plain gradient descent."""
    weights = {name: p.detach().clone() for name, p in build().named_parameters()}
    for name, gradient in gradients.items():
        weights[name] -= LEARNING_RATE * gradient
    return weights


def are_equal(found: dict[str, Tensor], right: dict[str, Tensor], tolerance: float = 1e-6) -> bool:
    """The same names, shapes and, but for rounding, values."""
    return found.keys() == right.keys() and all(
        found[name].shape == right[name].shape
        and (found[name].float() - right[name].float()).abs().max() <= tolerance
        for name in right
    )


# -- one training step, and where it fails ---------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a probe found.

    Attributes:
        said: For the table.
        detail: The message of the exception, its first 600 characters; empty without one.
    """

    said: str
    detail: str = ""


class Run:
    """One engine's model on this rank; knows what it is at, for an exception's place."""

    def __init__(self, engine: Engine, build: Callable[[], nn.Module] = net) -> None:
        self.engine, self.build = engine, build
        self.at = "when sharded"
        self.model = self.optimizer = None

    def shard(self, **options: Any) -> None:
        self.model = self.engine.shard(self.build(), **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)

    def train(self, loss: Loss = loss_of, index: int = 0) -> None:
        self.at = "in forward"
        value = loss(self.model, batch_of(dist.get_rank(), index))
        self.at = "in backward"
        value.backward()
        self.at = "afterwards"

    def step(self) -> None:
        self.at = "in the step"
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.at = "afterwards"

    def is_right(self, gradients: dict[str, Tensor], tolerance: float = 1e-6) -> bool:
        """Whether the weights are those of plain torch after a step with these gradients."""
        found = self.engine.whole_weights(self.model)
        return are_equal(found, weights_after_step(self.build, gradients), tolerance)


def told(run: Run, probe: Callable[[], str]) -> Outcome:
    """What a probe says, or the exception that ended it."""
    try:
        return Outcome(probe())
    except (Exception, CheckpointException) as error:  # noqa: BLE001 (it is what a user gets)
        message = str(error).strip()
        if "Traceback (most recent call last)" in message:  # that of a rank, with its files
            message = message.splitlines()[-1]
        said = f"`{type(error).__name__}` {run.at}"
        return Outcome(HANGS if "Timed out" in message else said, message[:600])


def one_step(engine: Engine, build: Callable[[], nn.Module], loss: Loss = loss_of) -> Outcome:
    """Shard, forward, backward, step; judged by the weights afterwards."""
    run = Run(engine, build)

    def probe() -> str:
        run.shard()
        run.train(loss)
        run.step()
        return "right" if run.is_right(mean_gradients(build, loss)) else "**wrong values**"

    return told(run, probe)
