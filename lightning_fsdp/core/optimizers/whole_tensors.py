"""An optimizer's step over whole tensors: each is stepped by its owner, as if nothing was sharded.

    slices of a gradient --> owner: whole parameter, whole gradient, whole state
                             optimizer.step(), of any class, unchanged
    every rank's slice  <--  owner

The optimizer that steps is a twin of the user's (twin.py), over this rank's own whole tensors. Its
state is whole, is kept by the owner only, and is found under the user's parameters.

A tensor that the owner holds all of is stepped in place. Of one that is cut, the owner keeps a
whole copy, so that only gradients are sent to it; slices are sent as well if something else has
written to them.

Groups with ``"elementwise": True`` step slices, each rank its own: for classes that treat some
groups as AdamW would. Groups with ``"blocks"`` step parts of their tensors (blocks.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fsdp.core.optimizers.blocks import blocks_in, check_names
from lightning_fsdp.core.optimizers.fingerprints import Fingerprint, fingerprints
from lightning_fsdp.core.optimizers.optimizer_classes import (
    ELEMENTWISE,
    ELEMENTWISE_GROUP,
    SCALARS,
    parameters_of,
    steps_whole_tensors,
)
from lightning_fsdp.core.optimizers.owned import NOBODY, Owned, Sharding
from lightning_fsdp.core.optimizers.owners import Cut, assign
from lightning_fsdp.core.optimizers.travel import collect, from_owners, grouped, to_owners
from lightning_fsdp.core.optimizers.twin import WHOLE_TENSORS, Twin
from lightning_fsdp.core.ranks.groups import control_of
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor


class WholeTensors:
    """The steps of one optimizer over whole tensors; from now on, as it is made an attribute of it.

    Args:
        optimizer: The user's optimizer.
        sharding: How its parameters are sharded.
    """

    def __init__(self, optimizer: Optimizer, sharding: Sharding) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._sharding = sharding
        self._tensors: dict[int, Owned] = {}  # by ``id`` of the parameter
        self._twin: Twin | None = None  # while a step runs, or after one that raised
        # What the twin steps, with fingerprints from before; cleared when results are on all ranks.
        self._stepped: dict[Owned, Fingerprint | None] = {}
        # Not in a weak dictionary: after a step that raised, the twin refers to the optimizer, and
        # would keep it alive.
        vars(optimizer)[WHOLE_TENSORS] = self

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer."""
        optimizer = self._optimizer()
        assert optimizer is not None, "it steps, or is asked for its state"
        return optimizer

    # -- a step ----------------------------------------------------------------------------------

    def begin(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any] | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Prepare a step. Collective.

        Args:
            args: What the step was called with: the optimizer, and perhaps a closure.
            kwargs: What it was called with by name.
            closure: Among these.

        Returns:
            What to call it with: as given, if nothing is sharded any more.
        """
        self._twin = None
        if not any(map(self._sharding.is_sharded, parameters_of(self.optimizer))):
            return args, kwargs
        twin = self._twin = Twin(self.optimizer, self.agree_on_owners(), self._sharding)
        if closure is None:
            self._gather()
            return (twin.optimizer, *args[1:]), kwargs

        def closure_then_gather() -> Any:
            self._scatter()  # what was stepped before, if the step calls its closure repeatedly
            loss = closure()
            twin.take_options()
            self._gather()
            return loss

        if "closure" in kwargs:
            return (twin.optimizer, *args[1:]), {**kwargs, "closure": closure_then_gather}
        return (twin.optimizer, closure_then_gather, *args[2:]), kwargs

    def end(self) -> None:
        """Bring the results of a step to the ranks, and to the user's optimizer. Collective.

        Raises:
            RuntimeError: Something has written to the slices of what was stepped, on any rank.
        """
        if self._twin is not None:
            self._scatter()
            self._twin.bring_back()
            self._twin = None

    def _gather(self) -> None:
        """Send owners the gradients, and the parameters that something has written to."""
        tensors = self.agree_on_owners()
        self._sharding.check([owned.parameter for owned in tensors])
        gradients = {owned: self._sharding.gradient(owned.parameter) for owned in tensors}
        self._stepped = {}
        for communicator, of_group in grouped(tensors).items():
            now = _fingerprints(of_group)
            # Only ranks with elements count: one without may lack a gradient, or have an empty one.
            has_one = [gradients[p] is not None and _has_elements(p) for p in of_group]
            is_changed = [p in now and p.seen != now[p] for p in of_group]
            on_any_rank = communicator.any_rank([has_one, is_changed])()
            steps, changed = (list(compress(of_group, row)) for row in on_any_rank)
            for owned, whole in to_owners({p: p.local for p in changed}, "parameters"):
                assert owned.whole is not None, "it is here"
                owned.whole.copy_(whole)
            self._stepped |= {owned: now.get(owned) for owned in steps}
            for owned in of_group:
                # What the step was to write is sent again, should the step raise.
                owned.seen = None if owned in self._stepped else now.get(owned)
                owned.set_gradient(None)
            local_of = {
                owned: torch.zeros_like(owned.local) if (g := gradients[owned]) is None else g
                for owned in steps
            }
            for owned, whole in to_owners(local_of, "gradients"):
                owned.set_gradient(whole)

    def _scatter(self) -> None:
        """Send every rank its slices of what owners have stepped."""
        stepped, self._stepped = self._stepped, {}
        for owned in stepped:
            owned.settle()
            owned.set_gradient(None)
        for communicator, of_group in grouped(stepped).items():
            now = _fingerprints(of_group)
            was = [stepped[owned] != found for owned, found in now.items()]
            for owned, is_written in zip(now, communicator.any_rank(was)(), strict=True):
                if is_written:
                    raise RuntimeError(
                        f"{type(self.optimizer).__name__}: expected a step that writes to the "
                        "parameters of its param_groups, which are whole tensors in it, got one "
                        f"that has written to the slices of {owned.name!r}. If it steps other "
                        "optimizers, step those instead of it; if it updates each element by "
                        "itself, give its class to elementwise_optimizer()."
                    )
            from_owners(of_group)
            for owned, found in _fingerprints(of_group).items():
                owned.seen = found
        for owned in stepped:
            torch.autograd.graph.increment_version(owned.local)

    # -- who owns what ---------------------------------------------------------------------------

    def as_agreed(self) -> list[Owned]:
        """The tensors as of the last step, or of when state was last asked for."""
        return list(self._tensors.values())

    def agree_on_owners(self) -> list[Owned]:
        """Give owners to sharded parameters that have none; returns all, in the optimizer's order.

        Owners do not change. Collective if the parameters have changed since the last call.
        """
        optimizer, before = self.optimizer, self._tensors
        of_groups = [(p, group) for group in optimizer.param_groups for p in group["params"]]
        sharded = [(p, group) for p, group in of_groups if self._sharding.is_sharded(p)]
        if not sharded:  # they were made whole again; their state is still at the owners
            self.follow({})
            return self.as_agreed()
        if list(before) != [id(p) for p, _ in sharded] or any(
            not _shares_memory(owned.local, self._sharding.local(owned.parameter))
            for owned in before.values()
        ):
            found = {id(p): self._owned_of(p, group, before.get(id(p))) for p, group in sharded}
            for group in optimizer.param_groups:
                if found.keys() >= set(map(id, group["params"])):  # all of their names are known
                    check_names(group, [found[id(p)].name for p in group["params"]])
            self._give_owners(found.values())
            self._tensors = found  # only now, as agreeing on owners may raise
        for owned in self._tensors.values():
            if not owned.is_here:  # state from before sharding, or that every rank has loaded
                optimizer.state.pop(owned.parameter, None)
        return self.as_agreed()

    def follow(self, successors: Mapping[int, nn.Parameter]) -> None:
        """Note that parameters are not sharded any more; remember only who has their state.

        Args:
            successors: The parameters that the optimizer has now, by ``id`` of the one before;
                others stay.
        """
        for owned in self._tensors.values():
            owned.parameter = successors.get(id(owned.parameter), owned.parameter)
            owned.local, owned.whole, owned.stepped = owned.local.new_empty(0), None, ()
        self._tensors = {id(owned.parameter): owned for owned in self._tensors.values()}

    def stepped_whole(self) -> dict[int, Owned]:
        """The tensors that owners step whole, by ``id`` of the parameter. It agrees on owners."""
        return {id(own.parameter): own for own in self.agree_on_owners() if not own.is_slice}

    def _owned_of(self, parameter: Tensor, group: Mapping[str, Any], before: Owned | None) -> Owned:
        """A parameter stepped as its group asks for it; its owner stays the one of ``before``."""
        name, communicator, cut = self._sharding.cut(parameter)
        local = self._sharding.local(parameter)
        if group.get(ELEMENTWISE_GROUP):
            cut = Cut((local.numel(),), ((0, local.numel()),) * communicator.world_size)
            owner = communicator.rank
            return Owned(parameter, name, cut, communicator, owner, local, is_slice=True)
        blocks = blocks_in(group, name, cut.shape)
        owner = NOBODY if before is None or before.is_slice else before.owner
        if before is None:
            self._refuse_slices(parameter, name, local, cut)
        return Owned(parameter, name, cut, communicator, owner, local, blocks=blocks)

    def _refuse_slices(self, parameter: Tensor, name: str, local: Tensor, cut: Cut) -> None:
        """Refuse state that an optimizer has allocated for this rank's slice.

        Raises:
            RuntimeError: There is some.
        """
        optimizer = self.optimizer
        for key, value in optimizer.state.get(parameter, {}).items():
            if self._sharding.unsharded(value) is not value or (
                isinstance(value, Tensor)
                and value.shape == local.shape != torch.Size(cut.shape)
                and key not in SCALARS
            ):
                raise RuntimeError(
                    f"{type(optimizer).__name__}: expected state of whole tensors, got {key!r} of "
                    f"{name!r} of this rank's slice. Build this optimizer before sharding, as it "
                    "allocates state when it is built."
                )

    def _give_owners(self, found: Iterable[Owned]) -> None:
        """Agree on who steps what. Collective.

        Raises:
            RuntimeError: Ranks step different parameters.
        """
        name, state = type(self.optimizer).__name__, self.optimizer.state
        for communicator, tensors in grouped(found).items():
            steps = ", ".join(
                f"{p.name} by slices" if p.is_slice else f"{p.name} {p.cut.shape}" for p in tensors
            )
            control_of(communicator).agree("optimizer over whole tensors", f"{name} steps {steps}")
            have = collect(communicator, [bool(state.get(p.parameter)) for p in tensors])
            for owned, has_state in zip(tensors, zip(*have, strict=True), strict=True):
                # In a copy of an optimizer, the owner is known by its state.
                if owned.owner == NOBODY and sum(has_state) == 1:
                    owned.owner = has_state.index(True)
            loads = [0] * communicator.world_size
            for owned in tensors:
                if owned.owner != NOBODY and not owned.is_slice:
                    loads[owned.owner] += owned.cut.work
            new = [owned for owned in tensors if owned.owner == NOBODY]
            for owned, owner in zip(new, assign([p.cut for p in new], loads), strict=True):
                owned.owner = owner
            for owned in tensors:
                if owned.is_here:
                    owned.allocate()


def whole_tensors_of(optimizer: Optimizer) -> WholeTensors | None:
    """How an optimizer steps whole tensors; ``None`` if it steps slices, or nothing sharded.

    Raises:
        NotImplementedError: It can do neither.
    """
    known: WholeTensors | None = vars(optimizer).get(WHOLE_TENSORS)
    if known is not None or type(optimizer) in ELEMENTWISE:
        return known
    example = next((p for p in parameters_of(optimizer) if isinstance(p, ShardedTensor)), None)
    if example is None or not steps_whole_tensors(optimizer, example.spec.name):
        return None
    return WholeTensors(optimizer, Sharding())


def _fingerprints(tensors: Iterable[Owned]) -> dict[Owned, Fingerprint]:
    """Fingerprints of this rank's elements of those that are cut."""
    cut = [owned for owned in tensors if owned.is_cut]
    return dict(zip(cut, fingerprints([owned.local for owned in cut]), strict=True))


def _has_elements(owned: Owned) -> bool:
    """Whether this rank has elements, or stands for simulated ranks, which do not exist."""
    is_alone = not control_of(owned.communicator).has_others
    return owned.local.numel() > 0 or owned.cut.numel == 0 or is_alone


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.data_ptr() == other.data_ptr() and one.dtype == other.dtype)
