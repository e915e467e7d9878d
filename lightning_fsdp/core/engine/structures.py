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
    elif isinstance(structure, Mapping):
        for value in structure.values():
            yield from tensors_in(value)
    elif isinstance(structure, (list, tuple)):
        for value in structure:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        for field in dataclasses.fields(structure):
            yield from tensors_in(getattr(structure, field.name, None))


def map_tensors(structure: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``structure`` with every tensor replaced; the same object where nothing changed.

    Visits tensors in the order of :func:`tensors_in`.
    """
    if isinstance(structure, Tensor):
        return function(structure)
    if isinstance(structure, Mapping):
        items = {key: map_tensors(value, function) for key, value in structure.items()}
        return _with_items(structure, items)
    if isinstance(structure, (list, tuple)):
        return _with_values(structure, [map_tensors(value, function) for value in structure])
    if dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        names = [field.name for field in dataclasses.fields(structure)]
        fields = {name: getattr(structure, name) for name in names if hasattr(structure, name)}
        mapped = {name: map_tensors(value, function) for name, value in fields.items()}
        return _with_fields(structure, fields, mapped)
    return structure


def _with_items(structure: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if all(items[key] is value for key, value in structure.items()):
        return structure
    if type(structure) is dict:
        return items
    copied: Any = copy.copy(structure)
    for key, value in items.items():
        copied[key] = value
    return copied


def _with_values(structure: list[Any] | tuple[Any, ...], values: list[Any]) -> Any:
    if all(new is old for new, old in zip(values, structure, strict=True)):
        return structure
    if hasattr(structure, "_fields"):  # a named tuple takes its values one by one
        return type(structure)(*values)
    return type(structure)(values)


def _with_fields(structure: Any, fields: dict[str, Any], mapped: dict[str, Any]) -> Any:
    if all(mapped[name] is value for name, value in fields.items()):
        return structure
    copied = copy.copy(structure)
    for name, value in mapped.items():
        object.__setattr__(copied, name, value)  # frozen dataclasses too
    return copied
