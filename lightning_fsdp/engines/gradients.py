"""Access to gradients by original name, at any time.

    g = gradients(module)
    g["h.0.weight"].state      none: nothing yet; local: this rank's own, not reduced; reduced
    g["h.0.weight"].local()    this rank's own, original shape          (state local)
    g["h.0.weight"].shard      this rank's slice of the mean over ranks (state reduced)
    g["h.0.weight"].full()     the mean, original shape; collective     (state reduced)
    for name, whole in g.full(): ...                 one flat parameter whole at a time; collective

Nothing is kept for the sake of access, unless a mode of :meth:`Gradients.micro_batches` asks for
it. Local gradients of a backward that reduces are therefore seen only by
:meth:`Gradients.on_local`, as they arrive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, TypeVar, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_fsdp.core.engine.communicator import Communicator
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.sharded import Sharded
from lightning_fsdp.core.engine.watcher import GradientWatcher
from lightning_fsdp.core.ranks.groups import agree_on, all_gather_slices
from lightning_fsdp.core.tensors.norms import global_norm
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor, may_wait, register
from lightning_fsdp.core.tensors.unreduced_gradient import UnreducedGradient
from lightning_fsdp.engines.by_name import ByName

MicroBatchMode = Literal["sum", "local", "separate"]
GradientState = Literal["none", "local", "replica", "reduced"]
GradientFunction = Callable[[str, Tensor, int], None]
_Found = TypeVar("_Found")
GradientSet = int | Mapping[str, Tensor] | None
"""A micro-batch that was kept apart, shards by name, or ``None`` for the gradients themselves."""


class GradientUnavailable(RuntimeError):  # noqa: N818 (a public name)
    """What was asked for does not exist in the present state; the message says how to get it."""


class Gradient:
    """Access to the gradient of one parameter, as it is at the moment of asking."""

    def __init__(self, name: str, parameter: ShardedTensor) -> None:
        self.name = name
        self._parameter = parameter

    def __repr__(self) -> str:
        return f"Gradient({self.name!r}, {self.state})"

    @property
    def state(self) -> GradientState:
        """Which gradient there is.

        ``none``; ``local``: this rank's own, which waits to be reduced; ``replica``: the mean over
        this rank's replica, which waits for the mean over replicas; or ``reduced``.
        """
        gradient = self._parameter.grad
        if gradient is None:
            return "none"
        if isinstance(gradient, UnreducedGradient):
            return "replica" if gradient.own is None else "local"
        return "reduced"

    def local(self) -> Tensor:
        """This rank's own gradient: original shape, reduce dtype, not divided by anything.

        It shares memory with what will be reduced, so writing to it changes the gradient.

        Raises:
            GradientUnavailable: There is none, or it was reduced already.
        """
        gradient = self._parameter.grad
        if isinstance(gradient, UnreducedGradient) and gradient.own is not None:
            return gradient.own
        raise self._unavailable(
            "the local one",
            "see it on its way with on_local(), or keep it with no_sync() or "
            'micro_batches("local")',
        )

    @property
    def shard(self) -> Tensor:
        """This rank's slice of the reduced gradient, ``(n,)``, main dtype; may be empty.

        Raises:
            GradientUnavailable: There is no reduced gradient.
        """
        return self._reduced(None).to_local()

    def full(self, micro_batch: int | None = None) -> Tensor:
        """The reduced gradient in its original shape, main dtype, a fresh copy. Collective.

        Args:
            micro_batch: One of those kept by ``micro_batches("separate")``; default: their sum.

        Raises:
            GradientUnavailable: There is no reduced gradient, or none of that micro-batch.
        """
        communicator, what = self._parameter.spec.communicator, f"gradient of {self.name!r}"
        reduced = agree_on(communicator, what, lambda: self._reduced(micro_batch))
        return reduced.full_tensor()

    def _reduced(self, micro_batch: int | None) -> ShardedTensor:
        gradient = self._parameter.grad
        if isinstance(gradient, UnreducedGradient) or not isinstance(gradient, ShardedTensor):
            raise self._unavailable(
                "the reduced one",
                "run a backward that reduces (outside of no_sync(), with "
                "set_requires_gradient_sync(True) and set_requires_all_reduce(True); under a "
                "Trainer that of a step's last micro-batch, or any with accumulation='sum')",
            )
        if micro_batch is None:
            return gradient
        if micro_batch not in gradient.micro_batches:
            kept = sorted(gradient.micro_batches)
            raise self._unavailable(
                f"that of micro-batch {micro_batch}",
                f'run the backwards inside micro_batches("separate") (kept: {kept}; a micro-batch '
                "in which no rank used the parameter has none)",
            )
        return gradient.micro_batches[micro_batch]

    def _unavailable(self, what: str, cure: str) -> GradientUnavailable:
        rank = self._parameter.spec.communicator.mesh_rank
        return GradientUnavailable(
            f"gradient of {self.name!r} (scratch engine, rank {rank}): expected {what}, "
            f"got state {self.state!r}. To have it, {cure}."
        )


class Gradients(ByName, Mapping[str, Gradient]):
    """Gradients by original name. Made by :func:`gradients`."""

    _what = "gradients"

    def names(self) -> list[str]:
        """Original names of parameters that require a gradient, or have one.

        As in torch, one that was frozen after its backward keeps its gradient.
        """
        return [n for n, p in self.parameters.items() if p.requires_grad or p.grad is not None]

    def __getitem__(self, name: str) -> Gradient:
        parameter = self.look_up(name)
        if not parameter.requires_grad and parameter.grad is None:
            raise frozen(name)
        return Gradient(name, parameter)

    def full(self, micro_batch: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield name and whole reduced gradient of each parameter that has one. Collective.

        One flat parameter is whole at a time, unless the caller keeps what is yielded.

        Args:
            micro_batch: One of those kept by ``micro_batches("separate")``; default: their sum.

        Raises:
            GradientUnavailable: A gradient was not reduced yet.
        """
        communicator, what = self._communicator(), "whole gradients"
        yield from self.stream(agree_on(communicator, what, lambda: self.shards(micro_batch), list))

    def shards(self, micro_batch: int | None = None) -> dict[str, Tensor]:
        """This rank's slices of all reduced gradients, by name.

        Args:
            micro_batch: One of those kept by ``micro_batches("separate")``; default: their sum.

        Returns:
            ``(n,)``, main dtype, sharing memory with the gradients; may be empty. Parameters
            without a gradient are missing.

        Raises:
            GradientUnavailable: A gradient was not reduced yet, or none is of that micro-batch.
        """
        return {name: part.to_local() for name, part in self._reduced(micro_batch).items()}

    def on_local(self, function: GradientFunction, *, edits: bool = True) -> RemovableHandle:
        """Call ``function(name, gradient, micro_batch)`` with each local gradient on arrival.

        The gradient has the original shape and the compute dtype, and can be edited in place before
        it is reduced. Later gradients may be added to it, so keep a clone. A weight tied within or
        across units arrives once, with the sum of all uses. ``micro_batch`` counts backwards since
        the optimizer's last step, or since the last one that a gradient scaler skipped.

        Args:
            function: Called with each local gradient.
            edits: Whether it may write to them. If not, it gets them as autograd made them, without
                a copy.

        Returns:
            A handle that removes the function.
        """
        return self._watch("on_local", function, in_copies=edits)

    def on_reduced(self, function: GradientFunction) -> RemovableHandle:
        """Call ``function(name, shard, micro_batch)`` with each reduced gradient when it lands.

        The shard is this rank's slice, ``(n,)``, main dtype, before it is added to ``.grad``; it
        can be edited in place. Later gradients are added to it, so keep a clone. For a parameter
        that no rank used it is zeros.

        Returns:
            A handle that removes the function.
        """
        return self._watch("on_reduced", function)

    @contextlib.contextmanager
    def micro_batches(self, mode: MicroBatchMode) -> Iterator[None]:
        """Choose how the backwards inside accumulate.

        Args:
            mode: ``sum`` reduces each into the shard; ``local`` reduces once, when the context ends
                (collective); ``separate`` reduces each and also keeps it apart, a shard per
                micro-batch, until the gradients are cleared.

        Raises:
            ValueError: There is no such mode.
            RuntimeError: Local gradients of an earlier backward wait to be reduced; they belong to
                no micro-batch of this context.
        """
        check_mode(mode)
        flat_params = self.flat_params().keys()
        units = [unit for schedule in self.schedules for unit in schedule.units]
        units = [unit for unit in units if not flat_params.isdisjoint(unit.flat_params)]
        waiting = may_wait(flat_params)
        if waiting and any(
            self._communicator().any_rank([f.has_local_gradients for f in waiting])()
        ):
            raise RuntimeError(
                f"micro_batches({mode!r}): expected no local gradients to wait, got some of an "
                "earlier backward without reduction. Reduce them with the next backward, or drop "
                "them with zero_grad()."
            )
        # Micro-batches kept apart before, and not cleared, keep their numbers.
        parameters = cast(Iterable[ShardedTensor], (p for f in flat_params for p in f.parameters))
        kept = [index for parameter in parameters for index in _kept(parameter)]
        num_kept = 1 + max(kept, default=-1) if mode == "separate" else 0
        before = {unit: (unit.syncs_gradients, unit.averages_replicas) for unit in units}
        for unit in units:
            unit.syncs_gradients = mode != "local"
            unit.averages_replicas |= mode != "sum"
        for flat_param in flat_params:
            flat_param.micro_batch = num_kept
        # Not where another context, around this one, keeps them apart already.
        watched = [f for f in flat_params if mode == "separate" and not keeps_apart(f)]
        apart = register(_KeepingApart(), *(f.gradient_watchers for f in watched))
        try:
            yield
            if mode == "local":
                for schedule in self.schedules:
                    schedule.reduce_waiting()
        finally:
            for unit, flags in before.items():
                unit.syncs_gradients, unit.averages_replicas = flags
            apart.remove()

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all reduced gradients as one vector; 0-d, fp32 or wider, equal on all ranks.

        Collective.

        Raises:
            GradientUnavailable: A gradient was not reduced yet.
        """
        found = _if_reduced(self._flat_params, "norm of gradients", lambda: self._reduced(None))
        return global_norm(list(found.values()), norm_type, self._communicator())

    def dot(self, a: GradientSet, b: GradientSet = None) -> Tensor:
        """The inner product of two sets of gradients, 0-d fp64, equal on all ranks. Collective.

        Args:
            a: A micro-batch kept by ``micro_batches("separate")``, shards by name (as of
                :meth:`shards`), or ``None`` for the gradients themselves.
            b: Likewise. A name that one of them lacks counts as zero.

        Raises:
            GradientUnavailable: A gradient was not reduced yet, or none is of a micro-batch.
        """

        def of(which: GradientSet) -> Mapping[str, Tensor]:
            return which if isinstance(which, Mapping) else self.shards(which)

        first, second = _if_reduced(self._flat_params, "dot of gradients", lambda: (of(a), of(b)))
        communicator = self._communicator()
        mine = partial_dot(first, second, communicator.device)
        # Gathered and summed in rank order: an all-reduce need not give every rank the same bits.
        return all_gather_slices(communicator, mine.view(1), "dot of gradients").sum()

    def _watch(
        self, event: str, function: GradientFunction, *, in_copies: bool = False
    ) -> RemovableHandle:
        """Call a function with the gradients of those parameters that have a name here.

        Args:
            event: The method of :class:`GradientWatcher` that calls it.
            function: Called with name, gradient or shard, and micro-batch.
            in_copies: Whether it gets a copy, which it may write to, and which goes on.
        """
        names = {id(parameter): name for name, parameter in self.parameters.items()}

        def call(flat_param: FlatParameter, slot: int, gradient: Tensor) -> Tensor:
            if (name := names.get(id(flat_param.parameters[slot]))) is not None:
                gradient = gradient.clone() if in_copies else gradient
                function(name, gradient, flat_param.micro_batch)
            return gradient

        watcher = GradientWatcher()
        setattr(watcher, event, call)
        return register(watcher, *(f.gradient_watchers for f in self.flat_params()))

    def _reduced(self, micro_batch: int | None) -> dict[str, ShardedTensor]:
        """Reduced gradients by name: those that are there, or what a micro-batch added to each."""
        found: dict[str, ShardedTensor] = {}
        for name, gradient in self.items():
            if gradient.state == "none":
                continue
            total = gradient._reduced(None)
            part = total if micro_batch is None else total.micro_batches.get(micro_batch)
            if part is not None:
                found[name] = part
        if not found and micro_batch is not None:
            kept = {index for parameter in self.parameters.values() for index in _kept(parameter)}
            raise nothing_kept(micro_batch, kept)
        return found

    def _communicator(self) -> Communicator:
        return next(iter(self.parameters.values())).spec.communicator


def gradients(module: nn.Module) -> Gradients:
    """Access the gradients of a module with sharded parameters inside.

    Raises:
        ValueError: Nothing in the module is sharded.
    """
    return Gradients(module)


def partial_dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """The inner product over this rank's slices by name, 0-d fp64 on ``device``.

    A name that one of them lacks counts as zero.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for name in a:
        if name in b and a[name].numel():
            total += torch.dot(a[name].double(), b[name].double()).to(device)
    return total


def keeps_apart(flat_param: FlatParameter) -> bool:
    """Whether a ``micro_batches("separate")`` keeps its gradients apart now."""
    return any(isinstance(w, _KeepingApart) for w in flat_param.gradient_watchers.values())


def check_mode(mode: str) -> None:
    """Refuse what is not a mode of ``micro_batches``.

    Raises:
        ValueError: There is no such mode.
    """
    if mode not in get_args(MicroBatchMode):
        raise ValueError(f"micro_batches: expected sum, local or separate, got {mode!r}.")


def frozen(name: str) -> GradientUnavailable:
    """The error for the gradient of a frozen parameter."""
    return GradientUnavailable(
        f"gradient of {name!r}: expected a trainable parameter, got one with requires_grad=False. "
        "Unfreeze it before the forward."
    )


def nothing_kept(micro_batch: int, kept: Iterable[int]) -> GradientUnavailable:
    """The error for the gradients of a micro-batch that has none."""
    return GradientUnavailable(
        f"gradients of micro-batch {micro_batch}: expected one of those kept by "
        f'micro_batches("separate"), {sorted(kept)}. Run its backward inside of it.'
    )


def _kept(parameter: ShardedTensor) -> dict[int, ShardedTensor]:
    return parameter.grad.micro_batches if isinstance(parameter.grad, ShardedTensor) else {}


class _KeepingApart(GradientWatcher):
    """Keeps what each micro-batch adds, beside the sum."""

    def on_added(
        self, flat_param: FlatParameter, slot: int, gradient: Sharded, total: Sharded
    ) -> None:
        # If the sum is the first gradient itself, later ones are added to it: keep a clone.
        part = cast(ShardedTensor, gradient.clone() if total is gradient else gradient)
        kept = cast(ShardedTensor, total).micro_batches.setdefault(flat_param.micro_batch, part)
        if kept is not part:  # a second one of this micro-batch, which arrived after a reduction
            kept.add_(part)


def _if_reduced(
    flat_params: Iterable[FlatParameter], what: str, attempt: Callable[[], _Found]
) -> _Found:
    """What an attempt returns, if no rank finds a gradient that waits; else raise on every rank.

    Collective if gradients may wait: one rank may have dropped its own, which others still have.

    Args:
        flat_params: Of one model.
        what: The operation that needs the gradients, for the message.
        attempt: Raises if it finds one that waits.
    """
    return agree_on(next((f.communicator for f in may_wait(flat_params)), None), what, attempt)
