"""The flat parameters that one module needs whole at once, and where they are registered.

A unit is a passive record: all state is in the flat parameters, and the schedule decides when
something is done.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from lightning_fsdp.config import PrecisionPolicy
from lightning_fsdp.core.engine import torch_internals
from lightning_fsdp.core.engine.communicator import Communicator
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.sharded import Sharded


class WeakModule(weakref.ref[nn.Module]):
    """A weak reference to a module, for what the module owns. A deepcopy refers to its copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> WeakModule:
        module = self()
        return self if module is None else WeakModule(copy.deepcopy(module, memo))


class Site:
    """A place in a module: ``module._parameters[name]``, or ``module._buffers[name]``.

    The reference to the module is weak, so that a module may own sites of itself.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = WeakModule(module)
        self.name = name

    @property
    def module(self) -> nn.Module:
        """The module; only for a caller who keeps it alive."""
        module = self._module()
        assert module is not None, "the caller keeps it alive"
        return module

    def get(self) -> Tensor | None:
        """The parameter that is registered here, if there is one."""
        module = self._module()
        return None if module is None else module._parameters.get(self.name)

    def replace(self, old: Tensor, new: Tensor) -> bool:
        """Register ``new`` in the place of ``old``; ``False`` if it holds another parameter."""
        module = self._module()
        if module is None:  # a graph may outlive its modules, and its backward does not need them
            return True
        present = module._parameters.get(self.name)
        if present is old:
            self._put(module, new)
        return present is old or present is new

    def put(self, parameter: Tensor) -> None:
        """Register ``parameter`` here."""
        self._put(self.module, parameter)

    def _put(self, module: nn.Module, parameter: Tensor) -> None:
        if type(module).__setattr__ is nn.Module.__setattr__:
            module._parameters[self.name] = parameter  # type: ignore[assignment]
        else:  # modules that keep lists of their weights (nn.RNNBase) watch their attributes
            setattr(module, self.name, parameter)


@dataclass(eq=False)
class Unit:
    """The parameters that one module (or a few that run one after another) needs whole at once.

    Attributes:
        name: Original name of the first module.
        owners: Weak references to ``modules``, which own the unit.
        sites: By flat parameter and slot, where the modules register a parameter; unused slots are
            missing.
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
    sites: Mapping[FlatParameter, Mapping[int, Sequence[Site]]]
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
        return f"Unit({self.name!r}, {', '.join(f.state for f in self.sites)})"

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
        copied = memo[id(self)] = replace(self, sites={})
        copied.owners = copy.deepcopy(self.owners, memo)
        copied.sites = copy.deepcopy(self.sites, memo)
        return copied

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Of the modules whose forward needs the parameters, those that are still alive."""
        return tuple(module for reference in self.owners if (module := reference()) is not None)

    @property
    def flat_params(self) -> Iterator[FlatParameter]:
        """The flat parameters, which are whole together."""
        return iter(self.sites)

    @property
    def is_whole(self) -> bool:
        """Whether this unit has the whole copy."""
        return self.is_held and all(flat_param.state == "unsharded" for flat_param in self.sites)

    @property
    def is_stale(self) -> bool:
        """Whether a shard was written to since this unit's gather."""
        return self.is_held and any(flat_param.is_stale for flat_param in self.sites)

    def unshard(self) -> None:
        """Start the all-gather of every flat parameter that is not whole, or stale."""
        with torch_internals.profiled("unshard", self.name):
            try:
                self.is_held = True
                for flat_param in self.sites:
                    flat_param.unshard(self.hold)
            except BaseException:
                self.reshard()
                raise

    def wait_for_unshard(self) -> None:
        """Make the compute stream wait until the whole copy is there."""
        with torch_internals.profiled("wait_for_unshard", self.name):
            for flat_param in self.sites:
                flat_param.wait_for_unshard()

    def reshard(self, *, is_stale: bool = False) -> None:
        """Free the whole copy, if there is one. What is shared stays while other units need it.

        Args:
            is_stale: The shards may have been written to without a change of their version counter.
        """
        self.is_held = self.is_kept_for_graph = False
        for flat_param in self.sites:
            flat_param.reshard(self.hold, is_stale=is_stale)

    def install_leaves(self) -> None:
        """Put the leaves into the modules.

        Raises:
            RuntimeError: A module holds another parameter than the one that was sharded.
        """
        self.has_leaves_installed = True
        for flat_param, slots in self.sites.items():
            for slot, sites in slots.items():
                parameter, leaf = flat_param.parameters[slot], flat_param.leaves[slot]
                for site in sites:
                    if not site.replace(parameter, leaf):
                        raise RuntimeError(self._describe_replaced(parameter, site))
            flat_param.note_use(slots)

    def install_shards(self) -> None:
        """Put the user's own, sharded parameters back into the modules."""
        self.has_leaves_installed = False
        for flat_param, slots in self.sites.items():
            for slot, sites in slots.items():
                for site in sites:
                    site.replace(flat_param.leaves[slot], flat_param.parameters[slot])
            flat_param.note_use(slots)

    def _describe_replaced(self, parameter: Sharded, site: Site) -> str:
        return (
            f"unit {self.name!r} (rank {self.communicator.mesh_rank}): expected the parameter that "
            f"was sharded at {parameter.spec.name!r}, got another or none ({type(site.get())}). "
            "Remove or tie it before sharding; copy values into it (copy_, load_state_dict without "
            "assign). Instead of functional_call, compute so in the layer's own forward."
        )
