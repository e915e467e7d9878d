"""Gradients and weights by original name under torch's FSDP1 and FSDP2.

The same words as :mod:`lightning_fsdp.engines.gradients`. Both of torch's engines show the
optimizer a piece of the reduced gradient; this rank's own gradients they hide, and are looked up
where torch keeps them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_fsdp.core.tensors.sharded_tensor import register
from lightning_fsdp.engines.by_name import Named
from lightning_fsdp.engines.gradients import (
    GradientFunction,
    GradientSet,
    GradientState,
    GradientUnavailable,
    MicroBatchMode,
    check_mode,
    frozen,
    nothing_kept,
    partial_dot,
)

if TYPE_CHECKING:
    from lightning_fsdp.engines.native import NativeEngine


class NativeGradient:
    """The gradient of one parameter, as it is at the moment of asking."""

    def __init__(self, engine: NativeEngine, name: str) -> None:
        self.name = name
        self._engine = engine

    def __repr__(self) -> str:
        return f"NativeGradient({self.name!r}, {self.state})"

    @property
    def state(self) -> GradientState:
        """``none``; ``local``: this rank's own waits to be reduced; ``reduced``.

        Or ``replica``: the mean over this rank's replica waits for the one over the replicas.
        """
        if self._engine.unreduced(self.name) is not None:
            return "local"
        if self._engine.waits_in_replica(self.name):
            return "replica"
        return "none" if self._engine.reduced(self.name) is None else "reduced"

    def local(self) -> Tensor:
        """This rank's own gradient: original shape, not divided by anything.

        Raises:
            GradientUnavailable: There is none, or it was reduced already.
        """
        gradient = self._engine.unreduced(self.name)
        if gradient is None:
            raise self._unavailable(
                "the local one", "see it on its way with on_local(), or keep it with no_sync()"
            )
        return gradient.detach().view(self._engine.shapes[self.name])

    @property
    def shard(self) -> Tensor:
        """This rank's piece of the reduced gradient, ``(n,)``; may be empty.

        Raises:
            GradientUnavailable: There is no reduced gradient.
        """
        return self._engine.piece(self.reduced(None))

    def full(self, micro_batch: int | None = None) -> Tensor:
        """The reduced gradient in its original shape, a fresh copy. Collective.

        Args:
            micro_batch: Of those kept by ``micro_batches("separate")``.

        Raises:
            GradientUnavailable: There is no reduced gradient, or none of that micro-batch.
        """
        return self._engine.whole(self.name, self.reduced(micro_batch))

    def reduced(self, micro_batch: int | None) -> Tensor:
        """As the optimizer gets it."""
        if micro_batch is not None:
            kept = self._engine.separate
            if self.name not in kept.get(micro_batch, {}):
                raise self._unavailable(
                    f"that of micro-batch {micro_batch}",
                    f'run the backwards inside micro_batches("separate") (kept: {sorted(kept)})',
                )
            return kept[micro_batch][self.name]
        gradient = self._engine.reduced(self.name)
        if gradient is None or self.state != "reduced":
            raise self._unavailable(
                "the reduced one",
                "run a backward that reduces (outside of no_sync(); under a Trainer that of a "
                "step's last micro-batch, or any with accumulation='sum')",
            )
        return gradient

    def _unavailable(self, what: str, cure: str) -> GradientUnavailable:
        return GradientUnavailable(
            f"gradient of {self.name!r} ({self._engine.name} engine, rank {dist.get_rank()}): "
            f"expected {what}, got state {self.state!r}. To have it, {cure}."
        )


class _OfEngine(Named[nn.Parameter]):
    """What an engine has sharded, for as long as it is."""

    _error: type[RuntimeError] = RuntimeError

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:  # type: ignore[override]
        """Those that optimizers hold, by original name."""
        self._engine.sharded_module(self._what, self._error)
        return self._engine.parameters


class NativeGradients(_OfEngine, Mapping[str, NativeGradient]):
    """Gradients by original name."""

    _what = "gradients"
    _error = GradientUnavailable

    def names(self) -> list[str]:
        """Original names of what is trained or has a gradient.

        One that was frozen after its backward keeps its gradient, which counts as in torch.
        """
        reduced = self._engine.reduced
        return [n for n, p in self.parameters.items() if p.requires_grad or reduced(n) is not None]

    def __getitem__(self, name: str) -> NativeGradient:
        if not self.look_up(name).requires_grad and self._engine.reduced(name) is None:
            raise frozen(name)
        return NativeGradient(self._engine, name)

    def full(self, micro_batch: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """Name and whole reduced gradient of each parameter that has one. Collective.

        One gradient is whole at a time, unless the caller keeps what is yielded.

        Raises:
            GradientUnavailable: A gradient was not reduced yet, or none is of that micro-batch.
        """
        for name in self._present(micro_batch):
            yield name, self[name].full(micro_batch)

    def shards(self, micro_batch: int | None = None) -> dict[str, Tensor]:
        """This rank's pieces of all reduced gradients by name; without ``none``.

        Raises:
            GradientUnavailable: A gradient was not reduced yet, or none is of that micro-batch.
        """
        return {
            name: self._engine.piece(self[name].reduced(micro_batch))
            for name in self._present(micro_batch)
        }

    def _present(self, micro_batch: int | None) -> list[str]:
        if micro_batch is not None:
            if not (kept := self._engine.separate.get(micro_batch)):
                raise nothing_kept(micro_batch, self._engine.separate)
            return [name for name in self.names() if name in kept]
        return [name for name in self.names() if self[name].state != "none"]

    def on_local(self, function: GradientFunction, *, edits: bool = True) -> RemovableHandle:
        """Call ``function(name, gradient, micro_batch)`` with each local gradient on arrival.

        The gradient has the original shape and the compute dtype, and can be edited in place before
        it is reduced. Later ones may be added to it: keep a clone. Seen from the next forward on.

        Args:
            function: Called with each local gradient.
            edits: As that of the core; here gradients are copied in any case.
        """
        engine = self._engine
        return register(lambda name, g: function(name, g, engine.micro_batch), engine.local_hooks)

    def on_reduced(self, function: GradientFunction) -> RemovableHandle:
        """Call ``function(name, shard, micro_batch)`` with each reduced gradient after a backward.

        The shard is this rank's piece, ``(n,)``, before earlier micro-batches are added; it can be
        edited in place. Earlier ones are added to it: keep a clone.
        """
        engine = self._engine
        return register(lambda name, g: function(name, g, engine.micro_batch), engine.reduced_hooks)

    @contextlib.contextmanager
    def micro_batches(self, mode: MicroBatchMode) -> Iterator[None]:
        """Choose how the backwards inside accumulate.

        Args:
            mode: ``sum`` reduces each into the shard; ``separate`` also keeps each apart, until the
                gradients are cleared.

        Raises:
            ValueError: There is no such mode.
            GradientUnavailable: ``local``: torch reduces in a backward only.
        """
        check_mode(mode)
        if mode == "local":
            raise GradientUnavailable(
                f"micro_batches('local') ({self._engine.name} engine): expected a way to reduce "
                "when the context ends, but torch reduces in a backward only. Use no_sync() for "
                "all but the last micro-batch, or the scratch engine."
            )
        self._engine.micro_batch = 0
        self._engine.separate.clear()
        self._engine.keeps_apart = mode == "separate"
        try:
            yield
        finally:
            self._engine.keeps_apart = False

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all reduced gradients as one vector; 0-d, fp32 or wider, equal on all ranks.

        Collective.

        Raises:
            GradientUnavailable: A gradient was not reduced yet.
        """
        return self._engine.norm_of(list(self.shards().values()), norm_type)

    def dot(self, a: GradientSet, b: GradientSet = None) -> Tensor:
        """The inner product of two sets of gradients, 0-d fp64, equal on all ranks. Collective.

        Args:
            a: A micro-batch kept by ``micro_batches("separate")``, shards by name (as of
                :meth:`shards`), or ``None`` for the gradients themselves.
            b: Likewise. A name that one of them lacks counts as zero.
        """
        first, second = (self.shards(s) if not isinstance(s, Mapping) else s for s in (a, b))
        mine = partial_dot(first, second, self._engine.device)
        return self._engine.of_replica(mine).sum()


class NativeWeight:
    """One parameter."""

    def __init__(self, engine: NativeEngine, name: str) -> None:
        self.name = name
        self._engine = engine

    @property
    def shard(self) -> Tensor:
        """This rank's piece, ``(n,)``, main dtype, sharing memory; may be empty."""
        return self._engine.piece(self._engine.parameters[self.name])

    def full(self) -> Tensor:
        """The whole parameter in its original shape, a fresh copy. Collective."""
        return self._engine.whole(self.name, self._engine.parameters[self.name])


class NativeWeights(_OfEngine, Mapping[str, NativeWeight]):
    """Parameters by original name."""

    _what = "weights"

    def __getitem__(self, name: str) -> NativeWeight:
        self.look_up(name)
        return NativeWeight(self._engine, name)

    def full(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole value of each parameter, one whole at a time. Collective."""
        for name in self.names():
            yield name, self[name].full()
