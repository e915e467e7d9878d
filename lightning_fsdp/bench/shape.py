"""What a JSON document must look like, told by kinds, and the first place where it does not.

=============================== ====================================
``int``, ``float``, ``str``     a whole number, any number, a text
``None``                        null
``A | B``, or ``(A, B)``        either
``list[A]``, ``tuple[A, ...]``  a list of them; also ``[A]``
``tuple[A, B]``                 a list of just these
``dict[str, A]``                a mapping to them
:class:`Record`                 a mapping with names of its own
``Any``                         whatever it is
=============================== ====================================

So annotations of a dataclass are kinds of its fields. A ``Record`` is no type, and stands in a
tuple or a list.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

_MOST_SHOWN = 40  # characters of a value
_WORDS = {int: "a whole number", float: "a number", str: "a text"}


@dataclass(frozen=True)
class Record:
    """A mapping. Names that are in neither table are let through.

    Attributes:
        needed: Kinds by name, of what must be there.
        others: Of what may be absent.
    """

    needed: Mapping[str, Any]
    others: Mapping[str, Any] = field(default_factory=dict)


def record_of(of: type, *, needed: Collection[str], **kinds: Any) -> Record:
    """A dataclass as it was written down, by an older version too.

    Args:
        of: The dataclass.
        needed: Fields that must be there; others may be absent, or null.
        **kinds: Of fields, where the annotation does not say it all.
    """
    fields = {**get_type_hints(of), **kinds}
    return Record(
        {name: fields[name] for name in needed},
        {name: (kind, None) for name, kind in fields.items() if name not in needed},
    )


def find_misfit(value: Any, kind: Any, place: str = "") -> str | None:
    """What should be where, and what is there instead, of the first that does not fit.

    Args:
        value: Of JSON.
        kind: What it should be.
        place: Its name in the document.

    Returns:
        Such as ``a list for runs[0, ddp_b2_a1].ranks[1].losses, got null``; ``None`` if all fits.
    """
    if isinstance(kind, (UnionType, tuple)):
        kinds = kind if isinstance(kind, tuple) else get_args(kind)
        misfits = [find_misfit(value, each, place) for each in kinds]
        return None if None in misfits else misfits[0]
    if isinstance(kind, Record):
        return _misfit_in_record(value, kind, place)
    if isinstance(kind, list):
        return _misfit_in_list(value, (*kind, ...), place)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is dict:
        names = value if isinstance(value, dict) else ()
        return _misfit_in_record(value, Record(dict.fromkeys(names, inner[1])), place)
    if origin in (list, tuple):
        return _misfit_in_list(value, (*inner, ...) if origin is list else inner, place)
    if kind is Any or _is(value, kind):
        return None
    return _instead(_WORDS.get(kind, "null"), value, place)


def shown(value: Any) -> str:
    """A value as JSON has it, as far as it fits into a sentence."""
    text = json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def place_in(name: str, index: int, entry: Any) -> str:
    """An entry of a list; one that is of an arm by that as well."""
    arm = entry.get("arm") if isinstance(entry, dict) else None
    return f"{name}[{index}, {arm}]" if isinstance(arm, str) else f"{name}[{index}]"


def _is(value: Any, kind: Any) -> bool:
    if kind in (None, NoneType):
        return value is None
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _misfit_in_record(value: Any, kind: Record, place: str) -> str | None:
    if not isinstance(value, dict):
        return _instead("a mapping", value, place)
    named = {name: f"{place}.{name}".lstrip(".") for name in (*kind.needed, *kind.others)}
    for name in kind.needed:
        if name not in value:
            return f"{named[name]}, got none"
    kinds = {**kind.needed, **kind.others}
    return _first((value[name], kinds[name], named[name]) for name in kinds if name in value)


def _misfit_in_list(value: Any, inner: tuple[Any, ...], place: str) -> str | None:
    """``inner`` is a kind for each entry, or one for all and an ellipsis."""
    is_any_length = inner[-1] is ...
    if not isinstance(value, list):
        return _instead("a list", value, place)
    if not is_any_length and len(value) != len(inner):
        return _instead(f"a list of {len(inner)}", value, place)
    kinds = inner[:1] * len(value) if is_any_length else inner
    return _first(
        (entry, kind, place_in(place, index, entry))
        for index, (entry, kind) in enumerate(zip(value, kinds, strict=True))
    )


def _first(parts: Iterable[tuple[Any, Any, str]]) -> str | None:
    misfits = (find_misfit(*part) for part in parts)
    return next((misfit for misfit in misfits if misfit is not None), None)


def _instead(expected: str, value: Any, place: str) -> str:
    return f"{expected} for {place or 'the document'}, got {shown(value)}"
