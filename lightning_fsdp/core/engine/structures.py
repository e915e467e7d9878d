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
    for part in structures:
        found += [part] if isinstance(part, Tensor) else tensors_in(*parts_of(part)[1])
    return found


def map_tensors(structure: Any, function: Callable[..., Any], *, in_place: bool = False) -> Any:
    """``structure`` with every tensor replaced; the same object if nothing has changed.

    Visits tensors in the order of :func:`tensors_in`. With ``in_place``, lists, mappings and
    dataclasses are written to, and mappings that are read-only left as they are; otherwise copied.
    Tuples are made anew.
    """
    if isinstance(structure, Tensor):
        return function(structure)
    keys, values = parts_of(structure)
    mapped = [map_tensors(value, function, in_place=in_place) for value in values]
    is_fixed = in_place and isinstance(structure, Mapping) and not hasattr(structure, "__setitem__")
    if is_fixed or all(map(operator.is_, mapped, values)):
        return structure
    if isinstance(structure, tuple):
        # Without a constructor of its own, which may compute; those of torch cannot be left out.
        make: Any = type(structure)
        is_of_torch = isinstance(getattr(make, "n_fields", None), int)  # as torch.max returns
        return make(mapped) if is_of_torch else tuple.__new__(make, mapped)
    changed = structure if in_place else copy.copy(structure)
    # Fields of frozen dataclasses, too.
    put = operator.setitem if isinstance(structure, (list, Mapping)) else object.__setattr__
    for key, value in zip(keys, mapped, strict=True):
        put(changed, key, value)
    return changed


def replace_tensors(structure: Any, swaps: Mapping[Tensor, Tensor]) -> Any:
    """Put one tensor in the place of another in lists, mappings and dataclasses; make tuples anew.

    Returns:
        The same object, but for tuples; a tensor itself is swapped as well.
    """
    return map_tensors(structure, lambda tensor: swaps.get(tensor, tensor), in_place=True)


def parts_of(structure: Any) -> tuple[Iterable[Any], Sequence[Any]]:
    """Keys or fields of a structure, and the values there; both empty for anything else."""
    if isinstance(structure, (list, tuple)):  # asked first: hooks meet tuples most often
        return range(len(structure)), structure
    if isinstance(structure, (dict, Mapping)):  # dict first: an abstract class is slow to check
        return structure.keys(), list(structure.values())
    if dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        names = [f.name for f in dataclasses.fields(structure) if hasattr(structure, f.name)]
        return names, [getattr(structure, name) for name in names]
    return (), ()
