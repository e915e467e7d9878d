"""What each engine does, found out by doing it: one function per claim, run on two ranks.

A probe takes an engine and returns what it saw, in words for a table. It never says what should
be; where values can be right or wrong, plain torch in one process decides. Each runs on two fresh
ranks, so that none sees what another has left.
"""

from __future__ import annotations

import logging
import re
import warnings
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

from benchmarks.guide.behaviours import (
    access,
    checkpoints,
    debugging,
    models,
    precision,
    wrapping,
)
from benchmarks.guide.probes import BEHAVIOURS
from benchmarks.guide.subjects import ENGINES, HANGS, Outcome
from tests.support.ranks import RanksFailed, run_on_ranks

__all__ = [  # those that register their probes, and what runs them
    "access", "checkpoints", "debugging", "models", "precision", "wrapping",
    "run_one", "run_all",
]  # fmt: skip

_GROUP_TIMEOUT_S = 4.0  # after which a probe that hangs is one that hangs


def run_one(name: str, engine: str) -> Outcome:
    """A probe on two fresh ranks; what they saw, or how they ended."""
    try:
        outcomes = run_on_ranks(
            _on_rank, 2, name, engine, timeout_s=60.0, group_timeout_s=_GROUP_TIMEOUT_S
        )
    except RanksFailed as failure:
        ends = re.findall(r"killed by (SIG\w+)", str(failure))
        if not ends:
            raise
        return Outcome(f"**killed** by {ends[0]}")
    hanging = [o for o in outcomes if o.said == HANGS]  # the other sees its peer leave
    outcomes = hanging or outcomes
    said = dict.fromkeys(outcome.said for outcome in outcomes)
    return Outcome(" and ".join(said), outcomes[0].detail)


def _on_rank(rank: int, world_size: int, name: str, engine: str) -> Outcome:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    return BEHAVIOURS[name].probe(ENGINES[engine])


def run_all() -> list[dict[str, Any]]:
    """Every probe under every engine; JSON."""
    rows = []
    for name, behaviour in tqdm(BEHAVIOURS.items(), desc="behaviours", disable=None):
        outcomes = {engine: asdict(run_one(name, engine)) for engine in ENGINES}
        rows.append({"name": name, "topic": behaviour.topic, "claim": behaviour.claim, **outcomes})
    return rows
