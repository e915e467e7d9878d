"""Why a rank gave nothing: what it raised, known by its type, not by what it says."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
        led_to_it: list[BaseException] = []
        link: BaseException | None = exception
        while link is not None and link not in led_to_it:  # a chain may close
            led_to_it.append(link)
            link = link.__cause__ or link.__context__
        of_memory = [e for e in led_to_it if isinstance(e, (torch.OutOfMemoryError, MemoryError))]
        shown = next(iter(of_memory), exception)
        module, name = type(shown).__module__, type(shown).__qualname__
        full_name = name if module == "builtins" else f"{module}.{name}"
        message = str(shown).strip().partition("\n")[0]
        return cls(rank, full_name, message, is_out_of_memory=bool(of_memory))
