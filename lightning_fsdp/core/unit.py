"""One unit: gathers its parameters, frees them, collects gradients, reduces them. Knows no hook.

A unit is what one module needs whole at once. It drives the life of its segments' whole copies and
of their gradients, one legal step after another; when to take a step is the schedule's business.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_fsdp.config import PrecisionPolicy
from lightning_fsdp.core import torch_internals
from lightning_fsdp.core.collectives import Communicator, Pending
from lightning_fsdp.core.lifecycle import GradientState, ParameterState, take_step
from lightning_fsdp.core.segment import Site, WholeSegment, accumulate
from lightning_fsdp.core.sharded_tensor import ShardedTensor

_log = logging.getLogger(__name__)


class Unit:
    """The parameters that one module (or a few that run one after another) needs whole at once.

    Attributes:
        name: Original name of the first module.
        modules: The modules whose forward needs the parameters.
        wholes: One per segment used.
        reshard_after_forward: See :class:`~lightning_fsdp.config.ShardingPlan`.
        reshard_after_backward: Likewise.
        syncs_gradients: Whether a backward reduces gradients over the ranks.
        needs_backward_gather: False where the backward reads no weight (plain embeddings).
        has_leaves_installed: Whether the modules hold the leaves now, not the sharded parameters.
        parameter_state: Life of the whole copy.
        gradient_state: Life of the local gradients.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        wholes: Sequence[WholeSegment],
        communicator: Communicator,
        *,
        policy: PrecisionPolicy,
        reshard_after_forward: bool | None,
        reshard_after_backward: bool,
    ) -> None:
        self.name = name
        self.modules = tuple(modules)
        self.wholes = tuple(wholes)
        self.communicator = communicator
        self.policy = policy
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = reshard_after_backward
        self.syncs_gradients = True
        self.needs_backward_gather = not all(_is_plain_embedding(m) for m in self.modules)
        self.parameter_state = ParameterState.SHARDED
        self.gradient_state = GradientState.NONE
        self.has_leaves_installed = False
        self.on_arrival: Callable[[Unit], None] = _ignore
        self._gathers: list[Pending] = []
        self._reductions: list[tuple[WholeSegment, Pending]] = []
        self._gathered_versions: list[int] = []

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.parameter_state.value}, {self.gradient_state.value})"

    def parameters(self) -> Iterator[ShardedTensor]:
        """The sharded parameters that the unit uses."""
        for whole in self.wholes:
            for _, parameter, _ in whole.uses():
                yield parameter

    # -- parameters ------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Start the all-gather of every segment; nothing if a whole copy is there or on its way."""
        if self.parameter_state is not ParameterState.SHARDED:
            return
        self._step_parameters(ParameterState.GATHERING)
        with torch.profiler.record_function(f"unshard {self.name}"):
            for whole in self.wholes:
                whole.buffer.allocate()
                whole.fill_own_slot(self.communicator.rank)
                self._gathers.append(self.communicator.gather(whole.buffer.flat, self.name))
        self._gathered_versions = self._shard_versions()

    def wait_for_unshard(self) -> None:
        """Make the compute stream wait until the whole copy is there."""
        if self.parameter_state is not ParameterState.GATHERING:
            return
        with torch.profiler.record_function(f"wait_for_unshard {self.name}"):
            for gather in self._gathers:
                gather.wait()
        self._gathers.clear()
        self._step_parameters(ParameterState.UNSHARDED)

    def reshard(self) -> None:
        """Free the whole copy; nothing if there is none."""
        if self.parameter_state is ParameterState.SHARDED:
            return
        self.wait_for_unshard()  # a gather in flight writes into the memory
        for whole in self.wholes:
            whole.buffer.free()
        self._step_parameters(ParameterState.SHARDED)

    @property
    def is_stale(self) -> bool:
        """Whether a shard was written to after it was gathered."""
        return (
            self.parameter_state is not ParameterState.SHARDED
            and self._gathered_versions != self._shard_versions()
        )

    def install_leaves(self) -> None:
        """Put the leaves into the modules.

        Raises:
            RuntimeError: A module holds another parameter than the one that was sharded.
        """
        self.has_leaves_installed = True
        for whole in self.wholes:
            for index, parameter, leaf in whole.uses():
                for site in whole.sites[index]:
                    found: Tensor | None = site.module._parameters.get(site.name)
                    if found is not parameter and found is not leaf:
                        raise RuntimeError(self._describe_replaced(parameter, site))
                    site.put(leaf)
                if leaf.requires_grad != parameter.requires_grad:
                    leaf.requires_grad_(parameter.requires_grad)
                if leaf.requires_grad and index not in whole.hooked:
                    hook = _GradientHook(self, whole, index)
                    torch_internals.call_after_accumulation(leaf, hook)
                    whole.hooked.add(index)

    def install_shards(self) -> None:
        """Put the user's own, sharded parameters back into the modules."""
        self.has_leaves_installed = False
        for whole in self.wholes:
            for index, parameter, leaf in whole.uses():
                for site in whole.sites[index]:
                    if site.module._parameters.get(site.name) is leaf:
                        site.put(parameter)

    # -- gradients -------------------------------------------------------------------------------

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter used here requires a gradient now."""
        return any(whole.is_trainable for whole in self.wholes)

    def receive(self, whole: WholeSegment, index: int, gradient: Tensor) -> None:
        """Take in one parameter's local gradient."""
        if gradient.layout is not torch.strided:
            name = whole.segment.parameters[index].spec.name
            raise RuntimeError(
                f"unit {self.name!r} (rank {self.communicator.rank}): expected a dense gradient of "
                f"{name!r}, got {gradient.layout}. Build the embedding with sparse=False, or pass "
                "the parameter in ignored_params."
            )
        self.on_arrival(self)
        self.wait_for_reduce()  # a path through the graph that ended after the unit's reduction
        if self.gradient_state is not GradientState.LOCAL:
            self._step_gradients(GradientState.LOCAL)
        whole.local_gradients.add(index, gradient)

    @property
    def has_local_gradients(self) -> bool:
        """Whether gradients wait here that were not reduced and not dropped."""
        return any(whole.local_gradients.is_waiting for whole in self.wholes)

    def reduce(self) -> list[tuple[ShardedTensor, bool]]:
        """Start the reduce-scatter of every trainable segment.

        Returns:
            Each parameter of those segments, and whether this rank has a gradient of it.
        """
        self.wait_for_reduce()
        if self.gradient_state is not GradientState.LOCAL:
            self._step_gradients(GradientState.LOCAL)  # nothing arrived here; other ranks' may have
        used = []
        with torch.profiler.record_function(f"reduce {self.name}"):
            for whole in self.wholes:
                if not whole.is_trainable:
                    continue
                pieces, arrived = whole.local_gradients.take()
                shard_numel = whole.segment.layout.shard_numel
                reduction = self.communicator.reduce(pieces, shard_numel, self.name)
                self._reductions.append((whole, reduction))
                used += [(p, arrived[index]) for index, p, _ in whole.uses()]
        self._step_gradients(GradientState.REDUCING)
        return used

    def wait_for_reduce(self) -> None:
        """Let the reduction land: its shard is added to the parameters' ``.grad``."""
        if self.gradient_state is not GradientState.REDUCING:
            return
        with torch.profiler.record_function(f"wait_for_reduce {self.name}"), torch.no_grad():
            for whole, reduction in self._reductions:
                self._land(whole, reduction.wait())
        self._reductions.clear()
        self._step_gradients(GradientState.REDUCED)

    def leave_unreduced(self) -> None:
        """End a backward without communication; the local gradients stay for the next."""
        for whole in self.wholes:
            whole.local_gradients.leave_unreduced()

    def abandon(self, *, drops_gradients: bool) -> None:
        """After an exception: wait for what is in flight, free what is whole."""
        self.install_shards()
        for pending in (*self._gathers, *(reduction for _, reduction in self._reductions)):
            try:
                pending.wait()
            except RuntimeError as error:  # that a collective never ended may be what happened
                _log.warning("while recovering: %s", error)
        self._gathers.clear()
        self._reductions.clear()
        if self.parameter_state is ParameterState.GATHERING:
            self._step_parameters(ParameterState.UNSHARDED)
        if self.gradient_state is GradientState.REDUCING:
            self._step_gradients(GradientState.REDUCED)
        self.reshard()
        if not drops_gradients:
            return
        for whole in self.wholes:
            whole.local_gradients.drop()
        if self.gradient_state is not GradientState.NONE:
            self._step_gradients(GradientState.NONE)

    def _land(self, whole: WholeSegment, reduced: Tensor) -> None:
        segment = whole.segment
        shard = reduced.to(segment.shard.dtype)
        rank = self.communicator.rank
        for _, parameter, leaf in whole.uses():
            if not leaf.requires_grad:
                continue
            spec = parameter.spec
            offset = segment.layout.offset_in_shard(spec.slot, rank)
            accumulate(parameter, ShardedTensor(shard.narrow(0, offset, spec.slice.numel), spec))

    def _shard_versions(self) -> list[int]:
        return [whole.segment.shard._version for whole in self.wholes]

    def _step_parameters(self, following: ParameterState) -> None:
        self.parameter_state = take_step(
            self.name, self.communicator.rank, self.parameter_state, following
        )

    def _step_gradients(self, following: GradientState) -> None:
        self.gradient_state = take_step(
            self.name, self.communicator.rank, self.gradient_state, following
        )

    def _describe_replaced(self, parameter: ShardedTensor, site: Site) -> str:
        return (
            f"unit {self.name!r} (rank {self.communicator.rank}): expected the parameter that was "
            f"sharded at {parameter.spec.name!r}, got another object: somebody assigned a new "
            f"{site.name!r} to {type(site.module).__name__} after sharding (as load_state_dict("
            "assign=True) does). Copy into the parameter instead (load_state_dict without assign)."
        )


class _GradientHook:
    """Moves a leaf's gradient out of ``.grad`` as soon as it is complete."""

    def __init__(self, unit: Unit, whole: WholeSegment, index: int) -> None:
        self._unit = weakref.ref(unit)  # the unit owns the leaf, and the leaf owns this hook
        self._whole = weakref.ref(whole)
        self._index = index

    def __call__(self, leaf: Tensor) -> None:
        unit, whole, gradient = self._unit(), self._whole(), leaf.grad
        leaf.grad = None
        if unit is not None and whole is not None and gradient is not None:
            with torch.no_grad():
                unit.receive(whole, self._index, gradient)


def _ignore(unit: Unit) -> None:
    pass


def _is_plain_embedding(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and module.max_norm is None
    )
