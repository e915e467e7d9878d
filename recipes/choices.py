"""What could have been meant by a name that there is not: the closest first.

Names are those of options, of classes that an option takes, and of options of such a class.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

from jsonargparse import ArgumentParser

import lightning_fsdp
import recipes


def close_to(name: str, choices: Iterable[str]) -> list[str]:
    """Those whose last part is spelt almost like that of ``name``, the closest first."""
    by_last = {_last(choice): choice for choice in choices}
    return [by_last[last] for last in difflib.get_close_matches(_last(name), by_last)]


def _last(path: str) -> str:
    return re.split(r"[./]", path.removesuffix(".yaml"))[-1]


def first_unknown(name: str, known: Iterable[str]) -> tuple[str, list[str]] | None:
    """Where a dotted name leaves the tree of those that are known.

    Args:
        name: Such as ``data.batchsize``.
        known: Such as ``data.batch_size``.

    Returns:
        The name up to its first part that is not known, and the parts that there are in that
        place; ``None`` where all parts are known.
    """
    known, prefix = list(known), ""
    for part in name.split("."):
        there = {other[len(prefix) :].split(".")[0] for other in known if other.startswith(prefix)}
        if part not in there:
            return prefix + part, sorted(there)
        prefix += f"{part}."
    return None


def options_of(class_path: str) -> list[str]:
    """Dotted names of the options that a class takes from the command line."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(find(class_path))
    return list(parser.get_defaults().keys())


def classes_of(bases: Sequence[str]) -> list[str]:
    """Paths of the public classes below ``bases``: of this project, of Lightning, of torch."""
    for name in lightning_fsdp.__all__:  # which are imported when they are used
        getattr(lightning_fsdp, name)
    for module in pkgutil.iter_modules(recipes.__path__, "recipes."):
        importlib.import_module(module.name)
    return sorted({_public_path(cls) for base in bases for cls in _below(find(base))} - {""})


def of_this_project(path: str) -> bool:
    """Whether a path of :func:`classes_of` is one of the package's or the recipes' own."""
    return path.startswith("recipes.") or path in {
        f"lightning_fsdp.{n}" for n in lightning_fsdp.__all__
    }


def find(class_path: str) -> type:
    """The class of a path, which has to exist."""
    module, _, name = class_path.rpartition(".")
    found: type = getattr(importlib.import_module(module), name)
    return found


def _below(base: type) -> Iterator[type]:
    derived: list[type] = type.__subclasses__(base)
    for cls in derived:
        yield cls
        yield from _below(cls)


def _public_path(cls: type) -> str:
    """The shortest path that the class can be had by; empty if only private ones lead to it."""
    parts = cls.__module__.split(".")
    for length in range(1, len(parts) + 1):
        module = ".".join(parts[:length])
        if getattr(sys.modules.get(module), cls.__name__, None) is cls:
            path = f"{module}.{cls.__name__}"
            return "" if "._" in path or path.startswith("_") else path
    return ""
