"""Gradients by original name for every strategy: those of the engines, or plain ones of stock DDP.

Under DDP and on a single device parameters are whole and ``.grad`` is at hand; what is missing is
which of them were reduced, and each micro-batch's own gradient before it is added to the others.
Both are seen by hooks on the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_fsdp.core.tensors.norms import partial_norm
from lightning_fsdp.engines.access import GradientAccess, Removable
from lightning_fsdp.engines.gradients import (
    GradientFunction,
    GradientState,
    GradientUnavailable,
)


class PlainGradient:
    """The gradient of one whole parameter."""

    def __init__(self, owner: PlainGradients, name: str) -> None:
        self.name = name
        self._owner = owner

    @property
    def state(self) -> GradientState:
        """``none``; ``local``: of a backward that did not reduce; ``reduced``."""
        owner = self._owner
        if owner.parameters[self.name].grad is None:
            return "none"
        is_local = self.name in owner.unreduced or self.name in owner.never_reduced
        return "local" if is_local else "reduced"

    def local(self) -> Tensor:
        """This rank's own gradient.

        Raises:
            GradientUnavailable: There is none, or it was reduced already.
        """
        return self._in_state("local")

    @property
    def shard(self) -> Tensor:
        """``(n,)``: the part of the reduced gradient that this rank stands for.

        Raises:
            GradientUnavailable: There is no reduced gradient.
        """
        pieces = self._in_state("reduced").reshape(-1).tensor_split(self._owner.world_size)
        return pieces[self._owner.rank]

    def full(self, micro_batch: int | None = None) -> Tensor:
        """The reduced gradient, a fresh copy.

        Raises:
            GradientUnavailable: There is no reduced gradient, or one micro-batch is asked for.
        """
        if micro_batch is not None:
            raise GradientUnavailable(
                f"gradient of {self.name!r}: expected to read the sum of all micro-batches, got "
                f"micro_batch={micro_batch}, which a stock strategy does not keep."
            )
        return self._in_state("reduced").clone()

    def _in_state(self, state: GradientState) -> Tensor:
        gradient = self._owner.parameters[self.name].grad
        if gradient is None or self.state != state:
            raise GradientUnavailable(
                f"gradient of {self.name!r} (rank {self._owner.rank}): expected the {state} one, "
                f"got state {self.state!r}."
            )
        return gradient.detach()


class PlainGradients:
    """Gradients of a module that is whole on every rank.

    Attributes:
        parameters: All that can have one, by name; some may be frozen.
        unreduced: Names of gradients that the last backward left on this rank.
        never_reduced: Names of those that DDP does not know: it looks once what is frozen.
    """

    def __init__(self, trainer: pl.Trainer, module: nn.Module) -> None:
        named = module.named_parameters()
        self.parameters = {n: p for n, p in named if p.is_floating_point() or p.is_complex()}
        self.unreduced: set[str] = set()
        self.rank, self.world_size = trainer.global_rank, trainer.world_size
        frozen = {name for name, p in self.parameters.items() if not p.requires_grad}
        self.never_reduced = frozen if self.world_size > 1 else set()
        self._wrapper = trainer.strategy.model
        self._handles = self._hooked(Parameter.register_post_accumulate_grad_hook, self._noting)

    def names(self) -> list[str]:
        """Names of what is trained or has a gradient."""
        return [n for n, p in self.parameters.items() if p.requires_grad or p.grad is not None]

    def __getitem__(self, name: str) -> PlainGradient:
        return PlainGradient(self, name)

    def on_local(self, function: GradientFunction, *, edits: bool) -> Removable:
        """Call ``function(name, gradient, micro_batch)`` before a gradient is added to ``.grad``.

        ``micro_batch`` counts the gradients that came before since ``.grad`` was cleared.
        """
        assert not edits, "they are autograd's own"
        counts: dict[str, int] = {}

        def calling(name: str) -> Callable[[Tensor], None]:
            def hook(gradient: Tensor) -> None:
                is_first = self.parameters[name].grad is None
                counts[name] = 0 if is_first else counts.get(name, 0) + 1
                function(name, gradient, counts[name])

            return hook

        return self._hooked(Parameter.register_hook, calling)

    def close(self) -> None:
        """Take all hooks off."""
        self._handles.remove()

    def _hooked(
        self,
        register: Callable[[Parameter, Callable[[Tensor], None]], RemovableHandle],
        hook_of: Callable[[str], Callable[[Tensor], None]],
    ) -> _Handles:
        """Hooks on all parameters; those that are frozen call them once they are thawed."""
        handles = []
        for name, parameter in self.parameters.items():
            is_trained = parameter.requires_grad
            parameter.requires_grad_()  # torch refuses a hook on one that is frozen
            handles.append(register(parameter, hook_of(name)))
            parameter.requires_grad_(is_trained)
        return _Handles(handles)

    def _noting(self, name: str) -> Callable[[Tensor], None]:
        def hook(_parameter: Tensor) -> None:
            wrapper = self._wrapper
            if (
                self.world_size == 1
                or not isinstance(wrapper, DistributedDataParallel)
                or wrapper.require_backward_grad_sync
            ):
                # DDP reduces all that wait together, also those that this backward does not reach.
                self.unreduced.clear()
            else:
                self.unreduced.add(name)

        return hook


class _Handles:
    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


ReadableGradients: TypeAlias = GradientAccess | PlainGradients


def gradients_of(trainer: pl.Trainer, module: pl.LightningModule) -> ReadableGradients:
    """Access to the gradients of the running fit, to be given back with :func:`close`.

    Raises:
        NotImplementedError: A strategy that shards in a way of its own, named.
    """
    access: GradientAccess | None = getattr(trainer.strategy, "gradients", None)
    if access is not None:
        return access
    is_whole = isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy)
    if is_whole and not isinstance(trainer.strategy, DeepSpeedStrategy):  # which is a DDPStrategy
        return PlainGradients(trainer, module)
    raise NotImplementedError(
        f"{type(trainer.strategy).__name__}: expected a strategy whose gradients can be read by "
        "name. Use scratch_fsdp_zero3, fsdp1_zero3, fsdp2_zero3 (or their zero2), ddp, or a single "
        "device."
    )


def close(access: ReadableGradients | None) -> None:
    """End what :func:`gradients_of` began."""
    if isinstance(access, PlainGradients):
        access.close()


def square_of(gradient: Tensor) -> Tensor:
    """The sum of squares, 0-d fp64; no waiting for the device."""
    return partial_norm([gradient], 2.0, gradient.device) ** 2
