"""What is compared: a case is one engine at one ZeRO stage with one precision and one model."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lightning_fsdp.compare.models import Sizes
from lightning_fsdp.config import MixedPrecisionPolicy
from lightning_fsdp.engines.base import Engine

ENGINES = {
    "scratch": "lightning_fsdp.engines.scratch:ScratchEngine",
    "fsdp1": "lightning_fsdp.engines.fsdp1:FSDP1Engine",
    "fsdp2": "lightning_fsdp.engines.fsdp2:FSDP2Engine",
}
"""Name, and where the class is. Any other engine is given by place: ``module:Class``."""

DTYPES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    "bf16-fp32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
"""Compute and reduction; main weights are fp32 in all of them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration, at any number of ranks.

    Attributes:
        engine: A name of :data:`ENGINES` or ``module:Class``.
        zero_stage: 2 or 3.
        dtype: Of :data:`DTYPES`.
        model: Of :data:`~lightning_fsdp.compare.models.MODELS`.
        sizes: Of the MLP.
    """

    engine: str
    zero_stage: int
    dtype: str
    model: str
    sizes: Sizes = field(default_factory=Sizes)

    @property
    def name(self) -> str:
        """Unique within a comparison, and good for a file name."""
        engine = self.engine.replace(":", ".")
        return f"{engine}_zero{self.zero_stage}_{self.dtype}_{self.model}"

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """Dtypes of compute and reduction."""
        return DTYPES[self.dtype]


def load_engine(engine: str) -> type[Engine]:
    """The class of an engine.

    Raises:
        ImportError: This torch has no such engine.
        TypeError: What is there is no engine.
    """
    module, _, name = ENGINES.get(engine, engine).partition(":")
    found = getattr(importlib.import_module(module), name, None)
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise TypeError(f"engine {engine!r}: expected a subclass of Engine, got {found!r}.")
    return found


def choose_cases(
    *,
    engines: Sequence[str],
    zero_stages: Sequence[int],
    dtypes: Sequence[str],
    models: Sequence[str],
    sizes: Sizes,
) -> list[Case]:
    """All combinations."""
    combinations = itertools.product(engines, zero_stages, dtypes, models)
    return [
        Case(engine=engine, zero_stage=stage, dtype=dtype, model=model, sizes=sizes)
        for engine, stage, dtype, model in dict.fromkeys(combinations)
    ]
