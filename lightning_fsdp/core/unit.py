"""One unit: makes its parameters whole, puts them into its modules, frees them. Knows no hook.

A unit is what one module needs whole at once. When to take a step is the schedule's business.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_fsdp.config import PrecisionPolicy
from lightning_fsdp.core import torch_internals
from lightning_fsdp.core.collectives import Communicator
from lightning_fsdp.core.lifecycle import ParameterState, take_step
from lightning_fsdp.core.segment import Segment, SegmentUse, Site
from lightning_fsdp.core.sharded_tensor import ShardedTensor

_log = logging.getLogger(__name__)


class Unit:
    """The parameters that one module (or a few that run one after another) needs whole at once.

    Attributes:
        name: Original name of the first module.
        modules: The modules whose forward needs the parameters.
        segments: What their parameters belong to.
        reshard_after_forward: See :class:`~lightning_fsdp.config.ShardingPlan`.
        reshard_after_backward: Likewise.
        syncs_gradients: Whether a backward reduces gradients over the ranks.
        needs_backward_gather: False where the backward reads no weight (plain embeddings).
        has_leaves_installed: Whether the modules hold the leaves now, not the sharded parameters.
        is_kept_for_graph: Whether the whole copy stays as under ZeRO-2, because a graph of
            gradients (``create_graph=True``) may read it; until the copy is freed.
        parameter_state: Life of the whole parameters.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        uses: Sequence[SegmentUse],
        communicator: Communicator,
        *,
        policy: PrecisionPolicy,
        reshard_after_forward: bool | None,
        reshard_after_backward: bool,
    ) -> None:
        self.name = name
        self.modules = tuple(modules)
        self.segments: tuple[Segment, ...] = tuple(use.segment for use in uses)
        self.communicator = communicator
        self.policy = policy
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = reshard_after_backward
        self.syncs_gradients = True
        self.needs_backward_gather = not all(_is_plain_embedding(m) for m in self.modules)
        self.has_leaves_installed = False
        self.is_kept_for_graph = False
        self.parameter_state = ParameterState.SHARDED
        self._uses = tuple(uses)

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.parameter_state.value})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        """A unit of the copied modules, which gathers and reduces anew.

        Raises:
            NotImplementedError: Only modules inside of the unit's own are being copied.
        """
        if not any(id(module) in memo for module in self.modules):
            cls = type(self.modules[0]).__name__
            raise NotImplementedError(
                f"unit {self.name!r} (rank {self.communicator.mesh_rank}): expected a deepcopy of "
                f"{cls} {self.name!r} or of a module around it, got one of a module inside, whose "
                "parameters are gathered with the unit only. Copy the unit's module and take the "
                "part from the copy."
            )
        copied = memo[id(self)] = Unit.__new__(Unit)  # the modules being copied refer to it
        copied.__dict__.update(self.__dict__)
        copied.syncs_gradients = True
        copied.has_leaves_installed = False
        copied.is_kept_for_graph = False
        copied.parameter_state = ParameterState.SHARDED
        copied.segments = copy.deepcopy(self.segments, memo)
        copied.modules = copy.deepcopy(self.modules, memo)
        copied._uses = copy.deepcopy(self._uses, memo)
        return copied

    def parameters(self) -> Iterator[ShardedTensor]:
        """The sharded parameters that the unit uses."""
        for use in self._uses:
            for slot in use.sites:
                yield use.segment.parameters[slot]

    def unshard(self) -> None:
        """Start the all-gather of every segment; nothing if a whole copy is there or on its way."""
        if self.parameter_state is not ParameterState.SHARDED:
            return
        self._step(ParameterState.GATHERING)
        with torch_internals.profiled("unshard", self.name):
            for segment in self.segments:
                segment.hold(self)

    def wait_for_unshard(self) -> None:
        """Make the compute stream wait until the whole copy is there."""
        if self.parameter_state is not ParameterState.GATHERING:
            return
        with torch_internals.profiled("wait_for_unshard", self.name):
            for segment in self.segments:
                segment.wait_for_gather()
        self._step(ParameterState.UNSHARDED)

    def reshard(self) -> None:
        """Free the whole copy; nothing if there is none. What others share stays for them."""
        if self.parameter_state is ParameterState.SHARDED:
            return
        self.wait_for_unshard()
        self.is_kept_for_graph = False
        for segment in self.segments:
            segment.release(self)
        self._step(ParameterState.SHARDED)

    @property
    def is_stale(self) -> bool:
        """Whether a shard was written to after it was gathered."""
        return self.parameter_state is not ParameterState.SHARDED and any(
            segment.is_stale for segment in self.segments
        )

    def install_leaves(self) -> None:
        """Put the leaves into the modules.

        Raises:
            RuntimeError: A module holds another parameter than the one that was sharded.
        """
        self.has_leaves_installed = True
        for use in self._uses:
            for site, parameter, leaf in use.places():
                found: Tensor | None = site.module._parameters.get(site.name)
                if found is not parameter and found is not leaf:
                    raise RuntimeError(self._describe_replaced(parameter, site))
                site.put(leaf)
            for slot in use.sites:
                use.segment.prepare_leaf(slot)

    def install_shards(self) -> None:
        """Put the user's own, sharded parameters back into the modules."""
        self.has_leaves_installed = False
        for use in self._uses:
            for site, parameter, leaf in use.places():
                if site.module._parameters.get(site.name) is leaf:
                    site.put(parameter)

    def abandon(self, *, drops_gradients: bool) -> None:
        """After an exception: wait for what is in flight, free what is whole."""
        self.install_shards()
        self.is_kept_for_graph = False
        if self.parameter_state is ParameterState.GATHERING:
            self._step(ParameterState.UNSHARDED)
        if self.parameter_state is ParameterState.UNSHARDED:
            self._step(ParameterState.SHARDED)
        for segment in self.segments:
            try:
                segment.abandon(drops_gradients=drops_gradients)
            except RuntimeError as error:  # that a collective never ended may be what happened
                _log.warning("while recovering: %s", error)

    def _step(self, following: ParameterState) -> None:
        self.parameter_state = take_step(
            self.name, self.communicator.mesh_rank, self.parameter_state, following
        )

    def _describe_replaced(self, parameter: ShardedTensor, site: Site) -> str:
        return (
            f"unit {self.name!r} (rank {self.communicator.mesh_rank}): expected the parameter "
            f"that was sharded at {parameter.spec.name!r}, got another object: somebody assigned a "
            f"new {site.name!r} to {type(site.module).__name__} after sharding (as load_state_dict("
            "assign=True) does). Copy into the parameter instead (load_state_dict without assign)."
        )


def _is_plain_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
