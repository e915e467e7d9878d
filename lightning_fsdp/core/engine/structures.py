"""Tensors inside what modules take and return: nested tuples, lists, mappings, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor


def tensors_in(*structures: Any) -> list[Tensor]:
    """The tensors of nested tuples, lists, mappings and dataclasses, in order."""
    found: list[Tensor] = []
    for structure in structures:
        found += [structure] if isinstance(structure, Tensor) else tensors_in(*_parts(structure)[1])
    return found


def map_tensors(structure: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``structure`` with every tensor replaced; the same object if nothing has changed.

    Visits tensors in the order of :func:`tensors_in`.
    """
    if isinstance(structure, Tensor):
        return function(structure)
    keys, values = _parts(structure)
    mapped = [function(v) if isinstance(v, Tensor) else map_tensors(v, function) for v in values]
    if all(map(operator.is_, mapped, values)):
        return structure
    return _with_values(structure, keys, mapped)


def _parts(structure: Any) -> tuple[Iterable[Any], Sequence[Any]]:
    """Keys or fields of a structure, and the values there; both empty for anything else."""
    if isinstance(structure, (list, tuple)):  # asked first: hooks meet tuples most often
        return (), structure
    if isinstance(structure, (dict, Mapping)):  # dict first: an abstract class is slow to check
        return structure.keys(), list(structure.values())
    if dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        names = [f.name for f in dataclasses.fields(structure) if hasattr(structure, f.name)]
        return names, [getattr(structure, name) for name in names]
    return (), ()


def _with_values(structure: Any, keys: Iterable[Any], values: list[Any]) -> Any:
    if isinstance(structure, (list, tuple)):
        make = type(structure)
        # A named tuple takes its values one by one.
        return make(*values) if hasattr(structure, "_fields") else make(values)
    copied = copy.copy(structure)
    # Fields of frozen dataclasses, too.
    put = operator.setitem if isinstance(structure, Mapping) else object.__setattr__
    for key, value in zip(keys, values, strict=True):
        put(copied, key, value)
    return copied
