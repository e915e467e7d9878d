"""What one rank of an arm found in the benchmark of optimizers, and the engines that it knows."""

from __future__ import annotations

from dataclasses import dataclass, field

ENGINES = ("fsdp2", "scratch")


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
        resting_bytes: Of tensors after the last step.
        peak_bytes: Most bytes of tensors alive at once.
        rss_bytes: Largest resident size seen.
    """

    arm: str
    rank: int
    losses: list[float]
    weights: dict[str, str]
    trained: list[str]
    num_entries: int
    num_held: int
    phases: list[Phase]
    resting_bytes: int = field(init=False)
    peak_bytes: int = field(init=False)
    rss_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.resting_bytes = self.phases[-1].live_bytes[-1] if self.phases else 0
        self.peak_bytes = max((n for phase in self.phases for n in phase.live_bytes), default=0)
        self.rss_bytes = max((n for phase in self.phases for n in phase.rss_bytes), default=0)
