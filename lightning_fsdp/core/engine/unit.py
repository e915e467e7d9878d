"""The flat parameters that one module needs whole at once, and where they are registered.

A unit is a passive record: what is in memory is the state of its flat parameters, and the schedule
decides when something is done.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor, nn

from lightning_fsdp.config import PrecisionPolicy
from lightning_fsdp.core.engine import torch_internals
from lightning_fsdp.core.engine.communicator import Communicator
from lightning_fsdp.core.engine.flat_parameter import FlatParameter


class WeakModule(weakref.ref[nn.Module]):
    """A weak reference to a module, for what the module owns. A deepcopy refers to its copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> WeakModule:
        module = self()
        return self if module is None else type(self)(copy.deepcopy(module, memo))


class Site:
    """A place in a module: ``module._parameters[name]``, or ``module._buffers[name]``.

    The reference to the module is weak, so that a module may own sites of itself.

    Attributes:
        name: As above.
        registry: What holds the module's parameters. It may outlive the module, as a graph may,
            whose backward does not need it.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self.name = WeakModule(module), name
        is_watched = type(module).__setattr__ is not nn.Module.__setattr__
        self.registry: Any = _Attributes(module) if is_watched else module._parameters

    @property
    def module(self) -> nn.Module:
        """The module; only for a caller who keeps it alive."""
        module = self._module()
        assert module is not None, "the caller keeps it alive"
        return module

    def get(self) -> Tensor | None:
        """The parameter that is registered here, if there is one."""
        return cast("Tensor | None", self.registry.get(self.name))


class _Attributes(WeakModule):
    """The parameters of a module that keeps lists of its weights, and so watches its attributes.

    ``nn.RNNBase`` does.
    """

    def get(self, name: str) -> Tensor | None:
        module = self()
        return None if module is None else module._parameters.get(name)

    def __setitem__(self, name: str, parameter: Tensor) -> None:
        if (module := self()) is not None:
            setattr(module, name, parameter)


@dataclass(eq=False)
class Unit:
    """The parameters that one module (or a few that run one after another) needs whole at once.

    Attributes:
        name: Original name of the first module.
        owners: Weak references to ``modules``, which own the unit.
        flat_params: What is whole together. By flat parameter and slot, where the modules register
            a parameter; unused slots are missing.
        communicator: The collectives of the sharding group.
        policy: The dtypes of compute, of reduction and of outputs.
        reshard_after_forward: See :class:`~lightning_fsdp.config.ShardingPlan`.
        reshard_after_backward: Likewise.
        syncs_gradients: Whether a backward reduces gradients over the ranks.
        averages_replicas: Whether such a reduction also takes the mean over replicas, if any.
        needs_backward_gather: False where the backward reads no weight (plain embeddings).
        is_held: Whether this unit has the whole copy, or waits for its gather; so it holds all flat
            parameters, or none.
        has_leaves_installed: Whether the modules hold the leaves now, not the sharded parameters.
        is_kept_for_graph: Whether the whole copy is kept until the optimizer's step, as under
            ZeRO-2, or until :meth:`reshard`, because a graph of gradients (``create_graph=True``)
            may read it.
        hold: Stands for the unit in ``FlatParameter.holders``, so that these do not refer to it.
    """

    name: str
    owners: tuple[WeakModule, ...]
    flat_params: Mapping[FlatParameter, Mapping[int, Sequence[Site]]]
    communicator: Communicator
    policy: PrecisionPolicy
    reshard_after_forward: bool | None
    reshard_after_backward: bool
    needs_backward_gather: bool
    # With init=False, a deepcopy starts with fresh ones instead of sharing these.
    syncs_gradients: bool = field(default=True, init=False)
    averages_replicas: bool = field(default=True, init=False)
    is_held: bool = field(default=False, init=False)
    has_leaves_installed: bool = field(default=False, init=False)
    is_kept_for_graph: bool = field(default=False, init=False)
    hold: object = field(default_factory=object, init=False)

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {', '.join(f.state for f in self.flat_params)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        """A unit of the copied modules, which gathers and reduces anew.

        Raises:
            NotImplementedError: Only modules inside of the unit's own are being copied.
        """
        if not any(id(module) in memo for module in self.modules):
            raise NotImplementedError(
                f"unit {self.name!r} (rank {self.communicator.mesh_rank}): expected a deepcopy of "
                "the module that was sharded or of one around it, got one of a module inside, "
                "whose parameters are gathered with the unit only. Copy the unit's module, while "
                "there is one, and take the part from the copy."
            )
        # The modules being copied refer to it; without flat parameters, it is not complete.
        copied = memo[id(self)] = replace(self, flat_params={})
        copied.owners = copy.deepcopy(self.owners, memo)
        copied.flat_params = copy.deepcopy(self.flat_params, memo)
        return copied

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Of the modules whose forward needs the parameters, those that are still alive."""
        return tuple(module for reference in self.owners if (module := reference()) is not None)

    @property
    def is_whole(self) -> bool:
        """Whether this unit has the whole copy."""
        return self.is_held and all(f.state == "unsharded" for f in self.flat_params)

    @property
    def is_stale(self) -> bool:
        """Whether a shard was written to since this unit's gather."""
        return self.is_held and any(flat_param.is_stale for flat_param in self.flat_params)

    def unshard(self) -> None:
        """Start the all-gather of every flat parameter that is not whole, or stale."""
        with torch_internals.profiled("unshard", self.name):
            try:
                self.is_held = True
                for flat_param in self.flat_params:
                    flat_param.unshard(self.hold)
            except BaseException:
                self.reshard()
                raise

    def wait_for_unshard(self) -> None:
        """Make the compute stream wait until the whole copy is there."""
        with torch_internals.profiled("wait_for_unshard", self.name):
            for flat_param in self.flat_params:
                flat_param.wait_for_unshard()

    def reshard(self, *, is_stale: bool = False) -> None:
        """Free the whole copy, if there is one. What is shared stays while other units need it.

        Args:
            is_stale: The shards may have been written to without a change of their version counter.
        """
        self.is_held = self.is_kept_for_graph = False
        for flat_param in self.flat_params:
            flat_param.reshard(self.hold, is_stale=is_stale)

    def install_leaves(self) -> None:
        """Put the leaves into the modules.

        Raises:
            RuntimeError: A module holds another parameter than the one that was sharded.
        """
        self.has_leaves_installed = True
        for flat_param, slots in self.flat_params.items():
            for slot, site in _replace(slots, flat_param.parameters, flat_param.leaves):
                raise RuntimeError(
                    f"unit {self.name!r} (rank {self.communicator.mesh_rank}): expected the "
                    f"parameter that was sharded at {flat_param.parameters[slot].spec.name!r}, got "
                    f"another or none ({type(site.get())}). Remove or tie it before sharding; copy "
                    "values into it (copy_, load_state_dict without assign). Instead of "
                    "functional_call, compute so in the layer's own forward."
                )

    def install_shards(self) -> None:
        """Put the user's own, sharded parameters back into the modules."""
        self.has_leaves_installed = False
        for flat_param, slots in self.flat_params.items():
            _replace(slots, flat_param.leaves, flat_param.parameters)

    def note_use(self) -> None:
        """Note that a forward uses the leaves; freezing or thawing one there does so for good."""
        for flat_param, slots in self.flat_params.items():
            flat_param.note_use(slots)


def _replace(
    slots: Mapping[int, Sequence[Site]], old: Sequence[Tensor], new: Sequence[Tensor]
) -> list[tuple[int, Site]]:
    """Register ``new`` where ``old`` is; returns where something else is."""
    others = []
    for slot, sites in slots.items():
        for site in sites:
            present = site.registry.get(site.name)
            if present is old[slot]:
                site.registry[site.name] = new[slot]
            elif present is not new[slot]:
                others.append((slot, site))
    return others
