"""Why a run gave nothing: what a rank raised, known by its type, not by what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

FailureKind = Literal[
    "out of memory", "error", "timed out", "no measurement", "wrong losses", "wrong gradients"
]


@dataclass(frozen=True)
class RankFailure:
    """What a rank writes that raised.

    Attributes:
        type: Of the exception, with its module.
        message: First line of what it says.
        is_out_of_memory: By type, of the exception or of one that led to it. (torch's allocator on
            CPU raises a plain ``RuntimeError``, which is not told from others.)
    """

    rank: int
    type: str
    message: str
    is_out_of_memory: bool

    @classmethod
    def of(cls, rank: int, exception: BaseException) -> RankFailure:
        """Describe an exception, or the one among those that led to it that is about memory."""
        shown, is_out_of_memory = exception, False
        link: BaseException | None = exception
        seen: set[int] = set()
        while link is not None and id(link) not in seen and not is_out_of_memory:
            seen.add(id(link))  # a chain may close
            if isinstance(link, (torch.OutOfMemoryError, MemoryError)):
                shown, is_out_of_memory = link, True
            link = link.__cause__ or link.__context__
        lines = str(shown).strip().splitlines() or [""]
        module, name = type(shown).__module__, type(shown).__qualname__
        full_name = name if module == "builtins" else f"{module}.{name}"
        return cls(rank, full_name, lines[0], is_out_of_memory)
