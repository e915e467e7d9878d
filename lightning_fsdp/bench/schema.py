"""What a JSON document must look like, and the first place where it does not."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

_MOST_SHOWN = 40  # characters of a value


class Schema(BaseModel):
    """A mapping with names of its own; others are let through. Nothing is converted."""

    model_config = ConfigDict(strict=True)


def schema_of(of: type, *, needed: Collection[str], **kinds: Any) -> type[Schema]:
    """A dataclass as it was written down, by an older version too.

    Args:
        of: The dataclass.
        needed: Fields that must be there; others may be absent, or null.
        **kinds: Of fields, where the annotation does not say it all.
    """
    fields: dict[str, Any] = {
        name: (kind, ...) if name in needed else (kind | None, None)
        for name, kind in {**get_type_hints(of), **kinds}.items()
    }
    return create_model(of.__name__, __base__=Schema, **fields)


def find_misfit(text: str, schema: type[Schema]) -> str | None:
    """What is wrong where, of the first that does not fit.

    Args:
        text: JSON.
        schema: Of the document.

    Returns:
        Such as ``runs[0, ddp_b2_a1].ranks[1].losses (input should be a valid list, got null)``;
        ``None`` if all fits.
    """
    try:
        schema.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        says = first["msg"][0].lower() + first["msg"][1:]
        if first["type"] != "missing":
            says += f", got {shown(first['input'])}"
        return f"{place_in(json.loads(text), *first['loc'])} ({says})"
    return None


def place_in(document: Any, *path: str | int) -> str:
    """The name of a place; entries of lists that are of an arm have its name in it."""
    place, here = "", document
    for step in path:
        try:
            here = here[step]
        except (IndexError, KeyError):  # it is missing
            here = None
        if isinstance(step, str):
            place += f".{step}"
        else:
            arm = here.get("arm") if isinstance(here, dict) else None
            place += f"[{step}, {arm}]" if isinstance(arm, str) else f"[{step}]"
    return place.removeprefix(".") or "the document"


def shown(value: Any) -> str:
    """A value as JSON has it, as far as it fits into a sentence."""
    text = json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
