"""Which arms there are for optimizers built before sharding, and what one rank of an arm found."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, field

ENGINES = ("fsdp2", "scratch")
KINDS = ("after", "before_fixed", "before_not_fixed", "lightning")
PEER = "fsdp2_accelerate"
NOT_FIXED = "fsdp2_before_not_fixed"
"""The arm that trains nothing; it shows why the others are needed."""


def choose_arms(engines: Iterable[str]) -> list[str]:
    """The arms of some engines; accelerate's if it is installed."""
    arms = [f"{engine}_{kind}" for engine in engines for kind in KINDS]
    if "fsdp2" in engines and importlib.util.find_spec("accelerate") is not None:
        arms.append(PEER)
    return arms


def engine_of(arm: str) -> str:
    """Which engine an arm shards with."""
    return arm.partition("_")[0]


def reference_of(arm: str) -> str:
    """The arm that an arm is held against."""
    return f"{engine_of(arm)}_after"


@dataclass
class Phase:
    """A stretch of an arm.

    Attributes:
        name: ``build``, ``shard``, ``step 1``, ...
        live_bytes: Of tensors, after each operation on them.
        rss_bytes: The process's resident size, now and then.
    """

    name: str
    live_bytes: list[int] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)


@dataclass
class Outcome:
    """What one rank found.

    Attributes:
        losses: Of each step, on this rank.
        weights: Digest of each whole parameter at the end.
        trained: Parameters that changed.
        num_entries: Parameters that the optimizer holds.
        num_held: Those of them that are the model's.
        phases: Memory over time.
    """

    arm: str
    rank: int
    losses: list[float]
    weights: dict[str, str]
    trained: list[str]
    num_entries: int
    num_held: int
    phases: list[Phase]

    @property
    def peak_bytes(self) -> int:
        """Most bytes of tensors alive at once."""
        return max(max(phase.live_bytes, default=0) for phase in self.phases)

    @property
    def resting_bytes(self) -> int:
        """Of tensors after the last step."""
        return self.phases[-1].live_bytes[-1]

    @property
    def rss_bytes(self) -> int:
        """Largest resident size seen."""
        return max(max(phase.rss_bytes, default=0) for phase in self.phases)
