"""``results.json``, read and checked once, so that tables and pictures need not.

What was measured by an older version may lack fields, and what was not measured is null. All else
that does not fit is damage, and named.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from lightning_fsdp.bench.rank_measurement import RankMeasurement
from lightning_fsdp.bench.report import Row
from lightning_fsdp.bench.results import Results
from lightning_fsdp.bench.schema import Schema, find_misfit, place_in, schema_of
from lightning_fsdp.bench.theory import Demand

_Rank: Any = schema_of(
    RankMeasurement,
    needed=("losses", "step_s", "step_tokens"),
    losses=list[float | None],  # one that was no number is null
    units=Any,  # nothing is drawn of them, and older ones are shorter
)
_Row: Any = schema_of(
    Row,
    needed=("arm", "engine", "zero_stage", "batch_size", "grad_accum", "num_processes"),
    theory=schema_of(Demand, needed=()),
)


class _Machine(Schema):
    processor: str
    cores: int | None
    gpus: list[str] = Field(default_factory=list)


class _Versions(Schema):
    torch: str
    lightning: str


class _Workload(Schema):
    num_ranks: int | None = None
    precision: str = ""


class _Run(Schema):
    arm: str
    ranks: list[_Rank] = Field(default_factory=list)


class _Document(Schema):
    command: str
    date: str
    machine: _Machine
    versions: _Versions
    workload: _Workload = Field(default_factory=_Workload)
    rows: list[_Row]
    runs: list[_Run] = Field(default_factory=list)


def read(out: Path) -> Results:
    """The results in a folder.

    Raises:
        ValueError: There are none, or they cannot be read, or are damaged.
    """
    path = out / "results.json"
    try:
        text = path.read_text()
        document = json.loads(text)
    except FileNotFoundError as error:
        raise ValueError(
            f"{out}: expected results.json of the benchmark, got none. Name another folder."
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: expected JSON, got: {error}. Measure again, or name another folder."
        ) from error
    wrong = find_misfit(text, _Document) or _find_contradiction(document)
    if wrong is not None:
        raise ValueError(
            f"{path}: expected the results of `python -m lightning_fsdp.bench`, got {wrong}. "
            f"Measure again, or name another folder."
        )
    return Results(document)


def _find_contradiction(document: Mapping[str, Any]) -> str | None:
    """Figures that fit and cannot be, told as :func:`find_misfit` does."""
    for index, row in enumerate(document["rows"]):
        for name in ("batch_size", "grad_accum"):
            if row[name] < 1:
                return f"{place_in(document, 'rows', index, name)} (at least 1, got {row[name]})"
    for index, run in enumerate(document.get("runs", [])):
        place, ranks = place_in(document, "runs", index), run.get("ranks", [])
        lengths = [len(rank[name]) for rank in ranks for name in ("step_s", "step_tokens")]
        if len(set(lengths)) > 1:
            return f"{place} (step_s and step_tokens of all ranks are equally many, got {lengths})"
        for number, rank in enumerate(ranks):
            where = f"{place}.ranks[{number}].step_s"
            if not rank["step_s"]:
                return f"{where} (without a timed step)"
            for step, seconds in enumerate(rank["step_s"]):
                if not 0 < seconds < math.inf:
                    return f"{where}[{step}] (a finite time of more than 0 seconds, got {seconds})"
    return None
