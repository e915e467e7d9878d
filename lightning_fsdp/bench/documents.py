"""JSON of dataclasses: written as they are, and read back with the place of what does not fit.

What was measured by an older version may lack fields, and what was not measured is null: so says a
field's type, with its default. Names that a dataclass does not have are let through.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
)

from lightning_fsdp.harness.command_line import write_whole

_MOST_SHOWN = 40  # characters of a value

T = TypeVar("T")


Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Steps = Annotated[list[Seconds], Field(min_length=1)]
Loss = Annotated[float, BeforeValidator(lambda loss: math.nan if loss is None else loss)]
"""JSON has no NaN: a loss that was no number is null there."""
Figure = Annotated[
    float | None,
    AfterValidator(lambda figure: figure if figure is None or math.isfinite(figure) else None),
]
"""What is no finite number counts as not measured."""
PerStep = Annotated[float, PlainSerializer(lambda n: int(n) if float(n).is_integer() else n)]
"""Bytes or calls, a mean over steps: written as a whole number where it is one."""
Listed = Annotated[list[T], BeforeValidator(lambda found: [] if found is None else found)]
"""Where older versions have null, it is empty."""


def write(path: Path, value: object, *, indent: int | None = None) -> None:
    """Write dataclasses, or what holds them, as JSON: all of it or none, in any folder."""
    write_whole(path, TypeAdapter(type(value)).dump_json(value, indent=indent))


def write_csv(path: Path, records: Sequence[object]) -> None:
    """Dataclasses as lines; what is none is empty."""
    lines = [plain(record) for record in records]
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(lines[0]) if lines else [])
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in line.items()} for line in lines)


def _cell(value: object) -> object:
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, list):
        return " ".join("" if v is None else str(v) for v in value)
    return value


def plain(value: object) -> dict[str, Any]:
    """A dataclass as dictionaries and lists."""
    fields: dict[str, Any] = TypeAdapter(type(value)).dump_python(value, mode="json")
    return fields


def load(kind: type[T], path: Path) -> T:
    """What :func:`write` wrote in this run."""
    return TypeAdapter(kind).validate_json(path.read_bytes())


def read(kind: type[T], path: Path, *, expected: str, remedy: str, **others: str) -> T:
    """A document of any version.

    Args:
        kind: The dataclass.
        path: Of the JSON.
        expected: In words.
        remedy: What to do where it is something else.
        **others: A name that only another kind of document has -> what that is, and what to do.

    Raises:
        ValueError: It cannot be read, or is damaged: the first place that does not fit is named.
    """
    try:
        text = path.read_text()
        document = json.loads(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected JSON, got: {error}. {remedy}") from error
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)  # nothing is converted
    except ValidationError as error:
        for name, other in others.items():
            if isinstance(document, dict) and name in document:
                raise ValueError(f"{path}: expected {expected}, got {other}") from error
        first = error.errors(include_url=False)[0]
        says = first["msg"][0].lower() + first["msg"][1:]
        if first["type"] != "missing":
            says += f", got {_shown(first['input'])}"
        wrong = f"{_place_in(document, *first['loc'])} ({says})"
        raise ValueError(f"{path}: expected {expected}, got {wrong}. {remedy}") from error


def _place_in(document: Any, *path: str | int) -> str:
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


def _shown(value: Any) -> str:
    """A value as JSON has it, as far as it fits into a sentence."""
    text = json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
