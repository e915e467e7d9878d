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

from lightning_fsdp.bench.rank_measurement import RankMeasurement
from lightning_fsdp.bench.report import Row
from lightning_fsdp.bench.results import Results
from lightning_fsdp.bench.shape import Record, find_misfit, place_in, record_of, shown
from lightning_fsdp.bench.theory import Demand

_RANK = record_of(
    RankMeasurement,
    needed=("losses", "step_s", "step_tokens"),
    losses=list[float | None],  # one that was no number is null
    units=Any,  # nothing is drawn of them, and older ones are shorter
)
_ROW = record_of(
    Row,
    needed=("arm", "engine", "zero_stage", "batch_size", "grad_accum", "num_processes"),
    theory=record_of(Demand, needed=()),
)
_DOCUMENT = Record(
    {
        "command": str,
        "date": str,
        "machine": Record({"processor": str, "cores": int | None}, {"gpus": list[str]}),
        "versions": Record({"torch": str, "lightning": str}),
        "rows": [_ROW],
    },
    {
        "workload": Record({}, {"num_ranks": int | None, "precision": str}),
        "runs": [Record({"arm": str}, {"ranks": [_RANK]})],
    },
)


def read(out: Path) -> Results:
    """The results in a folder.

    Raises:
        ValueError: There are none, or they cannot be read, or are damaged.
    """
    path = out / "results.json"
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{out}: expected results.json of the benchmark, got none.") from error
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got: {error}") from error
    wrong = find_misfit(document, _DOCUMENT) or _find_contradiction(document)
    if wrong is not None:
        raise ValueError(
            f"{path}: expected the results of `python -m lightning_fsdp.bench`, with {wrong}. "
            f"Measure again, or name another folder."
        )
    return Results(document)


def _find_contradiction(document: Mapping[str, Any]) -> str | None:
    """Figures that fit and cannot be, told as :func:`find_misfit` does."""
    for index, row in enumerate(document["rows"]):
        shape = [row["batch_size"], row["grad_accum"]]
        if min(shape) < 1:
            place = place_in("rows", index, row)
            return f"batch_size and grad_accum of at least 1 for {place}, got {shown(shape)}"
    for index, run in enumerate(document.get("runs", [])):
        place, ranks = place_in("runs", index, run), run.get("ranks", [])
        lengths = [len(rank[name]) for rank in ranks for name in ("step_s", "step_tokens")]
        if len(set(lengths)) > 1:
            return f"equally many step_s and step_tokens in all ranks of {place}, got {lengths}"
        for number, rank in enumerate(ranks):
            step_s = rank["step_s"]
            if not step_s or not all(0 < seconds < math.inf for seconds in step_s):
                where = f"{place}.ranks[{number}].step_s"
                return f"timed steps of more than 0 seconds for {where}, got {shown(step_s)}"
    return None
