"""What the parent hears of its ranks: results, errors, and the stacks of those that are stuck."""

import os
import pickle
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.rank_life import LEAVE, Limits

LEAVE_LIMIT_S = 20.0  # how long destroying the process group may take


class RankError(NamedTuple):
    """What one rank raised."""

    type_name: str
    message: str


@dataclass
class Report:
    """What the parent knows of one rank."""

    kind: str = "silent"  # silent | done | error | died | hung
    result: Any = None
    error: RankError | None = None
    text: str = ""


def listen(
    ranks: list[tuple[Any, Connection]], reports: list[Report], limits: Limits, folder: str
) -> None:
    deadline = time.monotonic() + limits.timeout_s
    pending = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while pending and (remaining_s := deadline - time.monotonic()) > 0:
        for connection in wait(list(pending), timeout=remaining_s):
            rank = pending.pop(connection)  # type: ignore[arg-type]
            report = reports[rank]
            try:
                _read_report(connection, report)  # type: ignore[arg-type]
            except (EOFError, ConnectionError):
                process = ranks[rank][0]
                process.join(5)
                report.kind = "died"
                report.text = f"{_exit_words(process.exitcode)}\n{_stacks(folder, rank)}"
            if report.kind != "done":
                deadline = min(deadline, time.monotonic() + limits.grace_s)
    for rank in pending.values():
        os.kill(ranks[rank][0].pid, signal.SIGUSR1)
    if pending:
        time.sleep(0.5)  # for the signal handlers to write
    for rank in pending.values():
        reports[rank].kind = "hung"
        reports[rank].text = _stacks(folder, rank)


def _read_report(connection: Connection, report: Report) -> None:
    kind, *rest = pickle.loads(connection.recv_bytes())
    report.kind = kind
    if kind == "done":
        (payload,) = rest
        report.result = pickle.loads(payload)
    else:
        report.error, report.text = RankError(*rest[0]), rest[1]


def let_leave(ranks: list[tuple[Any, Connection]], reports: list[Report], folder: str) -> None:
    for _, connection in ranks:
        connection.send_bytes(LEAVE)
    deadline = time.monotonic() + LEAVE_LIMIT_S
    for rank, (process, _) in enumerate(ranks):
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.5)
            reports[rank].kind = "hung"
            reports[rank].text = "while leaving\n" + _stacks(folder, rank)
        elif process.exitcode != 0:
            reports[rank].kind = "died"
            words = _exit_words(process.exitcode)
            reports[rank].text = f"while leaving: {words}\n{_stacks(folder, rank)}"


def describe(fn: Callable[..., Any], reports: list[Report]) -> str:
    lines = [f"{fn.__name__} on {len(reports)} ranks"]
    for rank, report in enumerate(reports):
        lines.append(f"--- rank {rank}: {report.kind} ---")
        same = next((r for r in range(rank) if _is_same(reports[r], report)), None)
        if same is not None:
            lines.append(f"as rank {same}: {report.text.splitlines()[-1]}")
        elif report.text:
            lines.append(report.text.rstrip())
    return "\n".join(lines)


def _is_same(one: Report, other: Report) -> bool:
    """Whether two ranks failed in the same place, whatever their messages say."""
    if one.kind != "error" or other.kind != "error":
        return False
    places = [[line for line in r.text.splitlines() if line.startswith("  ")] for r in (one, other)]
    return places[0] == places[1]


def _stacks(folder: str, rank: int) -> str:
    path = Path(folder) / f"stacks-{rank}"
    return path.read_text(errors="replace") if path.exists() else ""


def _exit_words(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"exit status {exitcode}"
