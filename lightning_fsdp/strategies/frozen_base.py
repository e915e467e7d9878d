"""Checkpoints without the parameters that a run does not train: the next run builds them again.

    setup          frozen parameters may be left out
    each batch     one that is thawed is kept from then on
    save           those left are not in ``state_dict``; ``LEFT_OUT`` has their names and shapes
    load           names and shapes are compared, and the module's own values stay

Note: a parameter that was trained, frozen, saved and loaded is frozen at setup. It is known by its
checkpoint, which holds it beside a list of others that were left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from lightning_fsdp.checkpoint.contents import LEFT_OUT

_MAX_SHOWN = 5  # names in a message


class FrozenBase:
    """What of a module is left out of checkpoints.

    Args:
        is_left_out: Whether anything is.
    """

    def __init__(self, *, is_left_out: bool) -> None:
        self.is_left_out = is_left_out
        self._shapes: dict[str, list[int]] = {}  # of what may be left out
        self._first_of: dict[str, str] = {}  # of the names of a tied parameter
        self._trained: set[str] = set()  # frozen, and in a checkpoint as something that was trained

    def note_loaded(self, checkpoint: Mapping[str, Any]) -> None:
        """Look at what the module gets its values from."""
        self._trained = set(checkpoint["state_dict"]) if LEFT_OUT in checkpoint else set()

    def note(self, module: nn.Module) -> None:
        """Look at a module that is about to be sharded."""
        self._shapes, self._first_of = {}, {}
        first_of: dict[nn.Parameter, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            first = first_of.setdefault(parameter, name)
            if self.is_left_out and not parameter.requires_grad and name not in self._trained:
                self._shapes[name], self._first_of[name] = list(parameter.shape), first
        self._trained = set()

    def watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Keep what is trained now.

        Args:
            parameters: Of the module, sharded or not, every one once.
        """
        for name, first in list(self._first_of.items()):
            if parameters[first].requires_grad:
                del self._first_of[name], self._shapes[name]

    def without(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict without what is left out."""
        return {name: value for name, value in state.items() if name not in self._shapes}

    def shapes(self) -> dict[str, list[int]]:
        """What is left out."""
        return dict(self._shapes)


def check_left_out(left_out: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
    """See that a module has what a checkpoint does not hold.

    Args:
        left_out: Of the checkpoint.
        shapes: Of the module's parameters, by all of their names.

    Raises:
        ValueError: A name or shape differs.
    """
    others = [f"{name!r} is not there" for name in left_out if name not in shapes]
    others += [
        f"{name!r} has the shape {tuple(shapes[name])}, not {tuple(shape)}"
        for name, shape in left_out.items()
        if name in shapes and tuple(shapes[name]) != tuple(shape)
    ]
    if others:
        more = f" and {len(others) - _MAX_SHOWN} more" if len(others) > _MAX_SHOWN else ""
        raise ValueError(
            "checkpoint without a base (checkpoint_base=False): expected the frozen parameters "
            f"that it was saved beside, got others: {'; '.join(others[:_MAX_SHOWN])}{more}. Build "
            "the model over the same base."
        )


def check_names(left_out: Collection[str], saved: Collection[str], names: Collection[str]) -> None:
    """See that a checkpoint and what it leaves out are all of a module.

    Raises:
        RuntimeError: As torch raises for names that are missing or unexpected.
    """
    missing = [name for name in names if name not in saved and name not in left_out]
    unexpected = [name for name in saved if name not in names]
    if missing or unexpected:
        raise RuntimeError(
            "checkpoint without a base (checkpoint_base=False): expected the names of the module, "
            f"got missing: {missing[:_MAX_SHOWN]}, unexpected: {unexpected[:_MAX_SHOWN]}. Load it "
            "into the module that was saved, or set strict_loading = False for other names."
        )
