"""The list of probes, and what they are written with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.guide.subjects import Engine, Outcome, Run, told

Probe = Callable[[Engine], Outcome]


@dataclass(frozen=True)
class Behaviour:
    """A line of a table.

    Attributes:
        topic: Which table.
        claim: What is done, or asked.
        probe: Does it.
    """

    topic: str
    claim: str
    probe: Probe


BEHAVIOURS: dict[str, Behaviour] = {}


def behaviour(topic: str, claim: str) -> Callable[[Probe], Probe]:
    """Register a probe under its function's name."""

    def register(probe: Probe) -> Probe:
        BEHAVIOURS[probe.__name__] = Behaviour(topic, claim, probe)
        return probe

    return register


def seen(topic: str, claim: str) -> Callable[[Callable[[Run], str]], Probe]:
    """Register a function that looks at a freshly sharded model."""

    def register(look: Callable[[Run], str]) -> Probe:
        def probe(engine: Engine) -> Outcome:
            run = Run(engine)

            def sharded() -> str:
                run.shard()
                return look(run)

            return told(run, sharded)

        BEHAVIOURS[look.__name__] = Behaviour(topic, claim, probe)
        return probe

    return register


def on_each_rank(mine: object) -> str:
    """What every rank saw: once if all saw the same."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return str(every[0]) if len(set(every)) == 1 else " and ".join(map(str, every))


def code(text: object) -> str:
    return f"`{text}`"


def dtype(tensor: Tensor | None) -> str:
    return "none" if tensor is None else str(tensor.dtype).removeprefix("torch.")
