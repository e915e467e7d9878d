"""One interface for every implementation of sharding: what a strategy asks of it.

    shard(module)  ->  no_sync, clip, hold_whole, full states in and out  ->  make_whole()

An engine holds one sharded module at a time. What does not depend on how sharding is done is here
as well: before anything is cut, all ranks agree that they hold the same module, and start from the
values of rank 0, so that ranks with different seeds train one model and not a mixture.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_fsdp.config import MixedPrecisionPolicy, plan_of_stage
from lightning_fsdp.core.tensors.norms import scale, scale_to_norm
from lightning_fsdp.engines.access import GradientAccess, WeightAccess
from lightning_fsdp.engines.gatherable import gather_all
from lightning_fsdp.engines.optimizers import refuse_foreign
from lightning_fsdp.engines.rank_grid import RankGrid, all_gather_objects
from lightning_fsdp.engines.sharded_state import ShardedState
from lightning_fsdp.units import UnitSelector, check_selector

_BROADCAST_BYTES = 2**25

OWNER = "_lightning_fsdp_engine"
"""Attribute of a sharded module: its engine, if that alone knows how to make it whole again."""


class Engine(ABC):
    """Shards one module over the default process group.

    Args:
        zero_stage: 2 or 3.
        units: Which modules are gathered at a time; see :func:`~lightning_fsdp.shard_model`.
        cpu_offload: Whether shards, reduced gradients and optimizer state live on the host.

    Attributes:
        name: Name of the engine, for messages.
        shows_whole_shapes: Whether sharded parameters show the shape of the whole, so that
            optimizers can be built after sharding.
        offers_state_over_all: Whether it can spread optimizer state over the ranks of all replicas.
        module: The sharded module; ``None`` before :meth:`shard` and after :meth:`make_whole`.
        grid: Which ranks hold one model together; set before :meth:`shard`.

    Raises:
        ValueError: There is no such stage, or a size below 1.
        TypeError: ``units`` is of no known kind.
    """

    name: ClassVar[str]
    shows_whole_shapes: ClassVar[bool] = True
    offers_state_over_all: ClassVar[bool] = False
    module: nn.Module | None

    def __init__(self, *, zero_stage: int, units: UnitSelector, cpu_offload: bool) -> None:
        self.module = None
        self.grid = RankGrid()
        self.plan = plan_of_stage(zero_stage)
        check_selector(units)  # at once, not at sharding
        self.units = units
        self.cpu_offload = cpu_offload

    @abstractmethod
    def shard(
        self, module: nn.Module, *, device: torch.device, precision: MixedPrecisionPolicy
    ) -> None:
        """Cut the module's parameters over the ranks, in place. Collective.

        Args:
            module: Parameters are real and may be on another device; shards end up on ``device``.
            device: Where this rank computes.
            precision: Dtypes of gathered weights, reduction and outputs.
        """

    @abstractmethod
    def make_whole(self, module: nn.Module) -> None:
        """Undo :meth:`shard`: plain, whole parameters on the CPU, the same objects. Collective.

        Args:
            module: What :meth:`shard` was given; nothing happens to a module that is not sharded.
        """

    @abstractmethod
    def run(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the module as if it were its forward: its own parameters are whole."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Let backwards inside keep their gradients on this rank, without communication."""

    def within_replica(self) -> AbstractContextManager[None]:
        """Let backwards inside leave the mean over replicas to a later one.

        Does nothing if there are no replicas, if the engine cannot (FSDP1), or while gradients are
        kept apart by micro-batch.
        """
        return nullcontext()

    @property
    @abstractmethod
    def keeps_apart(self) -> bool:
        """Whether ``micro_batches("separate")`` keeps what each backward reduces now."""

    def kept_parts(self) -> Iterator[Tensor]:
        """What this rank keeps of the weights beside its shards, for gathers within a replica."""
        return iter(())

    @abstractmethod
    def reduced_gradients(self, parameters: Iterable[Tensor], what: str) -> list[Tensor]:
        """What an optimizer would step with, sharing memory; without those that are ``None``.

        Args:
            parameters: As an optimizer holds them.
            what: The operation that needs them, for the message.

        Raises:
            RuntimeError: A gradient was not reduced yet.
        """

    @abstractmethod
    def norm_of(self, gradients: Sequence[Tensor], norm_type: float) -> Tensor:
        """The norm of :meth:`reduced_gradients` of all ranks as one vector. Collective.

        Returns:
            0-d, equal on every rank; fp32, or fp64 as gradients.
        """

    def clip_grad_norm_(
        self,
        parameters: Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        *,
        allows: Callable[[Tensor], bool] = lambda norm: True,
    ) -> Tensor:
        """Scale the reduced gradients of these parameters. Collective.

        Args:
            parameters: As an optimizer holds them.
            max_norm: The largest norm allowed.
            norm_type: Any p, ``inf`` included.
            allows: Called with the norm; nothing is scaled unless it returns true.

        Returns:
            Their norm before clipping, 0-d, the same on every rank.
        """
        gradients = self.reduced_gradients(parameters, "clip_grad_norm_")
        norm = self.norm_of(gradients, norm_type)
        if allows(norm):
            scale_to_norm(gradients, norm, max_norm)
        return norm

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all reduced gradients, also those kept by micro-batch, by ``factor``, 0-d."""
        if self.module is not None:
            gradients = self.reduced_gradients(self.module.parameters(), "the mean over tokens")
            scale([*gradients, *self._kept_apart()], factor)

    @abstractmethod
    def _kept_apart(self) -> Iterable[Tensor]:
        """The reduced gradients that ``micro_batches("separate")`` keeps."""

    @abstractmethod
    def hold_whole(self) -> None:
        """Gather every unit and keep it, so that evaluation needs no communication. Collective."""

    @abstractmethod
    def release_whole(self) -> None:
        """Free what :meth:`hold_whole` gathered. No communication."""

    @abstractmethod
    def read_shards_again(self) -> None:
        """Free whole copies, so that the next forward sees what was written to shards by hand."""

    @abstractmethod
    def gatherable_state_dict(self) -> dict[str, Any]:
        """The module's state dict under the original names, a ``Gatherable`` for what is sharded.

        The rest is copied to the host.
        """

    def full_state_dict(self) -> dict[str, Any]:
        """Whole, plain tensors on the CPU under the original names. Collective."""
        return gather_all(self.gatherable_state_dict())

    @abstractmethod
    def load_full_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole tensors, which every rank passes; each keeps its slices."""

    @abstractmethod
    def gatherable_optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """``optimizer.state_dict()`` as without sharding, a ``Gatherable`` for what is sharded.

        Collective.
        """

    def full_optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """What ``optimizer.state_dict()`` would be without sharding. Collective."""
        return gather_all(self.gatherable_optimizer_state_dict(optimizer))

    @abstractmethod
    def load_full_optimizer_state_dict(
        self, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load whole state, which every rank passes; each keeps its slices."""

    def sharded_state(self, module: nn.Module) -> ShardedState:
        """What this rank writes to sharded checkpoints and reads from them.

        Args:
            module: The module of :meth:`shard`; also before it and after :meth:`make_whole`.
        """
        return ShardedState(module)

    @property
    @abstractmethod
    def gradients(self) -> GradientAccess:
        """Gradients by original name."""

    @property
    @abstractmethod
    def weights(self) -> WeightAccess:
        """Parameters by original name."""

    def sharded_module(self, what: str, error: type[RuntimeError] = RuntimeError) -> nn.Module:
        """The module, for what exists only while it is sharded.

        Args:
            what: What is asked for, for the message.
            error: The class of error to raise.

        Raises:
            RuntimeError: Nothing is sharded now.
        """
        if self.module is None:
            raise error(
                f"{what} ({self.name} engine): expected a sharded module, got none. A strategy "
                "shards it for the time of a fit, validate, test or predict: ask from a hook "
                "inside. Outside, the module's own parameters are whole."
            )
        return self.module

    def with_whole_shapes(self) -> AbstractContextManager[Any]:
        """Let the module show every parameter's whole shape meanwhile; values may be missing."""
        return nullcontext()

    def before_backward(self) -> None:
        """Called before every backward."""
        return

    def after_backward(self) -> None:
        """Called after every backward."""
        return

    def end_step(self) -> None:
        """Called after an optimizer's step, also one that a gradient scaler skipped."""
        return

    def keep_optimizer(self, optimizer: Optimizer) -> None:
        """Called in an evaluation for optimizers of the fit before, which may be saved in it."""
        return

    def watch_optimizer(self, optimizer: Optimizer) -> None:
        """Called for every optimizer over the module's parameters, before its first step.

        Raises:
            ValueError: It has a parameter that the module does not have.
        """
        assert self.module is not None, "it was sharded"
        refuse_foreign(
            optimizer,
            self.module.parameters(),
            "the LightningModule",
            "It would train on each rank by itself, or not at all. Assign its module to an "
            "attribute of the LightningModule, before the optimizer is built.",
        )

    def agreeing(self, scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
        """A gradient scaler with these settings that skips a step on all ranks or on none."""
        return scaler

    def broadcast_buffers(self) -> None:
        """Give every rank the buffers of rank 0, as DDP does before a forward. Collective.

        Raises:
            ValueError: Forwards have left different shapes on some ranks; raised on every rank.
        """
        if self.module is not None:
            _refuse_different(
                self.module,
                [(n, (tuple(b.shape), _kind_of(b))) for n, b in self.module.named_buffers()],
                "Give a buffer that forwards replace one shape on all ranks, or make it a plain "
                "attribute: buffers become those of rank 0 before a validation and after a run.",
            )
            for buffer in self.module.buffers():
                _broadcast_in_place(buffer, buffer.device)


def owner_of(module: nn.Module) -> Engine | None:
    """The engine that has sharded a module; another strategy's, if that was interrupted."""
    owner: Engine | None = module.__dict__.get(OWNER)
    return owner


def agree_on_module(module: nn.Module) -> None:
    """Check that all ranks hold the same parameters and buffers. Collective.

    Raises:
        ValueError: A rank differs from rank 0 (raised on every rank, with the first difference), a
            parameter has no shape yet, or one is a DTensor already.
    """
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {name!r}: expected a shape, got an uninitialized (lazy) parameter. Run "
                "one batch through the module, in configure_model at the latest."
            )
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"parameter {name!r}: expected a plain nn.Parameter, got a DTensor (tensor "
                "parallelism), of which this rank has a part already. Use plain parameters."
            )
    mine = [
        (name, (tuple(tensor.shape), _kind_of(tensor), tensor.requires_grad))
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    ]
    _refuse_different(module, mine, "Build the same module on all ranks.")


def _refuse_different(module: nn.Module, mine: list[Any], cure: str) -> None:
    every = all_gather_objects(mine)
    for rank, theirs in enumerate(every):
        if theirs == every[0]:
            continue
        pairs = zip([*every[0], None], [*theirs, None], strict=False)
        expected, found = next((a, b) for a, b in pairs if a != b)
        raise ValueError(
            f"{type(module).__name__}: expected the same parameters and buffers on every rank, got "
            f"{expected} on rank 0 and {found} on rank {rank}. {cure}"
        )


def broadcast_from_rank0(module: nn.Module, device: torch.device) -> None:
    """Start every rank from the parameters and buffers of rank 0. Collective.

    Args:
        module: Has whole, plain tensors, the same on every rank but for their values. Those on the
            meta device have none, and get them when the module is sharded.
        device: Where the process group communicates; tensors elsewhere are copied there one by one.
    """
    with torch.no_grad():
        for _, tensor in (*module.named_parameters(), *module.named_buffers()):
            if not tensor.is_meta:
                _broadcast_in_place(tensor.data, device)


def _kind_of(tensor: Tensor) -> str:
    return f"{tensor.dtype} on meta" if tensor.is_meta else str(tensor.dtype)


def _broadcast_in_place(tensor: Tensor, device: torch.device) -> None:
    """Give every rank the values of rank 0; memory of the host is written to where they differ.

    So what ranks of a host have there once, until one of them writes, stays so; see ``on_host.py``.
    """
    whole = tensor.detach().contiguous()  # what an evaluation made takes writes only so
    if tensor.numel() > 0:
        # As bytes, as backends lack some dtypes, such as fp8.
        for mine in torch.split(whole.view(-1).view(torch.uint8), _BROADCAST_BYTES):
            _broadcast_part(mine, device)
    if not tensor.is_contiguous():  # on every rank: torch refuses to write to some (expanded ones)
        tensor.detach().copy_(whole)


def _broadcast_part(mine: Tensor, device: torch.device) -> None:
    """Make bytes, ``(n,)``, those of rank 0."""
    is_source = dist.get_rank() == 0
    on_host = mine.device.type == "cpu"  # elsewhere the host would wait for a comparison
    there = mine.to(device, copy=on_host and not is_source)
    dist.broadcast(there, src=0)
    if there is not mine and not is_source and not (on_host and torch.equal(there.cpu(), mine)):
        mine.copy_(there)
