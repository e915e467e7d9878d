"""What is true while a pass forward, or a run of the autograd engine, lasts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.unit import Unit


@dataclass
class Running:
    """A unit in its forward: modules that have not run, and calls that have not returned."""

    waiting_for: set[nn.Module]
    was_whole: bool  # before it
    depth: int = 0


@dataclass(eq=False)
class Forward:
    """A pass."""

    depth: int = 0  # calls into sharded modules that have not returned
    running: dict[Unit, Running] = field(default_factory=dict)


@dataclass(eq=False)
class Backward:
    """A run of the autograd engine."""

    # What is called at its end, and owned by it. Nothing tells of an exception that ends it; but
    # once this is gone, so is the backward.
    ending: weakref.ref[Callable[[], None]]
    # Whether it has left each unit that it reached, by whatever way; in its order.
    has_left: dict[Unit, bool] = field(default_factory=dict)
    entered: set[Unit] = field(default_factory=set)  # at their outputs, and perhaps left again
    # With gradients to reduce, or to keep.
    unsettled: dict[FlatParameter, None] = field(default_factory=dict)
