"""Tensors inside of what modules take and return: tuples, lists, mappings, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(structure: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(structure, Tensor):
        yield structure
    else:
        for _, value in _items(structure):
            yield from tensors_in(value)


def map_tensors(structure: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``structure`` with every tensor replaced; the same object where nothing changed.

    Visits tensors in the order of :func:`tensors_in`.
    """
    if isinstance(structure, Tensor):
        return function(structure)
    items = _items(structure)
    if not items:
        return structure
    mapped = [(key, map_tensors(value, function)) for key, value in items]
    if all(new is old for (_, new), (_, old) in zip(mapped, items, strict=True)):
        return structure
    return _with_items(structure, mapped)


def _items(structure: Any) -> list[tuple[Any, Any]]:
    """What a structure holds, by key, index or field; nothing where it is none."""
    if isinstance(structure, Mapping):
        return list(structure.items())
    if isinstance(structure, (list, tuple)):
        return list(enumerate(structure))
    if dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        names = [field.name for field in dataclasses.fields(structure)]
        return [(name, getattr(structure, name)) for name in names if hasattr(structure, name)]
    return []


def _with_items(structure: Any, items: list[tuple[Any, Any]]) -> Any:
    if isinstance(structure, (list, tuple)):
        values, make = [value for _, value in items], type(structure)
        # A named tuple takes its values one by one.
        return make(*values) if hasattr(structure, "_fields") else make(values)
    copied = copy.copy(structure)
    for key, value in items:
        if isinstance(structure, Mapping):
            copied[key] = value
        else:
            object.__setattr__(copied, key, value)  # frozen dataclasses too
    return copied
