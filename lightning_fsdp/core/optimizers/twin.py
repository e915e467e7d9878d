"""The optimizer that steps in place of the user's: of the same class, over this rank's own tensors.

It has the same attributes and options. What a step changes of these, and the state that it makes,
is handed to the user's optimizer when the step is over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import MethodType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_fsdp.core.optimizers.blocks import cut_state, joined_state
from lightning_fsdp.core.optimizers.optimizer_classes import SCALARS
from lightning_fsdp.core.optimizers.owned import Owned, Sharding

Options = list[dict[str, Any]]

WHOLE_TENSORS = "_lightning_fsdp_whole_tensors"
"""Attribute that marks an optimizer over whole tensors; its twin has none."""


class Twin:
    """A twin for one step.

    Args:
        original: The user's optimizer.
        tensors: Its sharded parameters.
        sharding: How they are sharded.

    Attributes:
        optimizer: The optimizer that steps.
    """

    def __init__(self, original: Optimizer, tensors: Sequence[Owned], sharding: Sharding) -> None:
        self._original, self._sharding = original, sharding
        self._tensors = {id(owned.parameter): owned for owned in tensors}
        self.optimizer: Optimizer = object.__new__(type(original))
        for name, value in vars(original).items():
            is_own = isinstance(value, MethodType) and value.__self__ is original
            own = MethodType(value.__func__, self.optimizer) if is_own else value
            vars(self.optimizer)[name] = own
        vars(self.optimizer).pop(WHOLE_TENSORS, None)
        stepped = {key: owned.stepped for key, owned in self._tensors.items()}
        self.optimizer.param_groups = [
            {**group, "params": [t for p in group["params"] for t in stepped.get(id(p), (p,))]}
            for group in original.param_groups
        ]
        self.optimizer.state = self._state()
        self._of_original, self._of_twin = _options(original), _options(self.optimizer)

    def take_options(self) -> None:
        """Take over options that the user has changed in a closure."""
        _carry(self._original, self.optimizer, self._of_original, self._of_twin)

    def bring_back(self) -> None:
        """Hand state and options that the step has made or changed to the user's optimizer."""
        tensors = {id(p): owned for owned in self._tensors.values() for p in owned.stepped}
        state = self.optimizer.state
        for key, values in state.items():
            if (owned := tensors.get(id(key))) is None:
                self._original.state[key] = values
            elif key is owned.stepped[0]:
                of_stepped = [state.get(p, {}) for p in owned.stepped]
                self._original.state[owned.parameter] = self._joined(owned, of_stepped)
        _carry(self.optimizer, self._original, self._of_twin, self._of_original)

    def _state(self) -> defaultdict[Any, Any]:
        """The user's state, by the tensors that are stepped here."""
        state: defaultdict[Any, Any] = defaultdict(dict)
        for key, values in self._original.state.items():
            if (owned := self._tensors.get(id(key))) is None:
                state[key] = values
            elif owned.stepped:
                state.update(zip(owned.stepped, self._parts(owned, values), strict=True))
        return state

    def _parts(self, owned: Owned, values: dict[str, Any]) -> list[dict[str, Any]]:
        """The state of each tensor that is stepped, from the user's state of the parameter."""
        if owned.blocks is not None:
            return cut_state(values, owned.cut.shape, owned.blocks)
        if owned.is_slice:
            return [{name: self._sharding.unsharded(value) for name, value in values.items()}]
        return [values]

    def _joined(self, owned: Owned, of_stepped: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The user's state of a parameter, from that of each tensor that was stepped."""
        if owned.blocks is not None:
            return joined_state(of_stepped, owned.blocks)
        (values,) = of_stepped
        if not owned.is_slice:
            return values

        def sharded(name: str, value: Any) -> Any:
            of_elements = isinstance(value, Tensor) and value.shape == owned.local.shape
            is_slice = of_elements and name not in SCALARS
            return self._sharding.sharded(owned.parameter, value) if is_slice else value

        return {name: sharded(name, value) for name, value in values.items()}


def _options(optimizer: Optimizer) -> Options:
    """Copies of the attributes, and of each group's options, as they are now."""
    return [dict(each) for each in (vars(optimizer), *optimizer.param_groups)]


def _carry(source: Optimizer, target: Optimizer, before: Options, known: Options) -> None:
    """Copy to ``target`` the attributes and options that ``source`` has changed.

    Args:
        source: The user's optimizer or its twin.
        target: The other one.
        before: Those of ``source`` as they were when the twin was made.
        known: Likewise of ``target``; written, so that a change is not taken for one of its own.
    """
    places = zip(before, (vars(source), *source.param_groups), strict=False)
    targets = (vars(target), *target.param_groups)
    for index, (was, now) in enumerate(places):
        for key, value in now.items():
            is_same = key in was and was[key] is value
            if not is_same and key not in ("state", "param_groups", "params"):
                targets[index][key] = known[index][key] = value
