"""What cells say together: one engine against another, over all W, and whether it was expected.

``expected.json`` records, per torch version, what does not work:

    {"2.13": [{"engine": "fsdp1", "row": "reduced-once", "why": "..."}]}

An entry may also name ``zero_stage``, ``dtype``, ``model`` and ``world_size``; without, it is for
all of them. Everything else is expected to work.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lightning_fsdp.compare.cases import DTYPES
from lightning_fsdp.compare.models import MODELS
from lightning_fsdp.compare.rows import ROWS, Kind
from lightning_fsdp.compare.runner import Cell

K = TypeVar("K")
_OLDER_FIRST = ("fsdp1", "fsdp2", "scratch")

_KEYS: dict[str, list[Any]] = {
    "engine": [],
    "row": list(ROWS),
    "zero_stage": [2, 3],
    "dtype": list(DTYPES),
    "model": list(MODELS),
    "world_size": [],
    "why": [],
}
"""Of an entry, each with its choices, where those are few."""

Known = list[dict[str, Any]]
"""What does not work, of one torch version."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One test under two engines, over all numbers of ranks that could be run.

    Attributes:
        before: An engine.
        after: Another one.
        row: Key of the test.
        zero_stage: Of both.
        dtype: Of both.
        model: Of both.
        verdict: See :func:`verdict_of`; ``not run`` if there were too few devices for any.
        expected: What the recorded expectation makes it.
    """

    before: str
    after: str
    row: str
    zero_stage: int
    dtype: str
    model: str
    verdict: str
    expected: str


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """How much of what there is was right, of one case at one number of ranks.

    Attributes:
        parameters: Parameters, over all tests of parameters.
        gradients: Gradients, over all tests of gradients.
        micro_batches: Micro-batches and their sums.
    """

    parameters: float | None
    gradients: float | None
    micro_batches: float | None


def verdict_of(works_before: bool, works_after: bool) -> str:
    """Two engines on one test."""
    if works_before:
        return "both work" if works_after else "regression"
    return "improvement" if works_after else "both fail"


def works(cells: Sequence[Cell]) -> bool | None:
    """One test of one case: whether it passed at every number of ranks that could be run."""
    run = [cell for cell in cells if cell.status != "skipped"]
    return all(cell.status == "passed" for cell in run) if run else None


def grouped(cells: Iterable[Cell], key: Callable[[Cell], K]) -> dict[K, list[Cell]]:
    """Cells by what they have in common, in their order."""
    groups: dict[K, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    return groups


def compare(cells: Sequence[Cell], known: Known) -> list[Comparison]:
    """All pairs of engines on all tests; the older engine before the newer."""
    of = grouped(cells, lambda cell: (cell.case, cell.row))
    engines = sorted(dict.fromkeys(case.engine for case, _ in of), key=_age)
    comparisons = []
    for before, after in itertools.combinations(engines, 2):
        for (case, row), mine in of.items():
            twin = replace(case, engine=after)
            if case.engine != before or (twin, row) not in of:
                continue
            first, second = works(mine), works(of[twin, row])
            is_run = first is not None and second is not None
            comparisons.append(
                Comparison(
                    before=before,
                    after=after,
                    row=row,
                    zero_stage=case.zero_stage,
                    dtype=case.dtype,
                    model=case.model,
                    verdict=verdict_of(bool(first), bool(second)) if is_run else "not run",
                    expected=verdict_of(
                        not any(is_known(cell, known) for cell in mine),
                        not any(is_known(cell, known) for cell in of[twin, row]),
                    ),
                )
            )
    return comparisons


def surprises(cells: Sequence[Cell], known: Known) -> list[str]:
    """What differs from the expectation, in words, and every crash; empty if there is none."""
    found: dict[str, str] = {}  # the first of a test's, as all W mostly say the same
    for cell in cells:
        name, is_recorded = f"{cell.case.name}, {ROWS[cell.row].name}", is_known(cell, known)
        if cell.status == "crashed" or (cell.status == "failed" and not is_recorded):
            found.setdefault(name, f"{cell.status} at W={cell.world_size}: {cell.reason}")
        elif cell.status == "passed" and is_recorded:
            found.setdefault(name, f"works at W={cell.world_size}, but is recorded not to")
    return [f"{name}: {what}" for name, what in found.items()]


def is_known(cell: Cell, known: Known) -> bool:
    """Whether a test of a case is recorded not to work."""
    facts = {**vars(cell.case), "row": cell.row, "world_size": cell.world_size}
    return any(
        all(facts[key] == value for key, value in entry.items() if key != "why") for entry in known
    )


def ratios_of(cells: Sequence[Cell]) -> Ratios:
    """Of one case at one number of ranks."""

    def ratio(kind: Kind) -> float | None:
        counted = [c for c in cells if ROWS[c.row].kind == kind and c.status != "skipped"]
        total = sum(cell.total for cell in counted)
        return sum(cell.right for cell in counted) / total if total else None

    return Ratios(
        parameters=ratio("parameters"),
        gradients=ratio("gradients"),
        micro_batches=ratio("micro-batches"),
    )


def expectation(torch_version: str, path: Path | None = None) -> tuple[str, Known]:
    """The record of the newest version that is not newer, or else of the oldest.

    Args:
        torch_version: Such as ``2.13.0+cpu``.
        path: Of the file; ``None``: the package's own.

    Returns:
        Of which version, and what does not work there.

    Raises:
        OSError: The file cannot be read.
        ValueError: It holds something else.
    """
    path = path or Path(__file__).with_name("expected.json")
    recorded: dict[str, Known] = json.loads(path.read_text())
    _require_records(recorded)
    by_age = sorted(recorded, key=_number)
    not_newer = [v for v in by_age if _number(v) <= _number(torch_version)]
    version = not_newer[-1] if not_newer else by_age[0]
    return version, recorded[version]


def _require_records(recorded: Any) -> None:
    """Check what a file holds."""
    if not isinstance(recorded, dict) or not recorded:
        raise ValueError(
            f'expected lists by version of torch, such as {{"2.13": []}}, got {recorded}'
        )
    for version, known in recorded.items():
        if not re.fullmatch(r"\d+\.\d+(\..*)?", version) or not isinstance(known, list):
            raise ValueError(f"{version!r}: expected a version such as '2.13' with a list")
        for entry in known:
            place = f"{version!r}: {json.dumps(entry)}"
            if not isinstance(entry, dict) or not {"engine", "row"} <= entry.keys():
                raise ValueError(f"{place}: expected an object with 'engine' and 'row'")
            for key, value in entry.items():
                if key not in _KEYS:
                    raise ValueError(f"{place}: expected some of {', '.join(_KEYS)}, got {key!r}")
                if (choices := _KEYS[key]) and value not in choices:
                    shown = ", ".join(map(str, choices))
                    raise ValueError(f"{place}: {key}: expected one of {shown}, got {value!r}")


def _number(version: str) -> tuple[int, int]:
    major, minor = version.partition("+")[0].split(".")[:2]
    return int(major), int(minor)


def _age(engine: str) -> int:
    return _OLDER_FIRST.index(engine) if engine in _OLDER_FIRST else len(_OLDER_FIRST)
