"""Which cases the part ``speed`` has, in the order in which they tell most, and their networks.

A setting is a model, with blocks as they are or compiled, with activations kept or recomputed. Each
setting is trained by every arm on one rank, and as the first of 8 and of 64 simulated ones.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from lightning_fsdp.simulate.network import Network

MODELS = ("qwen2.5-1.5b", "gpt2-small", "gpt2-xl")
ARMS = (
    "unsharded", "scratch_zero3", "fsdp2_zero3", "scratch_zero2", "fsdp2_zero2",
    "ddp", "fsdp1_zero3", "fsdp1_zero2",
)  # fmt: skip
WORLD_SIZES = (1, 8, 64)
BATCH_OF = {"qwen2.5-1.5b": 8, "gpt2-small": 16, "gpt2-xl": 8}  # sequences per rank
SEQ_LEN = 1024
SMALL_BATCH, SMALL_SEQ_LEN = 2, 32  # where --device is cpu
PRECISION = "bf16-true: parameters, gradients and AdamW's state in bfloat16, in every arm"

_RANKS_PER_HOST = 8
_IN_HOST_GB_S, _BETWEEN_HOSTS_GB_S, _LATENCY_US = 400.0, 50.0, 5.0

# A setting that tells of a limit: of the device, of the host, of memory.
_TELLING = (("qwen2.5-1.5b", True), ("gpt2-small", False), ("gpt2-xl", True))
_STEPS_BACK = dict(zip(ARMS, (0, 0, 0, 1, 1, 2, 2, 3), strict=True))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What every arm of a comparison has in common.

    Attributes:
        model: One of :data:`MODELS`.
        is_compiled: Each block's ``forward`` is compiled.
        is_recomputed: Each block keeps its inputs alone for the backward.
    """

    model: str
    is_compiled: bool
    is_recomputed: bool

    @property
    def name(self) -> str:
        """Such as ``gpt2-xl compiled recomputed``."""
        words = [self.model, "compiled" if self.is_compiled else "eager"]
        return " ".join([*words, "recomputed"] if self.is_recomputed else words)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One arm in one setting among some number of ranks.

    Attributes:
        arm: One of :data:`ARMS`.
        world_size: 1 is a real rank over NCCL; among more, the others are simulated.
    """

    setting: Setting
    arm: str
    world_size: int

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.setting.name}, {self.arm} of {self.world_size}"


def network_of(world_size: int) -> Network:
    """Hosts of 8 ranks."""
    return Network(
        world_size=world_size,
        bandwidth_gb_s=_IN_HOST_GB_S,
        latency_us=_LATENCY_US,
        num_hosts=max(1, world_size // _RANKS_PER_HOST),
        host_bandwidth_gb_s=_BETWEEN_HOSTS_GB_S,
    )


def assumptions(device_type: str) -> dict[str, Any]:
    """What a reader of the figures has to know; JSON."""
    networks = {n: network_of(n).assumptions(device_type) for n in WORLD_SIZES if n > 1}
    return {"precision": PRECISION, "networks": networks}


def all_cases() -> list[Case]:
    """What tells most first: the goals at one rank, then step by step what is further from them."""
    cases = [
        Case(setting=Setting(model=model, is_compiled=c, is_recomputed=r), arm=arm, world_size=n)
        for r, c, model, n, arm in itertools.product(
            (False, True), (True, False), MODELS, WORLD_SIZES, ARMS
        )
        if n == 1 or arm != "unsharded"
    ]
    return sorted(cases, key=_distance)  # stable: what is compared stays side by side


def small_cases() -> list[Case]:
    """Every arm once, and every kind of setting and group once."""
    eager = Setting(model="gpt2-small", is_compiled=False, is_recomputed=False)
    both = Setting(model="qwen2.5-1.5b", is_compiled=True, is_recomputed=True)
    cases = [Case(setting=eager, arm=arm, world_size=1) for arm in ARMS]
    cases += [Case(setting=eager, arm=arm, world_size=8) for arm in ARMS[1:3]]
    return [*cases, Case(setting=both, arm="scratch_zero3", world_size=64)]


def _distance(case: Case) -> int:
    setting = case.setting
    is_telling = (setting.model, setting.is_compiled) in _TELLING
    return (
        _STEPS_BACK[case.arm]
        + (0 if is_telling else 1)
        + (2 if setting.is_recomputed else 0)
        + (1 if case.world_size > 1 else 0)
    )
